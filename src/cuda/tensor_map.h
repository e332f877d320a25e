// Descriptions of tensors for the copy engine, made by the driver and kept.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/status.h"
#include "tilewise/tilewise.h"

namespace tilewise::cuda {

struct TensorMapRequest {
  const tw_tensor* tensor;  // [batch, row, head, column] or [row, head, column], 16-bit elements
  int64_t head_dim;         // columns that exist
  int box_rows;
  int box_panels;           // of 64 columns; > 1 only if head_dim is a multiple of 64
  int box_heads = 0;        // > 0: a box of so many heads, and heads come before panels
};

// Can the copy engine read and write this tensor? 16-byte aligned base and strides, the last one 1.
bool tensor_map_possible(const tw_tensor& tensor);

// The map with dimensions [batch, head, panel, row, column] (innermost last), or [batch, panel, head, row,
// column]. Encoding costs about a microsecond, so the latest ones of each thread are kept.
Status tensor_map(const TensorMapRequest& request, CUtensorMap* map);

// The same of a bias or boolean mask of any type: dimensions [batch, head, 1, query, key] of the problem, those that share it with stride 0. In
// a box of `box_keys` keys 16-byte pieces change places with the row, "swizzled" by its bytes: 128, 64, 32; 16: not at all.
struct BiasMapRequest {
  const tw_tensor* bias;
  int box_rows, box_keys;
};
bool bias_map_possible(const tw_problem& problem, const tw_tensor& bias);  // 16-byte aligned base and strides, keys beside each other
Status bias_map(const tw_problem& problem, const BiasMapRequest& request, CUtensorMap* map);

}  // namespace tilewise::cuda
