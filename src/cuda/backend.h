// The CUDA table of kernels, best first. Built only with CUDA; needs no GPU to be asked, planned with or refused by.
#pragma once
#include <span>

#include "core/plan.h"

namespace tilewise {

std::span<const KernelRow> cuda_kernels();

}  // namespace tilewise
