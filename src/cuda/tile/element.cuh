// From the configs' element type to the C++ type.
#pragma once
#include "cuda/config_sm80.h"
#include "cuda/ptx/mma.cuh"

namespace tilewise::cuda {

template <Element E>
struct ElementType {
  using Type = ptx::bfloat16;
};
template <>
struct ElementType<Element::kFloat16> {
  using Type = ptx::float16;
};

}  // namespace tilewise::cuda
