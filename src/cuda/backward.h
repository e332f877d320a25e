// The row backward_sm80: refusals in words, the plan, and the launches.
#pragma once
#include <string>

#include "core/plan.h"
#include "cuda/config_sm80.h"
#include "cuda/params.h"

namespace tilewise::cuda {

std::string refuse_backward_sm80(const tw_problem& problem);
Status plan_backward_sm80(const tw_problem& problem, const Target& target, Plan* plan);
Status run_backward_sm80(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);
// Behind sm_90's main kernel, with its parameters and arrays: the same sums again if params.again says so when the kernel starts.
Status run_backward_again(const BackwardParams& params, const Plan& plan, void* stream);

// What every backward row needs to know of its problem and its tensors, and the refusal of a dout that none of them takes.
BackwardKind backward_kind(const tw_problem& problem);  // tensors that are not aligned take the general kernel all the same
BackwardParams backward_params(const tw_problem& problem, const tw_tensors& tensors);
Status check_dout(const tw_problem& problem, const tw_tensors& tensors);
int64_t backward_padded_rows(const tw_problem& problem);  // per head

// Sums of dbias: their bytes, zeros in front of everything that reads or adds to them; and dalibi and dbias from their sums, behind.
int64_t dbias_bytes(const tw_problem& problem);
// `stored`: the main kernel writes dbias itself, and sums are needed only where all is computed again.
Status begin_dbias(BackwardParams* params, const tw_problem& problem, const tw_tensors& tensors, void* memory, bool stored, void* stream);
Status finish_option_gradients(const BackwardParams& params, const tw_tensors& tensors, bool dbias_stored, void* stream);

}  // namespace tilewise::cuda
