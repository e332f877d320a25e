// Deterministic backward rows give the same bits every time: backward_repeat [N], N launches of each problem (default 500)
// while another stream keeps the GPU busy, so that blocks start and end in ever other orders.
#include <cuda_runtime.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "row_run.h"
#include "core/problem.h"
#include "cuda/backend.h"

namespace tilewise::cuda_test {
namespace {

const char* const kProblems[] = {
    "bwd bf16 cuda b=2 hq=8 hk=2 sq=1000 sk=1100 d=128 causal deterministic",
    "bwd bf16 cuda b=1 hq=8 sq=2048 d=64 deterministic",
    "bwd f16 cuda b=1 hq=4 hk=1 sq=900 sk=1300 d=256 window=200,0 deterministic",
    "bwd f16 cuda b=5 hq=4 sq=400 d=64 packed_q=1500 packed_k=1500 causal deterministic",
};

int run(int repeats) {
  if (cuda_kernels().empty() || !cuda_kernels().back().available()) {
    std::printf("SKIPPED: no GPU of compute capability 8.0 or more\n");
    return 0;
  }
  int cases = 0, failed = 0;
  cudaStream_t busy;
  check_cuda(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking), "stream");
  void* scratch = nullptr;
  constexpr size_t kScratch = size_t{64} << 20;
  check_cuda(cudaMalloc(&scratch, kScratch), "scratch");
  for (const char* text : kProblems) {
    tw_problem p;
    if (Status s = parse(text, &p); !s.ok()) return std::printf("%s\n", s.message().c_str()), 1;
    const KernelRow* row = nullptr;
    for (const KernelRow& candidate : cuda_kernels())
      if (row == nullptr && candidate.pass == TW_BACKWARD && candidate.available() && candidate.refusal(p).empty()) row = &candidate;
    // o and lse need not belong to q, k and v here: they only have to be the same each time. lse of 8 keeps P small.
    Inputs in(p, LayoutKind::kContiguous, 7, 1);
    for (int64_t n = 0; n < in.lse.count(); ++n) in.lse.set(n, 8);
    for (int64_t n = 0; n < in.o.count(); ++n) in.o.set(n, static_cast<double>(n % 17) / 16 - 0.5);
    in.upload();
    const tw_tensors tensors = in.tensors(true);
    Plan plan;
    if (row == nullptr || !plan_row(*row, p, &plan).ok()) return std::printf("%s: no plan\n", text), 1;
    const Workspace workspace(plan.workspace_bytes);
    Mirror* const gradients[] = {&in.dq, &in.dk, &in.dv};
    std::vector<uint8_t> first[3];
    int differ = 0;
    for (int n = 0; n < repeats; ++n) {
      check_cuda(cudaMemsetAsync(scratch, n, kScratch / (1 + n % 7), busy), "busy");
      if (Status s = row->run(plan, tensors, workspace.data(), nullptr); !s.ok()) return std::printf("%s\n", s.message().c_str()), 1;
      check_cuda(cudaDeviceSynchronize(), "kernel");
      for (int g = 0; g < 3; ++g) {
        auto bytes = gradients[g]->download();
        if (n == 0)
          first[g] = std::move(bytes);
        else
          differ += bytes != first[g];
      }
    }
    std::printf("%s %s: %s, %d runs, %d outputs differ\n", differ ? "FAIL" : "ok  ", text, row->name, repeats, differ);
    ++cases, failed += differ > 0;
  }
  cudaFree(scratch);
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tilewise::cuda_test

int main(int argc, char** argv) { return tilewise::cuda_test::run(argc > 1 ? std::atoi(argv[1]) : 500); }
