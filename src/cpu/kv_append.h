// What happens before attention over a KV cache: new keys and values are written into it, and rotary embedding turns
// the new keys and the queries.
#pragma once
#include "core/sequence.h"

namespace tilewise {

// Writes k_new and v_new at their positions of the cache (dense or paged), k_new rotated. Nothing if there is no k_new.
void append_kv(const tw_problem& problem, const tw_tensors& tensors);

// Row i of query head h, rotated in float32 if the call has a rotary embedding, rounded to q's dtype, given as float.
void rotate_query_row(const tw_problem& problem, const tw_tensors& tensors, const Sequence& sequence, int64_t i,
                      int64_t h,
                      float* out);  // [head_dim]
// The same as double, for the reference: a float64 row is rotated in float64.
void rotate_query_row(const tw_problem& problem, const tw_tensors& tensors, const Sequence& sequence, int64_t i,
                      int64_t h, double* out);

}  // namespace tilewise
