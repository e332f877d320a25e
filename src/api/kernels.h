// The whole table: CUDA's rows if built in, then the CPU's. The one place that knows every backend.
#pragma once
#include <span>

#include "core/plan.h"

namespace tilewise {

std::span<const KernelRow> all_kernels();

// The file that TILEWISE_TUNING names, read once.
const Tuning& loaded_tuning();

}  // namespace tilewise
