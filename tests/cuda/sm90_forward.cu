// The row forward_sm90 on a GPU, by itself: sm90_forward check [DIMS] | repeat N | bench D CAUSAL SEQLEN [LSE] [ROUNDS]
//   | time PROBLEM...
// repeat: N launches of some problems, the outputs bit for bit those of the first.
// check: sampled rows of o and lse against float64 on the GPU, on ordinary and on hostile inputs, o poisoned with NaN.
// bench: b * s = 16384 tokens, h * d = 2048; median of event-to-event times. time: the same of any dense problem.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/problem.h"
#include "cuda/forward_sm90_backend.h"

namespace {

using namespace tilewise;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define MUST(call) must(call, #call)

enum Fill { kNormal, kGrowing, kHugeKey, kConstant };

__device__ uint64_t mix(uint64_t x) {
  x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16(x); }
__device__ void put(__half* at, float x) { *at = __float2half(x); }
__device__ double get(const __nv_bfloat16* at) { return __bfloat162float(*at); }
__device__ double get(const __half* at) { return __half2float(*at); }

// [rows, heads, d]; growing: row n is scaled by n / rows; huge key: row rows / 3 is 100 times the others.
template <class T>
__global__ void fill(T* data, size_t count, int row_size, int rows, uint64_t seed, float scale, int kind) {
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < count; n += size_t{gridDim.x} * blockDim.x) {
    const uint64_t x = mix((n + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull);
    const float u = (static_cast<uint32_t>(x) + 1.f) * (1.f / 4294967808.f), v = (x >> 32) * (1.f / 4294967296.f);
    float value = scale * sqrtf(-2.f * logf(u)) * cospif(2.f * v);
    const int row = static_cast<int>(n / row_size % rows);
    if (kind == kGrowing) value *= static_cast<float>(row) / rows;
    if (kind == kHugeKey && row == rows / 3) value *= 100.f;
    if (kind == kConstant) value = scale;
    put(data + n, value);
  }
}

struct Shape {
  int batch, heads, heads_k, sq, sk, d, dv, causal, window;
  double scale;
  const int *cu_q, *cu_k;  // packed
};

// One block a sampled row: row error and reference norm, largest errors.
template <class T>
__global__ void compare(const T* q, const T* k, const T* v, const T* o, const float* lse, Shape s, int64_t total_q, uint32_t seed,
                        double* out) {
  extern __shared__ double weights[];
  __shared__ double q_row[256], scratch[128];
  const uint64_t x = mix((blockIdx.x + 1) * 0x9E3779B97F4A7C15ull + seed);
  const int b = x % s.batch, h = (x >> 16) % s.heads, hk = h / (s.heads / s.heads_k);
  const int sq = s.cu_q ? s.cu_q[b + 1] - s.cu_q[b] : s.sq, sk = s.cu_k ? s.cu_k[b + 1] - s.cu_k[b] : s.sk;
  if (sq == 0) return;
  int i = (x >> 32) % sq;
  if (blockIdx.x < 64) i = min(sq - 1, blockIdx.x < 32 ? blockIdx.x * 2 : max(0, sq - 1 - static_cast<int>(blockIdx.x - 32)));
  const int64_t q0 = s.cu_q ? s.cu_q[b] : static_cast<int64_t>(b) * s.sq, k0 = s.cu_k ? s.cu_k[b] : static_cast<int64_t>(b) * s.sk;
  const int t = threadIdx.x;
  for (int c = t; c < s.d; c += 128) q_row[c] = get(q + ((q0 + i) * s.heads + h) * s.d + c);
  __syncthreads();
  const int end = s.causal ? min(sk, i + sk - sq + 1) : sk, begin = s.window < 0 ? 0 : max(0, i + sk - sq - s.window);
  double largest = -INFINITY;
  for (int j = begin + t; j < end; j += 128) {
    double dot = 0;
    for (int c = 0; c < s.d; ++c) dot += q_row[c] * get(k + ((k0 + j) * s.heads_k + hk) * s.d + c);
    weights[j] = dot * s.scale;
    largest = fmax(largest, weights[j]);
  }
  scratch[t] = largest;
  __syncthreads();
  for (int n = 64; n; n /= 2) {
    if (t < n) scratch[t] = fmax(scratch[t], scratch[t + n]);
    __syncthreads();
  }
  largest = scratch[0];
  __syncthreads();
  double sum = 0;
  for (int j = begin + t; j < end; j += 128) sum += weights[j] = exp(weights[j] - largest);
  scratch[t] = sum;
  __syncthreads();
  for (int n = 64; n; n /= 2) {
    if (t < n) scratch[t] += scratch[t + n];
    __syncthreads();
  }
  sum = scratch[0];
  double error2 = 0, norm2 = 0, worst = 0;
  for (int c = t; c < s.dv; c += 128) {
    double want = 0;
    for (int j = begin; j < end; ++j) want += weights[j] * get(v + ((k0 + j) * s.heads_k + hk) * s.dv + c);
    want = end > begin ? want / sum : 0;
    double error = get(o + ((q0 + i) * s.heads + h) * s.dv + c) - want;
    if (!(error == error)) error = 1e6;
    error2 += error * error, norm2 += want * want, worst = fmax(worst, fabs(error));
  }
  atomicAdd(out, error2), atomicAdd(out + 1, norm2);
  atomicMax(reinterpret_cast<unsigned long long*>(out + 2), static_cast<unsigned long long>(__double_as_longlong(worst)));
  if (t == 0 && lse) {
    const float got = s.cu_q ? lse[h * total_q + q0 + i] : lse[(static_cast<int64_t>(b) * s.heads + h) * s.sq + i];
    double error;
    if (end <= begin) error = got == -INFINITY ? 0 : 1e6;
    else error = fabs(got - (largest + log(sum))) / fmax(1., fabs(largest + log(sum)));
    if (!(error == error)) error = 1e6;
    atomicMax(reinterpret_cast<unsigned long long*>(out + 3), static_cast<unsigned long long>(__double_as_longlong(error)));
  }
}

template <class T>
__global__ void count_nan(const T* x, size_t count, unsigned long long* found) {
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < count; n += size_t{gridDim.x} * blockDim.x)
    if (get(x + n) != get(x + n)) atomicAdd(found, 1ull);
}
__global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}
// Groups of rows that the last launch computed again: links that it wrote over the fill.
__global__ void count_marks(const uint32_t* links, size_t count, unsigned long long* found) {
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < count; n += size_t{gridDim.x} * blockDim.x)
    if (links[n] != 0x7f7f7f7f) atomicAdd(found, 1ull);
}

struct Device {
  static constexpr size_t kBytes = size_t{1} << 28, kWorkspaceBytes = size_t{1} << 26;
  void *q, *k, *v, *o, *o2, *workspace;
  float* lse;
  double* out;
  unsigned long long* found;
  int *cu_q, *cu_k, *pages;
  Device() {
    for (void** at : {&q, &k, &v, &o, &o2}) MUST(cudaMalloc(at, kBytes));
    MUST(cudaMalloc(&workspace, kWorkspaceBytes)), MUST(cudaMemset(workspace, 0xff, kWorkspaceBytes));
    MUST(cudaMalloc(&lse, 1 << 25)), MUST(cudaMalloc(&out, 64)), MUST(cudaMalloc(&found, 8));
    MUST(cudaMalloc(&cu_q, 4096)), MUST(cudaMalloc(&cu_k, 4096)), MUST(cudaMalloc(&pages, 1 << 20));
  }
};

tw_tensor tensor(void* data, int dtype, std::vector<int64_t> shape) {
  tw_tensor x{};
  x.data = data;
  x.dtype = static_cast<decltype(x.dtype)>(dtype);
  x.device = TW_CUDA;
  x.ndim = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int n = x.ndim - 1; n >= 0; --n) x.shape[n] = shape[n], x.stride[n] = stride, stride *= shape[n];
  return x;
}

struct Call {
  tw_problem problem;
  Plan plan;
  tw_tensor q, k, v, o, lse, cu_q, cu_k, pages;
  tw_tensors t{};
  Call(const Device& d, const std::string& text) {
    if (Status s = parse(text, &problem); !s.ok()) std::printf("%s\n", s.message().c_str()), std::exit(2);
    const tw_problem& p = problem;
    if (std::string reason = cuda::refuse_forward_sm90(p); !reason.empty())
      std::printf("%s: refused: %s\n", text.c_str(), reason.c_str()), std::exit(2);
    plan.problem = p;
    if (Status s = cuda::plan_forward_sm90(p, plan.target, &plan); !s.ok()) std::printf("%s\n", s.message().c_str()), std::exit(2);
    if (plan.workspace_bytes > static_cast<int64_t>(Device::kWorkspaceBytes)) std::printf("workspace %lld\n", static_cast<long long>(plan.workspace_bytes)), std::exit(2);
    const auto rows = [&](void* data, bool packed, int64_t s, int64_t total, int64_t h, int64_t dim) {
      return packed ? tensor(data, p.dtype, {total, h, dim}) : tensor(data, p.dtype, {p.batch, s, h, dim});
    };
    const bool packed_q = p.q_layout == TW_PACKED, packed_k = p.k_layout == TW_PACKED;
    q = rows(d.q, packed_q, p.seqlen_q, p.total_q, p.num_heads_q, p.head_dim);
    k = rows(d.k, packed_k, p.seqlen_k, p.total_k, p.num_heads_k, p.head_dim);
    v = rows(d.v, packed_k, p.seqlen_k, p.total_k, p.num_heads_k, p.head_dim_v);
    o = rows(d.o, packed_q, p.seqlen_q, p.total_q, p.num_heads_q, p.head_dim_v);
    lse = packed_q ? tensor(d.lse, TW_FLOAT32, {p.num_heads_q, p.total_q})
                   : tensor(d.lse, TW_FLOAT32, {p.batch, p.num_heads_q, p.seqlen_q});
    cu_q = tensor(d.cu_q, TW_INT32, {p.batch + 1}), cu_k = tensor(d.cu_k, TW_INT32, {p.batch + 1});
    t.q = &q, t.k = &k, t.v = &v, t.o = &o;
    if (has(p, TW_HAS_LSE)) t.lse = &lse;
    if (packed_q) t.cu_seqlens_q = &cu_q;
    if (packed_k) t.cu_seqlens_k = &cu_k;
    if (p.k_layout == TW_PAGED) {  // in an order that is none
      k = tensor(d.k, p.dtype, {p.num_pages, p.page_size, p.num_heads_k, p.head_dim});
      v = tensor(d.v, p.dtype, {p.num_pages, p.page_size, p.num_heads_k, p.head_dim_v});
      pages = tensor(d.pages, TW_INT32, {p.batch, p.seqlen_k / p.page_size});
      t.page_table = &pages;
      std::vector<int> numbers(static_cast<size_t>(p.batch * p.seqlen_k / p.page_size));
      for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = static_cast<int>(n * 7919 % static_cast<size_t>(p.num_pages));
      MUST(cudaMemcpy(d.pages, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice));
    }
  }
  void run(const Device& d, cudaStream_t stream = nullptr) {
    if (Status s = cuda::run_forward_sm90(plan, t, d.workspace, stream); !s.ok()) std::printf("%s\n", s.message().c_str()), std::exit(2);
  }
  size_t o_count() const { return static_cast<size_t>(query_rows(problem) * problem.num_heads_q * problem.head_dim_v); }
};

struct Case {
  const char* text;
  float scale = 1;  // of q and k
  int fill = kNormal;
  bool nan_beyond = false;            // the keys that no row may see are NaN
  std::vector<int> lengths_q, lengths_k;  // packed
};

template <class T>
bool check(const Device& d, const Case& c) {
  std::vector<int> cu_q{0}, cu_k{0};
  for (int n : c.lengths_q) cu_q.push_back(cu_q.back() + n);
  for (int n : c.lengths_k) cu_k.push_back(cu_k.back() + n);
  MUST(cudaMemcpy(d.cu_q, cu_q.data(), cu_q.size() * 4, cudaMemcpyHostToDevice));
  MUST(cudaMemcpy(d.cu_k, cu_k.data(), cu_k.size() * 4, cudaMemcpyHostToDevice));
  Call call(d, c.text);
  const tw_problem& p = call.problem;
  const size_t q_count = static_cast<size_t>(query_rows(p) * p.num_heads_q * p.head_dim);
  const size_t k_count = static_cast<size_t>(key_rows(p) * p.num_heads_k * p.head_dim);
  const size_t v_count = static_cast<size_t>(key_rows(p) * p.num_heads_k * p.head_dim_v);
  for (size_t count : {q_count, k_count, v_count, call.o_count()})
    if (count * 2 > Device::kBytes) std::printf("too large: %s\n", c.text), std::exit(2);
  fill<<<512, 256>>>(static_cast<T*>(d.q), q_count, static_cast<int>(p.num_heads_q * p.head_dim), static_cast<int>(p.seqlen_q), 1, c.scale, kNormal);
  fill<<<512, 256>>>(static_cast<T*>(d.k), k_count, static_cast<int>(p.num_heads_k * p.head_dim), static_cast<int>(p.seqlen_k), 2, c.scale, c.fill);
  fill<<<512, 256>>>(static_cast<T*>(d.v), v_count, static_cast<int>(p.num_heads_k * p.head_dim_v), static_cast<int>(p.seqlen_k), 3, 1.f, kNormal);
  if (c.nan_beyond)  // the last packed rows belong to no sequence
    for (void* x : {d.k, d.v})
      MUST(cudaMemset(static_cast<uint8_t*>(x) + static_cast<size_t>(cu_k.back()) * p.num_heads_k * p.head_dim * 2, 0xff,
                      static_cast<size_t>(p.total_k - cu_k.back()) * p.num_heads_k * p.head_dim * 2));
  unsigned long long marks = 0, nans = 0, different = 0;
  std::vector<T> first(call.o_count()), now(call.o_count());
  for (int repeat = 0; repeat < 3; ++repeat) {
    MUST(cudaMemset(d.o, 0xff, call.o_count() * 2 + 4096)), MUST(cudaMemset(d.lse, 0xff, 1 << 25));
    MUST(cudaMemset(static_cast<uint8_t*>(d.workspace) + 64, 0x7f, Device::kWorkspaceBytes - 64));
    call.run(d);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(now.data(), d.o, call.o_count() * 2, cudaMemcpyDeviceToHost));
    if (repeat == 0) first = now;
    else different += std::memcmp(first.data(), now.data(), call.o_count() * 2) != 0;
  }
  MUST(cudaMemset(d.found, 0, 8));
  const int64_t rows = (p.seqlen_q + call.plan.block_m - 1) / call.plan.block_m * call.plan.block_m;
  count_marks<<<64, 256>>>(static_cast<uint32_t*>(d.workspace) + 16, static_cast<size_t>(p.batch * p.num_heads_q * rows / 16), d.found);
  MUST(cudaMemcpy(&marks, d.found, 8, cudaMemcpyDeviceToHost));
  MUST(cudaMemset(d.found, 0, 8));
  count_nan<<<512, 256>>>(static_cast<T*>(d.o), call.o_count(), d.found);
  MUST(cudaMemcpy(&nans, d.found, 8, cudaMemcpyDeviceToHost));
  std::vector<uint8_t> guard(4096);
  MUST(cudaMemcpy(guard.data(), static_cast<uint8_t*>(d.o) + call.o_count() * 2, 4096, cudaMemcpyDeviceToHost));
  const bool guarded = std::all_of(guard.begin(), guard.end(), [](uint8_t x) { return x == 0xff; });
  MUST(cudaMemset(d.out, 0, 64));
  const bool packed_q = p.q_layout == TW_PACKED, packed_k = p.k_layout == TW_PACKED;
  const Shape shape{static_cast<int>(p.batch), static_cast<int>(p.num_heads_q), static_cast<int>(p.num_heads_k),
                    static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), static_cast<int>(p.head_dim),
                    static_cast<int>(p.head_dim_v), p.causal, static_cast<int>(p.window_left), softmax_scale_of(p),
                    packed_q ? d.cu_q : nullptr, packed_k ? d.cu_k : nullptr};
  const int bytes = static_cast<int>(p.seqlen_k * 8 + 8);
  MUST(cudaFuncSetAttribute(compare<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  compare<<<400, 128, bytes>>>(static_cast<T*>(d.q), static_cast<T*>(d.k), static_cast<T*>(d.v), static_cast<T*>(d.o),
                               call.t.lse ? d.lse : nullptr, shape, p.total_q, 7, d.out);
  double out[4];
  MUST(cudaMemcpy(out, d.out, 32, cudaMemcpyDeviceToHost));
  const double error = std::sqrt(out[0] / std::max(out[1], 1e-300));
  // P and o are rounded once each: relative 2^-9 / sqrt(3) twice in bfloat16, 2^-12 in float16.
  const double tolerance = p.dtype == TW_BFLOAT16 ? 4e-3 : 6e-4;
  const bool ok = error < tolerance && out[3] < 1e-5 && nans == 0 && different == 0 && guarded;
  std::printf("%-4s %-78s x%-4g fill %d  o %.2e max %.2e lse %.1e nan %llu again %llu%s%s\n", ok ? "ok" : "FAIL", c.text, c.scale,
              c.fill, error, out[2], out[3], nans, marks, different ? " NOT REPEATABLE" : "", guarded ? "" : " WROTE PAST o");
  std::fflush(stdout);
  return ok;
}

const Case kCases[] = {
    {"fwd bf16 cuda b=2 hq=4 sq=1024 sk=1024 d=128"},
    {"fwd bf16 cuda b=2 hq=4 sq=1024 sk=1024 d=128 no_lse"},
    {"fwd bf16 cuda b=2 hq=16 sq=2048 sk=2048 d=128 causal"},
    {"fwd bf16 cuda b=2 hq=16 sq=2048 sk=2048 d=128 causal no_lse"},
    {"fwd bf16 cuda b=3 hq=16 sq=600 sk=600 d=128"},
    {"fwd bf16 cuda b=3 hq=16 sq=600 sk=600 d=128 causal"},
    {"fwd bf16 cuda b=3 hq=16 sq=600 sk=1000 d=128 causal no_lse"},
    {"fwd bf16 cuda b=3 hq=16 sq=1000 sk=600 d=128 causal"},
    {"fwd bf16 cuda b=3 hq=16 hk=2 sq=333 sk=4001 d=128 causal"},
    {"fwd bf16 cuda b=2 hq=16 hk=4 sq=700 sk=129 d=128"},
    {"fwd bf16 cuda b=2 hq=16 hk=4 sq=65 sk=1 d=128"},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal window=500,0"},
    {"fwd bf16 cuda b=1 hq=16 sq=1000 sk=1000 d=128 window=3,-1"},
    {"fwd bf16 cuda b=1 hq=16 sq=1024 sk=1024 d=128 causal scale=-0.1"},
    {"fwd bf16 cuda b=1 hq=16 sq=1024 sk=1024 d=128 scale=0"},
    {"fwd bf16 cuda b=1 hq=16 sq=1024 sk=1024 d=96 causal"},
    {"fwd bf16 cuda b=1 hq=16 sq=1024 sk=1024 d=72 dv=104"},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128", 3},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal no_lse", 3},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal", 8},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 no_lse", 8},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal no_lse", 8},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal no_lse", 10, kGrowing},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 no_lse", 4, kHugeKey},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal", 1e5},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 no_lse", 1, kConstant},
    {"fwd f16 cuda b=2 hq=16 sq=2048 sk=2048 d=128 causal"},
    {"fwd f16 cuda b=2 hq=16 sq=2048 sk=2048 d=128", 3},
    {"fwd f16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal", 8},
    {"fwd f16 cuda b=1 hq=16 sq=4096 sk=4096 d=128 causal", 10, kGrowing},
    // Problems without edges: kernels of their own.
    {"fwd bf16 cuda b=3 hq=16 hk=4 sq=512 sk=640 d=128"},
    {"fwd bf16 cuda b=3 hq=16 hk=4 sq=512 sk=640 d=128 no_lse", 3},
    {"fwd bf16 cuda b=5 hq=12 sq=1280 sk=384 d=96 dv=72"},
    {"fwd bf16 cuda b=4 hq=9 hk=3 sq=256 sk=128 d=128 no_lse"},
    {"fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=128", 10, kGrowing},
    {"fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=128 no_lse", 10, kGrowing},
    {"fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=128", 4, kHugeKey},
    {"fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=128 no_lse", 1e5},
    {"fwd f16 cuda b=5 hq=16 hk=2 sq=512 sk=512 d=128", 3},
    {"fwd f16 cuda b=5 hq=16 hk=2 sq=512 sk=512 d=128 no_lse", 10, kGrowing},
    // The last tiles, or all of them, by several blocks each.
    {"fwd bf16 cuda b=1 hq=16 sq=2200 sk=4096 d=128 no_lse"},
    {"fwd bf16 cuda b=1 hq=4 hk=2 sq=1000 sk=8100 d=128"},
    {"fwd bf16 cuda b=1 hq=1 sq=100 sk=24000 d=128 no_lse"},
    {"fwd bf16 cuda b=1 hq=4 sq=1000 sk=8192 d=128 no_lse", 8},
    {"fwd bf16 cuda b=1 hq=4 sq=1000 sk=8192 d=128", 10, kGrowing},
    {"fwd f16 cuda b=1 hq=4 sq=1000 sk=8192 d=128", 2},
    // Query heads that share tiles.
    {"fwd bf16 cuda b=4 hq=64 hk=8 sq=16 sk=8192 d=128 causal no_lse"},
    {"fwd bf16 cuda b=1 hq=32 hk=4 sq=33 sk=5000 d=128 causal", 8},
    {"fwd bf16 cuda b=1 hq=32 hk=4 sq=100 sk=5000 d=128 causal", 10, kGrowing},
    {"fwd bf16 cuda b=2 hq=28 hk=4 sq=300 sk=1111 d=128"},
    {"fwd f16 cuda b=2 hq=16 hk=4 sq=150 sk=4000 d=128 causal", 3},
    {"fwd bf16 cuda b=4 hq=8 hk=2 sq=700 sk=700 d=128 packed_q=1500 packed_k=1500 causal", 1, kNormal, true, {300, 0, 700, 411}, {300, 0, 700, 411}},
    {"fwd bf16 cuda b=4 hq=8 hk=2 sq=700 sk=900 d=128 packed_q=1500 packed_k=1700", 1, kNormal, true, {300, 20, 700, 411}, {300, 900, 0, 411}},
};
const Case kCases64[] = {
    {"fwd bf16 cuda b=1 hq=3 sq=1000 sk=8100 d=64 no_lse"},
    {"fwd bf16 cuda b=1 hq=3 sq=1000 sk=8100 d=64"},
    {"fwd bf16 cuda b=1 hq=4 sq=1000 sk=5000 d=64 no_lse", 8},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 sk=1024 d=64"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 sk=1024 d=64 no_lse"},
    {"fwd bf16 cuda b=2 hq=32 sq=2048 sk=2048 d=64 causal"},
    {"fwd bf16 cuda b=2 hq=32 sq=2048 sk=2048 d=64 causal no_lse"},
    {"fwd bf16 cuda b=3 hq=16 hk=2 sq=600 sk=1000 d=64 causal no_lse"},
    {"fwd bf16 cuda b=3 hq=16 hk=2 sq=1000 sk=600 d=64 causal"},
    {"fwd bf16 cuda b=1 hq=16 sq=1000 sk=8192 d=64"},
    {"fwd bf16 cuda b=1 hq=16 sq=8192 sk=8192 d=64 causal no_lse"},
    {"fwd bf16 cuda b=1 hq=16 sq=8192 sk=8192 d=64 causal"},
    {"fwd bf16 cuda b=1 hq=16 sq=8192 sk=8192 d=64 no_lse", 3},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=64 causal no_lse", 8},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=32 causal"},
    {"fwd f16 cuda b=2 hq=32 sq=2048 sk=2048 d=64 causal"},
    {"fwd bf16 cuda b=1 hq=16 sq=4096 sk=4096 d=64 causal window=300,0"},
};
const Case kCases256[] = {
    {"fwd bf16 cuda b=1 hq=3 sq=1000 sk=8100 d=256"},
    {"fwd bf16 cuda b=2 hq=32 hk=4 sq=40 sk=4000 d=256 causal", 8},
    {"fwd bf16 cuda b=1 hq=8 hk=2 sq=100 sk=4000 d=256"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 sk=1024 d=256"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=2048 d=256 causal no_lse"},
    {"fwd bf16 cuda b=3 hq=8 hk=2 sq=600 sk=1000 d=256 causal"},
    {"fwd bf16 cuda b=3 hq=8 hk=2 sq=1000 sk=600 d=256 causal"},
    {"fwd bf16 cuda b=1 hq=8 sq=2048 sk=2048 d=192 dv=128 causal"},
    {"fwd bf16 cuda b=1 hq=8 sq=2048 sk=2048 d=256 causal", 8},
    {"fwd f16 cuda b=1 hq=8 sq=2048 sk=2048 d=256 causal"},
};

int check_all(const Device& d, const char* which) {
  int bad = 0, count = 0;
  const auto run = [&](const Case& c) {
    ++count;
    bad += std::strstr(c.text, " f16 ") ? !check<__half>(d, c) : !check<__nv_bfloat16>(d, c);
  };
  if (std::strstr(which, "128")) for (const Case& c : kCases) run(c);
  if (std::strstr(which, "64")) for (const Case& c : kCases64) run(c);
  if (std::strstr(which, "256")) for (const Case& c : kCases256) run(c);
  std::printf("%d cases, %d failed\n", count, bad);
  return bad != 0;
}

__global__ void differ(const uint32_t* a, const uint32_t* b, size_t count, unsigned long long* found) {
  for (size_t n = blockIdx.x * size_t{blockDim.x} + threadIdx.x; n < count; n += size_t{gridDim.x} * blockDim.x)
    if (a[n] != b[n]) atomicAdd(found, 1ull);
}

int repeat(const Device& d, int times) {
  int count = 0, bad = 0;
  for (const char* text : {"fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=128 causal", "fwd bf16 cuda b=2 hq=16 hk=4 sq=1000 sk=1111 d=128 no_lse",
                           "fwd bf16 cuda b=2 hq=32 sq=1024 sk=1024 d=64 causal no_lse", "fwd bf16 cuda b=1 hq=8 sq=700 sk=8192 d=64",
                           "fwd bf16 cuda b=2 hq=16 sq=1024 sk=1024 d=64", "fwd bf16 cuda b=2 hq=8 sq=1024 sk=1024 d=256 causal",
                           "fwd bf16 cuda b=1 hq=4 sq=1000 sk=8192 d=128 no_lse", "fwd bf16 cuda b=1 hq=5 sq=1000 sk=4000 d=256",
                           "fwd bf16 cuda b=4 hq=64 hk=8 sq=40 sk=8192 d=128 causal", "fwd bf16 cuda b=8 hq=16 sq=1024 sk=1024 d=128",
                           "fwd bf16 cuda b=32 hq=16 sq=512 sk=512 d=128 no_lse"}) {
    Call call(d, text);
    for (void* x : {d.q, d.k, d.v})
      fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(x), Device::kBytes / 2, 2048, 1000, reinterpret_cast<uint64_t>(x), 2.f, kNormal);
    MUST(cudaMemset(d.found, 0, 8));
    for (int n = 0; n <= times; ++n) {
      MUST(cudaMemsetAsync(d.o, 0xff, call.o_count() * 2));
      call.run(d);
      if (n == 0)
        MUST(cudaMemcpyAsync(d.o2, d.o, call.o_count() * 2, cudaMemcpyDeviceToDevice));
      else
        differ<<<512, 256>>>(static_cast<uint32_t*>(d.o), static_cast<uint32_t*>(d.o2), call.o_count() / 2, d.found);
    }
    // The same launch again and again, from a graph.
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t program;
    MUST(cudaStreamCreate(&stream)), MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call.run(d, stream);
    MUST(cudaStreamEndCapture(stream, &graph)), MUST(cudaGraphInstantiate(&program, graph, 0)), MUST(cudaDeviceSynchronize());
    for (int n = 0; n < times / 10; ++n) {
      MUST(cudaMemsetAsync(d.o, 0xff, call.o_count() * 2, stream));
      MUST(cudaGraphLaunch(program, stream));
      differ<<<512, 256, 0, stream>>>(static_cast<uint32_t*>(d.o), static_cast<uint32_t*>(d.o2), call.o_count() / 2, d.found);
    }
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaGraphExecDestroy(program)), MUST(cudaGraphDestroy(graph)), MUST(cudaStreamDestroy(stream));
    unsigned long long found = 0;
    MUST(cudaMemcpy(&found, d.found, 8, cudaMemcpyDeviceToHost));
    ++count, bad += found != 0;
    std::printf("%-4s %s: %d repeats, %llu words differ\n", found ? "FAIL" : "ok", text, times, found);
  }
  std::printf("%d cases, %d failed\n", count, bad);
  return bad != 0;
}

void bench(const Device& d, const char* text, int rounds, int warm, int repeats, int idle_ms) {
  Call call(d, text);
  const int seqlen = static_cast<int>(call.problem.seqlen_k);
  const size_t count = call.o_count();
  for (void* x : {d.q, d.k, d.v})
    fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(x), count, 2048, seqlen, reinterpret_cast<uint64_t>(x), 1.f, kNormal);
  MUST(cudaDeviceSynchronize());
  std::vector<cudaEvent_t> events(repeats + 1);
  for (cudaEvent_t& event : events) MUST(cudaEventCreate(&event));
  std::vector<double> medians;
  for (int round = 0; round < rounds; ++round) {
    usleep(idle_ms * 1000);
    spin<<<1, 1>>>(1500000);
    for (int n = 0; n < warm; ++n) call.run(d);
    MUST(cudaEventRecord(events[0]));
    for (int n = 0; n < repeats; ++n) call.run(d), MUST(cudaEventRecord(events[n + 1]));
    MUST(cudaDeviceSynchronize());
    std::vector<float> times(repeats);
    for (int n = 0; n < repeats; ++n) MUST(cudaEventElapsedTime(&times[n], events[n], events[n + 1]));
    std::sort(times.begin(), times.end());
    medians.push_back(times[repeats / 2]);
  }
  std::sort(medians.begin(), medians.end());
  const tw_problem& p = call.problem;
  // As everywhere: half of the pairs count under a causal mask, all without one.
  const double pairs = static_cast<double>(p.batch * p.num_heads_q) * p.seqlen_q * p.seqlen_k * (p.causal ? 0.5 : 1);
  const double count2 = 2.0 * pairs * (p.head_dim + p.head_dim_v), ms = medians[rounds / 2];
  std::printf("T %s: %.4f ms %.1f TF (min %.1f max %.1f)\n", text, ms, count2 / ms * 1e-9, count2 / medians.back() * 1e-9,
              count2 / medians[0] * 1e-9);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "check";
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 || !cuda::forward_sm90_available()) {
    std::printf("SKIPPED: no GPU of compute capability 9.0\n");
    return 0;
  }
  const Device d;
  if (command == "check") return check_all(d, argc > 2 ? argv[2] : "64,128,256");
  if (command == "repeat") return repeat(d, argc > 2 ? std::atoi(argv[2]) : 500);
  if (command == "bench" && argc >= 5) {
    const auto number = [&](int n, int otherwise) { return argc > n ? std::atoi(argv[n]) : otherwise; };
    const int dim = number(2, 64), seqlen = number(4, 1024);
    char text[256];
    std::snprintf(text, sizeof text, "fwd bf16 cuda b=%d hq=%d sq=%d sk=%d d=%d%s%s", 16384 / seqlen, 2048 / dim, seqlen, seqlen, dim,
                  number(3, 0) ? " causal" : "", number(5, 1) ? "" : " no_lse");
    bench(d, text, number(6, 3), number(7, 5), number(8, 20), number(9, 60));
    return 0;
  }
  if (command == "time") {
    for (int n = 2; n < argc; ++n) bench(d, argv[n], 2, 5, 20, 60);
    return 0;
  }
  std::printf("usage: sm90_forward check [DIMS] | repeat N | time PROBLEM... | bench D CAUSAL SEQLEN [LSE] [ROUNDS] [WARM] [REPEATS] [IDLE_MS]\n");
  return 1;
}
