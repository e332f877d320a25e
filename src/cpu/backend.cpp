#include "cpu/backend.h"

#include "core/dtype.h"
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/reference.h"
#include "cpu/tiles.h"

namespace tilewise {
namespace {

template <Isa isa>
bool available() {
  return has_isa(isa);
}

std::string refuse_forward(const tw_problem&) { return ""; }
std::string refuse_backward(const tw_problem&) { return ""; }

template <Isa isa, auto refuse_pass>
std::string refusal(const tw_problem& p) {
  if (isa == Isa::kAvx512Bf16 && p.dtype != TW_BFLOAT16) return concat("dtype ", dtype_name(p.dtype), " not in {bf16}");
  if (dtype_size(p.dtype) > 4) return concat("dtype ", dtype_name(p.dtype), " not in {f32, f16, bf16}");
  return refuse_pass(p);
}

// Not reached on machines that lack the instruction set: available() said so.
template <Isa isa>
const TileKernels& tiles() {
#if defined(__x86_64__)
  if constexpr (isa == Isa::kAvx512Bf16) return tiles_avx512bf16();
  if constexpr (isa == Isa::kAvx512) return tiles_avx512();
  if constexpr (isa == Isa::kAvx2) return tiles_avx2();
#endif
  return tiles_scalar();
}

template <Isa isa, auto plan_pass>
Status plan(const tw_problem& problem, const Target& target, Plan* out) {
  return plan_pass(tiles<isa>(), problem, target, out);
}

template <Isa isa, auto run_pass>
Status run(const Plan& made, const tw_tensors& tensors, void* workspace, void*) {
  return run_pass(tiles<isa>(), made, tensors, workspace);
}

constexpr int32_t decode = TW_FORWARD, forward = TW_FORWARD, backward = TW_BACKWARD;

constexpr KernelRow kRows[] = {
#define TW_CPU_KERNEL(pass, name, isa, summary)                                                               \
  {#pass "_" #name, TW_BACKEND_CPU, pass, #name, summary, available<Isa::isa>, refusal<Isa::isa, refuse_##pass>, \
   plan<Isa::isa, plan_##pass>, run<Isa::isa, run_##pass>, "block_m block_n splits"},
#include "cpu/kernels.def"
#undef TW_CPU_KERNEL
    {"reference", TW_BACKEND_REFERENCE, -1, "any", "the contract in float64, every dtype; the oracle", [] { return true; },
     [](const tw_problem&) { return std::string(); }, plan_reference, run_reference},
};

}  // namespace

std::span<const KernelRow> cpu_kernels() { return kRows; }

}  // namespace tilewise
