#include "cuda/backend.h"

#include "cuda/backward.h"
#include "cuda/decode.h"
#include "cuda/device.h"
#include "cuda/forward.h"
#if defined(TILEWISE_SM90)
#include "cuda/backward_sm90_backend.h"
#include "cuda/forward_sm90_backend.h"
#endif

namespace tilewise {

std::span<const KernelRow> cuda_kernels() {
  static const KernelRow rows[] = {
#if defined(TILEWISE_SM90)
      cuda::forward_sm90_row(),
#endif
      cuda::decode_sm80_row(),
      {"forward_sm80", TW_BACKEND_CUDA, TW_FORWARD, "sm_80",
       "f16, bf16 and f32, head dims up to 256, every mask and option, dense, packed and paged, split keys",
       [] { return cuda::any_device_from(80); }, cuda::refuse_forward_sm80, cuda::plan_forward_sm80,
       cuda::run_forward_sm80, "splits"},
#if defined(TILEWISE_SM90)
      cuda::backward_sm90_row(),
#endif
      {"backward_sm80", TW_BACKEND_CUDA, TW_BACKWARD, "sm_80",
       "f16, bf16 and f32, head dims up to 256, every mask and option, dense and packed, deterministic on request",
       [] { return cuda::any_device_from(80); }, cuda::refuse_backward_sm80, cuda::plan_backward_sm80,
       cuda::run_backward_sm80},
  };
  return rows;
}

}  // namespace tilewise
