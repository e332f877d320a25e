// What forward and backward share on the way from q.k to a logit: scaling, additive terms, dropout bits.
#pragma once
#include <cmath>
#include <cstdint>

#include "core/dropout.h"
#include "cpu/rows.h"
#include "cpu/tiles.h"

namespace tilewise {

// Constants of a call. Logits are base 2: exp(s) = 2^(s * log2 e).
struct LogitRules {
  float q_scale;    // applied to q while packing; pairs take only its sign
  float pre, post;  // see LogitTile
  float softcap;
  bool modified;    // softcap, ALiBi or bias
  bool has_addend;
  Dropout dropout;

  LogitRules(const tw_problem& p, const tw_tensors& t, bool pairs);
};

// ALiBi and bias of `rows` query rows from first_row on and `columns` keys from j on, in base 2: out [rows, panel].
// A boolean mask gives 0 or -inf.
void fill_addend(const HeadRows& head_rows, int64_t first_row, int64_t rows, int64_t j, int64_t columns, int64_t panel,
                 float* out);

// Dropout bits of query rows [first_row, first_row + rows) and keys [j, j + columns), j a multiple of 64:
// bit c of keep[r * words + c / 64].
void fill_keep(const TileKernels& kernels, const LogitRules& rules, const HeadRows& head_rows, int64_t first_row,
               int64_t rows, int64_t j, int64_t columns, int64_t words, uint64_t* keep);

}  // namespace tilewise
