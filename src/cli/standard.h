// Standard attention as one would write it with care: blocked float32 matrix products, and the sq x sk scores in
// memory. `tilewise bench --standard` shows it beside a kernel.
#pragma once
#include <cstdint>

#include "tilewise/tilewise.h"

namespace tilewise::cli {

bool standard_takes(const tw_problem& problem);  // forward, dense, f32, f16 or bf16, at most causal

// q, k, v dense and contiguous; o float32 [b, sq, hq, dv], contiguous.
void standard_attention(const tw_problem& problem, const tw_tensors& tensors, float* o, int threads);

}  // namespace tilewise::cli
