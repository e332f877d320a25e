// What several unit tests make their inputs with.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace tilewise {

inline tw_problem problem_of(const std::string& text) {
  tw_problem problem;
  const Status status = parse(text, &problem);
  EXPECT_TRUE(status.ok()) << status.message();
  return problem;
}

// Dense, the last dimension fastest.
inline tw_tensor view(void* data, int32_t dtype, std::vector<int64_t> shape) {
  tw_tensor x = {};
  x.data = data;
  x.dtype = dtype;
  x.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t n = shape.size(); n-- > 0; stride *= shape[n]) x.shape[n] = shape[n], x.stride[n] = stride;
  return x;
}
inline tw_tensor view(std::vector<double>& data, std::vector<int64_t> shape) { return view(data.data(), TW_FLOAT64, std::move(shape)); }
inline tw_tensor view(std::vector<float>& data, std::vector<int64_t> shape) { return view(data.data(), TW_FLOAT32, std::move(shape)); }
inline tw_tensor view(std::vector<int32_t>& data) { return view(data.data(), TW_INT32, {static_cast<int64_t>(data.size())}); }

}  // namespace tilewise
