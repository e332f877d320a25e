// The forward pass on the CPU: one algorithm over the tiles of an instruction set.
#pragma once
#include "core/plan.h"
#include "cpu/tiles.h"

namespace tilewise {

Status plan_forward(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan);
Status run_forward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace);

}  // namespace tilewise
