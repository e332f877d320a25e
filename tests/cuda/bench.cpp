// TFLOP/s of the CUDA rows: bench [--kernel=NAME] PROBLEM..., medians of event-timed launches after a hot warm-up.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cuda/backend.h"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Buffer {
  tw_tensor tensor{};
  void make(tw_dtype dtype, std::vector<int64_t> shape, bool random) {
    tensor.dtype = dtype;
    tensor.device = TW_CUDA;
    tensor.ndim = static_cast<int>(shape.size());
    int64_t count = 1;
    for (int n = tensor.ndim - 1; n >= 0; --n) tensor.shape[n] = shape[n], tensor.stride[n] = count, count *= shape[n];
    const size_t bytes = static_cast<size_t>(count * tilewise::dtype_size(dtype));
    check(cudaMalloc(&tensor.data, bytes), "cudaMalloc");
    if (!random) return;
    static std::mt19937_64 engine(1);
    std::normal_distribution<float> normal;
    std::vector<uint8_t> pool(static_cast<size_t>(1 << 20) * 4);
    const int64_t pool_count = 1 << 20;
    for (int64_t n = 0; n < pool_count; ++n) tilewise::store_element(pool.data(), dtype, n, normal(engine));
    const size_t pool_bytes = static_cast<size_t>(pool_count * tilewise::dtype_size(dtype));
    for (size_t at = 0; at < bytes; at += pool_bytes)
      check(cudaMemcpy(static_cast<uint8_t*>(tensor.data) + at, pool.data(), std::min(pool_bytes, bytes - at), cudaMemcpyHostToDevice), "copy");
  }
  ~Buffer() { cudaFree(tensor.data); }
};

double median_ms(const tilewise::KernelRow& row, const tilewise::Plan& plan, const tw_tensors& t, void* workspace) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  const auto once = [&] {
    cudaEventRecord(begin);
    if (auto s = row.run(plan, t, workspace, nullptr); !s.ok()) std::printf("%s\n", s.message().c_str()), std::exit(1);
    cudaEventRecord(end);
    check(cudaEventSynchronize(end), "run");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    return static_cast<double>(ms);
  };
  double warm = 0;
  while (warm < 150) warm += std::max(once(), 0.02);  // past the burst clock
  std::vector<double> times;
  double total = 0;
  while (times.size() < 5 || (total < 100 && times.size() < 200)) times.push_back(once()), total += times.back();
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tilewise;
  std::string kernel;
  for (int n = 1; n < argc; ++n) {
    if (std::string(argv[n]).rfind("--kernel=", 0) == 0) {
      kernel = argv[n] + 9;
      continue;
    }
    tw_problem p;
    if (Status s = parse(argv[n], &p); !s.ok()) {
      std::printf("%s\n", s.message().c_str());
      return 1;
    }
    const auto type = static_cast<tw_dtype>(p.dtype);
    const bool backward = p.pass == TW_BACKWARD;
    Buffer q, k, v, o, lse, dout, dq, dk, dv;
    q.make(type, {p.batch, p.seqlen_q, p.num_heads_q, p.head_dim}, true);
    k.make(type, {p.batch, p.seqlen_k, p.num_heads_k, p.head_dim}, true);
    v.make(type, {p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v}, true);
    o.make(type, {p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v}, false);
    lse.make(TW_FLOAT32, {p.batch, p.num_heads_q, p.seqlen_q}, false);
    tw_tensors t{};
    t.struct_size = sizeof t;
    t.q = &q.tensor, t.k = &k.tensor, t.v = &v.tensor, t.o = &o.tensor, t.lse = &lse.tensor;
    if (backward) {
      dout.make(type, {p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v}, true);
      dq.make(type, {p.batch, p.seqlen_q, p.num_heads_q, p.head_dim}, false);
      dk.make(type, {p.batch, p.seqlen_k, p.num_heads_k, p.head_dim}, false);
      dv.make(type, {p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v}, false);
      tw_problem f = p;
      f.pass = TW_FORWARD;
      f.features = TW_HAS_LSE;
      Plan plan;
      plan.problem = f;
      void* workspace = nullptr;
      for (const KernelRow& row : cuda_kernels()) {
        if (row.pass != TW_FORWARD || !row.available() || !row.refusal(f).empty()) continue;
        if (!row.plan(f, plan.target, &plan).ok()) return 1;
        if (plan.workspace_bytes) check(cudaMalloc(&workspace, static_cast<size_t>(plan.workspace_bytes)), "workspace");
        if (!row.run(plan, t, workspace, nullptr).ok()) return 1;
        break;
      }
      check(cudaDeviceSynchronize(), "forward"), cudaFree(workspace);
      t.dout = &dout.tensor, t.dq = &dq.tensor, t.dk = &dk.tensor, t.dv = &dv.tensor;
    }
    for (const KernelRow& row : cuda_kernels()) {
      if (row.pass != p.pass || !row.available() || (!kernel.empty() && kernel != row.name)) continue;
      if (!row.refusal(p).empty()) {
        std::printf("%-70s %s refuses: %s\n", argv[n], row.name, row.refusal(p).c_str());
        continue;
      }
      Plan plan;
      plan.problem = p;
      if (Status s = row.plan(p, plan.target, &plan); !s.ok()) continue;
      void* workspace = nullptr;
      if (plan.workspace_bytes) check(cudaMalloc(&workspace, static_cast<size_t>(plan.workspace_bytes)), "workspace");
      const double ms = median_ms(row, plan, t, workspace);
      std::printf("%-66s %s %8.4f ms %7.1f TFLOP/s %7.0f GB/s  [%s]\n", argv[n], row.name, ms, flops(p) / ms * 1e-9, bytes_moved(p) / ms * 1e-6, plan.config.c_str());
      std::fflush(stdout);
      if (workspace) cudaFree(workspace);
    }
  }
  return 0;
}
