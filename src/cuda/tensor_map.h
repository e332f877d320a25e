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

// The same of a bias or a boolean mask [batch, head, row, key]: 16-byte aligned base and strides other than 0, the last one 1.
bool bias_map_possible(const tw_tensor& bias);

// The map with dimensions [1, batch, head, row, key], dimensions of stride 0 of size 1; boxes of 64 rows of box_keys keys, 128
// bytes, or 64 of a mask.
Status bias_map(const tw_tensor& bias, int box_keys, CUtensorMap* map);

// A bias or mask as strips of 16 keys, boxes of `box_rows` queries: dimensions [batch, head, 1, query, key] (innermost last), all of them counted
// through, those that share it with stride 0. Pieces of 16 bytes change places with the row: 32-byte swizzle at 16 bits, 64-byte of float32.
struct BiasStrips {
  const void* data;
  int32_t dtype;
  int64_t shape[4], stride[4];  // [batch, head, query, key], in elements
  int box_rows;
};
bool bias_strips_possible(const BiasStrips& bias);
Status bias_strips(const BiasStrips& bias, CUtensorMap* map);

}  // namespace tilewise::cuda
