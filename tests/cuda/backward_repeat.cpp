// Deterministic backward rows give the same bits every time: backward_repeat [N] [K/M], N launches of each problem (default 500), or of every
// M-th from the K-th on, while another stream keeps the GPU busy, so that blocks start and end in ever other orders.
#include <cuda_runtime.h>

#include <cstdlib>
#include <string>

#include "session.h"

namespace tilewise {
namespace {

// With `nan rows`: everything is computed again, by other sums.
const std::string kNanRows = " nan rows";
const std::string kProblems[] = {
    "bwd bf16 cuda b=2 hq=8 hk=2 sq=1000 sk=1100 d=128 causal deterministic",
    "bwd bf16 cuda b=1 hq=8 sq=2048 d=64 deterministic",
    "bwd f16 cuda b=1 hq=4 hk=1 sq=900 sk=1300 d=256 window=200,0 deterministic",
    "bwd bf16 cuda b=1 hq=8 hk=4 sq=600 sk=500 d=64 window=300,60 deterministic",
    "bwd f16 cuda b=5 hq=4 sq=400 d=64 packed_q=1500 packed_k=1500 causal deterministic",
    // More key blocks than multiprocessors: dq is written beside the main kernel.
    "bwd bf16 cuda b=9 hq=8 hk=4 sq=300 sk=700 d=128 deterministic",
    "bwd bf16 cuda b=6 hq=8 sq=500 d=64 causal deterministic",
    "bwd bf16 cuda b=2 hq=8 sq=700 d=128 causal dropout=0.1 seed=3 deterministic",
    "bwd bf16 cuda b=9 hq=8 hk=4 sq=700 sk=500 d=256 causal deterministic",  // two passes, each with more tasks than multiprocessors
    "bwd bf16 cuda b=2 hq=4 sq=1000 sk=1025 d=256 deterministic",  // whose second is the call's last kernel
    "bwd f16 cuda b=2 hq=4 hk=2 sq=1000 sk=1025 d=256 deterministic",
    "bwd bf16 cuda b=1 hq=8 hk=1 sq=900 sk=1300 d=256 causal deterministic",  // dk's pass, the first of two, leaves most multiprocessors free
    "bwd bf16 cuda b=2 hq=8 hk=4 sq=600 sk=704 d=64 bias=bf16:hqk dbias deterministic",
    "bwd f16 cuda b=9 hq=8 hk=4 sq=300 sk=704 d=128 mask=bqk causal deterministic",
    "bwd bf16 cuda b=2 hq=8 sq=700 sk=704 d=256 bias=f32:qk causal deterministic",
    "bwd bf16 cuda b=2 hq=4 hk=2 sq=600 sk=700 d=64 causal deterministic" + kNanRows,
    "bwd bf16 cuda b=2 hq=4 hk=2 sq=600 sk=700 d=256 causal deterministic" + kNanRows,
};

int run(int repeats, const std::string& shard) {
  if (const std::string missing = gpu_missing(); !missing.empty()) {
    std::printf("SKIPPED: no GPU: %s\n", missing.c_str());
    return 0;
  }
  const size_t slash = shard.find('/');
  const int remainder = std::atoi(shard.c_str()), shards = slash == std::string::npos ? 1 : std::atoi(shard.c_str() + slash + 1);
  int cases = 0, failed = 0, problem = 0;
  cudaStream_t busy;
  check_cuda(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking), "stream");
  const GpuMemory scratch(size_t{64} << 20);
  for (std::string text : kProblems) {
    if (problem++ % shards != remainder) continue;
    const bool nan_rows = text.ends_with(kNanRows);
    if (nan_rows) text.resize(text.size() - kNanRows.size());
    for (const Session::Case& c : Session::cases(text)) {
      Session session(c, 7, nan_rows);
      const int differ = session.differing_repeats(
          repeats, [&](int n) { check_cuda(cudaMemsetAsync(scratch.data(), n, scratch.size() / (1 + n % 7), busy), "busy"); });
      std::printf("%s %s%s: %d runs, %d differ\n", differ ? "FAIL" : "ok  ", session.name().c_str(), nan_rows ? kNanRows.c_str() : "", repeats,
                  differ);
      ++cases, failed += differ > 0;
    }
  }
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tilewise

int main(int argc, char** argv) { return tilewise::run(argc > 1 ? std::atoi(argv[1]) : 500, argc > 2 ? argv[2] : "0/1"); }
