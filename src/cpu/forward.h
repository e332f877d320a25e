// The forward pass on the CPU: one algorithm over the tiles of an instruction set.
#pragma once
#include "core/plan.h"
#include "cpu/tiles.h"

namespace tilewise {

Status plan_forward(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan);
Status run_forward(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace);

// A handful of query rows per key head (decoding): K and V are read where they lie. Tiles without pairs.
std::string refuse_decode(const tw_problem& problem);  // "" = takes it
Status plan_decode(const TileKernels& kernels, const tw_problem& problem, const Target& target, Plan* plan);
Status run_decode(const TileKernels& kernels, const Plan& plan, const tw_tensors& tensors, void* workspace);

}  // namespace tilewise
