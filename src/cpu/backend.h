// The CPU's table of kernels, best first (kernels.def), the float64 reference last.
#pragma once
#include <span>

#include "core/plan.h"

namespace tilewise {

std::span<const KernelRow> cpu_kernels();

}  // namespace tilewise
