// Who sees whom. THE definition of causal, window and lengths, used by every backend and by the tests.
//
// Row i of a sequence with sq queries and sk keys sits at key position i + sk - sq (bottom-right alignment): the last
// query sees the last key. Key j is visible iff  i + sk - sq - left <= j <= i + sk - sq + right  (inclusive; -1 is
// unbounded) and 0 <= j < sk. Causal is right = 0.
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace tilewise {

struct KeyRange {  // [begin, end); empty when begin >= end
  int64_t begin;
  int64_t end;
};

struct Mask {
  int64_t left = -1;   // -1 = unbounded
  int64_t right = -1;  // causal: 0

  // Keys that row i sees.
  TW_HOST_DEVICE KeyRange keys(int64_t i, int64_t seqlen_q, int64_t seqlen_k) const {
    const int64_t diagonal = i + seqlen_k - seqlen_q;
    // Compare by subtraction so that a window of 2^63 - 1 does not overflow.
    int64_t begin = (left < 0 || left >= diagonal) ? 0 : diagonal - left;
    int64_t end = (right < 0 || right >= seqlen_k - 1 - diagonal) ? seqlen_k : diagonal + right + 1;
    if (end < begin) end = begin;
    return {begin, end};
  }

  // Keys that some row of [i_begin, i_end) sees, as one range; the ranges of consecutive rows overlap or touch.
  TW_HOST_DEVICE KeyRange keys_of_rows(int64_t i_begin, int64_t i_end, int64_t seqlen_q, int64_t seqlen_k) const {
    const KeyRange first = keys(i_begin, seqlen_q, seqlen_k);
    const KeyRange last = keys(i_end - 1, seqlen_q, seqlen_k);
    return {first.begin, last.end > first.begin ? last.end : first.begin};
  }

  // Rows that may see a key of [j_begin, j_end): the transpose of keys_of_rows, for the backward pass.
  TW_HOST_DEVICE KeyRange rows_of_keys(int64_t j_begin, int64_t j_end, int64_t seqlen_q, int64_t seqlen_k) const {
    const int64_t shift = seqlen_k - seqlen_q;
    int64_t begin = (right < 0 || right >= j_begin - shift) ? 0 : j_begin - shift - right;
    int64_t end = (left < 0 || left >= seqlen_q - (j_end - shift)) ? seqlen_q : j_end - shift + left;
    if (begin > seqlen_q) begin = seqlen_q;
    if (end < begin) end = begin;
    return {begin, end};
  }
};

}  // namespace tilewise
