#include "cpu/reference.h"

#include "cpu/reference_common.h"

namespace tilewise {

// num_splits is taken and changes nothing: a reference sums each row in one piece. For the same reason a row's result
// depends on nothing but the row.
Status plan_reference(const tw_problem& problem, const Target& target, Plan* plan) {
  const int num_workers = std::max(1, target.num_threads);
  const int64_t doubles = problem.pass == TW_FORWARD ? reference::forward_workspace(problem, num_workers)
                                                     : reference::backward_workspace(problem, num_workers);
  plan->config = "float64 loops";
  plan->block_m = plan->block_n = 1;
  plan->num_splits = 1;
  plan->num_tasks = problem.batch * problem.num_heads_q;
  plan->workspace_bytes = doubles * static_cast<int64_t>(sizeof(double));
  return Status();
}

Status run_reference(const Plan& plan, const tw_tensors& tensors, void* workspace, void*) {
  if (plan.problem.pass == TW_FORWARD)
    reference::forward(plan, tensors, workspace);
  else
    reference::backward(plan, tensors, workspace);
  return Status();
}

}  // namespace tilewise
