// The row decode_sm80: refusals in words, the plan, and the launches.
#pragma once
#include "core/plan.h"

namespace tilewise::cuda {

KernelRow decode_sm80_row();

}  // namespace tilewise::cuda
