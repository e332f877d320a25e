// The row forward_sm80: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"
#include "cuda/params.h"

namespace tilewise::cuda {

std::string refuse_forward_sm80(const tw_problem& problem);
Status plan_forward_sm80(const tw_problem& problem, const Target& target, Plan* plan);
Status run_forward_sm80(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);

// Parts of the keys that the problem or a measurement wants; 0 = none said.
int64_t wanted_splits(const tw_problem& problem, const Target& target);

// What forward rows share: room for rotated queries and for the partial results of split keys; all parameters but num_blocks,
// after the small kernels that come first (max_logit filled, dropout_mask written, keys appended, queries rotated).
int64_t forward_workspace_bytes(const tw_problem& problem, int64_t num_splits);
Status prepare_forward(const tw_problem& problem, const tw_tensors& tensors, int64_t pack, int64_t num_splits, void* workspace,
                       void* stream, ForwardParams* params);

// Reasons that rows share: sizes; and, with them, all but 16-bit elements and head dims in whole chunks.
std::string refuse_limits(const tw_problem& problem);
std::string refuse_common(const tw_problem& problem);

}  // namespace tilewise::cuda
