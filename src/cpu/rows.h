// Pointers to the rows that a block packs or stores. Layouts, strides, pages, padding and grouped heads end here.
//
// The query rows of one key head are numbered R = i * group + g (query i, head hk * group + g): the heads of a group share
// packed keys, and rows that share a tile have nearly the same mask limits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/problem.h"
#include "core/sequence.h"

namespace tilewise {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
inline int64_t round_down(int64_t a, int64_t b) { return a / b * b; }

inline char* element_address(const tw_tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.data) + offset * dtype_size(tensor.dtype);
}

struct HeadRows {  // the query rows of key head `hk` in one sequence
  const tw_problem& problem;
  const tw_tensors& tensors;
  const Sequence& sequence;
  int64_t hk;
  int64_t group;

  int64_t count() const { return sequence.seqlen_q * group; }
  int64_t query(int64_t row) const { return row / group; }
  int64_t head(int64_t row) const { return hk * group + row % group; }

  char* address(const tw_tensor& x, int64_t row) const {
    return element_address(x, query_offset(problem, x, sequence, query(row), head(row)));
  }
  float* lse_address(const tw_tensor& x, int64_t row) const {
    return reinterpret_cast<float*>(element_address(x, lse_offset(problem, x, sequence, query(row), head(row))));
  }
};

// Row j of head hk in k, v, dk or dv; nullptr past the sequence.
inline char* key_address(const tw_problem& p, const tw_tensors& t, const tw_tensor& x, const Sequence& s, int64_t j,
                         int64_t hk) {
  return j < s.seqlen_k ? element_address(x, key_offset(p, t, x, s, j + s.leftpad, hk)) : nullptr;
}

// Hands out pieces of a workspace, each 64-byte aligned. With a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace tilewise
