// The problem as a value: equality, text form, and the few derived quantities that everybody needs.
#pragma once
#include <string>
#include <string_view>

#include "core/mask.h"
#include "core/status.h"
#include "tilewise/tilewise.h"

namespace tilewise {

tw_problem default_problem();

// "fwd bf16 b=2 hq=32 hk=8 sq=1024 sk=1024 d=128 causal": format(parse(text)) is the canonical spelling.
// Grammar, in the order of format(); what is omitted has its default:
//   fwd|bwd  DTYPE  [cuda]  b= hq= [hk=hq] sq= [sk=sq] d= [dv=d]
//   [packed_q=TOTAL] [packed_k=TOTAL] [pages=NUMxSIZE] [cache_batch=] [new=] [rotary=DIM[,interleaved]]
//   [causal] [window=L,R] [scale=] [softcap=] [alibi=h|bh] [bias=DTYPE:DIMS] [mask=DIMS] [sink] [dropout=] [seed=] [offset=]
//   [seqused_q] [seqused_k] [cache_batch_idx] [leftpad] [rotary_seqlens] [rng_state] [dropout_mask]
//   [no_lse] [maxlogit] [dlse] [no_dq] [no_dk] [no_dv] [dbias] [dalibi] [dsink]
//   [deterministic] [batch_invariant] [splits=] [sm_margin=]
// DIMS: letters of "bhqk" for the dimensions in which the tensor has full size, "1" for none.
std::string format(const tw_problem& problem);
Status parse(std::string_view text, tw_problem* problem);

bool operator==(const tw_problem& a, const tw_problem& b);

inline bool has(const tw_problem& problem, tw_feature feature) { return (problem.features & feature) != 0; }

inline int64_t group_size(const tw_problem& problem) {  // query heads per key head
  return problem.num_heads_k == 0 ? 0 : problem.num_heads_q / problem.num_heads_k;
}

inline Mask mask_of(const tw_problem& problem) {
  return {problem.window_left, problem.causal ? 0 : problem.window_right};
}

double softmax_scale_of(const tw_problem& problem);  // the default resolved

int64_t query_rows(const tw_problem& problem);  // per head: b * sq, or total_q
int64_t key_rows(const tw_problem& problem);    // per head: b * sk, or total_k

// Multiply-adds counted as two: 4 b hq sq sk (d + dv) / 2 forward, halved when causal with sq = sk and counted pair by
// pair under a window; 2.5 times that backward. Lengths of packed sequences are taken as equal.
double flops(const tw_problem& problem);
double bytes_moved(const tw_problem& problem);       // inputs once, outputs once

}  // namespace tilewise
