// The contract as plain loops in float64: executable specification, oracle of the tests, and last row of the table.
#pragma once
#include "core/plan.h"

namespace tilewise {

// One task per (batch entry, query head) or (batch entry, key head); linear extra memory.
Status plan_reference(const tw_problem& problem, const Target& target, Plan* plan);
Status run_reference(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);

}  // namespace tilewise
