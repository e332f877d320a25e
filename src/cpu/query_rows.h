// Rows that no sequence owns, and the dropout mask as a tensor: the edges that every CPU kernel shares.
#pragma once
#include "core/dropout.h"
#include "core/sequence.h"

namespace tilewise {

// Zeros in x ([.., hq, d]) and -inf in lse (may be null) for packed rows outside of all sequences, holes beyond seqused_q
// and dense rows beyond it.
void clear_unused_query_rows(const tw_problem& problem, const tw_tensors& tensors, const tw_tensor& x, const tw_tensor* lse);

// Zeros in dk or dv for keys that no sequence uses.
void clear_unused_key_rows(const tw_problem& problem, const tw_tensors& tensors, const tw_tensor& x);

// dropout_mask [b, hq, sq, sk]: 1 = kept, 0 also outside of the sequence.
void write_dropout_mask(const tw_problem& problem, const tw_tensors& tensors, const Dropout& dropout);

}  // namespace tilewise
