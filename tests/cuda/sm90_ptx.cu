// The sm_90a instructions on a GPU against the CPU, with small integers, so that every comparison is exact: wgmma in every
// shape and form, TMA load and store with their borders, stmatrix against ldmatrix. Exit 0 if all agree.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/dtype.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tensor_map.h"
#include "cuda/tile/panel_sm90.cuh"

namespace {

using namespace tilewise;
using cuda::Panels;

int checks = 0, failures = 0;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define MUST(call) must(call, #call)

void expect(bool good, const char* what, int n) {
  ++checks, failures += !good;
  std::printf("%-4s %s %d\n", good ? "ok" : "FAIL", what, n);
}

enum Form { kShared, kRegisters, kRegistersTransposed };
constexpr int kK = 64;  // four k-steps

// d[64, kN] = a[64, kK] b, where b is [kN, kK], or [kK, kN] in panels of 64 columns if transposed. One warpgroup.
template <class T, int kN, Form kForm>
__global__ void multiply(const T* a, const T* b, float* d) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int kBRows = kForm == kRegistersTransposed ? kK : (kN + 7) / 8 * 8;
  constexpr int kBColumns = kForm == kRegistersTransposed ? (kN + 63) / 64 * 64 : kK;
  constexpr int kRealColumns = kForm == kRegistersTransposed ? kN : kK;
  unsigned char* const b_memory = memory + 64 * 128;
  for (int n = threadIdx.x; n < 64 * kK; n += 128) {
    const int row = n / kK, column = n % kK;
    *reinterpret_cast<T*>(memory + Panels<64>::chunk_offset(row, column / 8) + column % 8 * 2) = a[n];
  }
  for (int n = threadIdx.x; n < kBRows * kBColumns; n += 128) {
    const int row = n / kBColumns, column = n % kBColumns;
    *reinterpret_cast<T*>(b_memory + Panels<kBRows>::chunk_offset(row, column / 8) + column % 8 * 2) =
        column < kRealColumns ? b[row * kRealColumns + column] : T(0.f);
  }
  ptx::fence_async_shared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t s_a = ptx::shared_address(memory), s_b = ptx::shared_address(b_memory);
  float out[kN / 2];
  for (float& x : out) x = 1000.f;  // must be overwritten by the first step
  uint32_t fragment[kK / 4];
  for (int step = 0; step < kK / 16; ++step) {
    uint32_t f[4];
    ptx::ldmatrix_x4(f, s_a + Panels<64>::chunk_offset(warp * 16 + (lane & 15), 2 * step + (lane >> 4)));
    for (int n = 0; n < 4; ++n) fragment[4 * step + n] = f[n];
  }
  ptx::wgmma_pin(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    if constexpr (kForm == kShared)
      ptx::Wgmma<T, kN>::ss(out, ptx::descriptor(s_a) + Panels<64>::column_step(step),
                            ptx::descriptor(s_b) + Panels<kBRows>::column_step(step), step != 0);
    else if constexpr (kForm == kRegisters)
      ptx::Wgmma<T, kN>::template rs<0>(out, fragment[4 * step], fragment[4 * step + 1], fragment[4 * step + 2],
                                        fragment[4 * step + 3], ptx::descriptor(s_b) + Panels<kBRows>::column_step(step), step != 0);
    else
      ptx::Wgmma<T, kN>::template rs<1>(out, fragment[4 * step], fragment[4 * step + 1], fragment[4 * step + 2],
                                        fragment[4 * step + 3],
                                        ptx::descriptor(s_b, kBRows * 128) + Panels<kBRows>::row_step(step), step != 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(out);
  for (int n = 0; n < kN / 2; ++n)
    d[(warp * 16 + lane / 4 + (n >> 1 & 1) * 8) * kN + n / 4 * 8 + 2 * (lane % 4) + n % 2] = out[n];
}

template <class T, int kN, Form kForm>
void test_multiply(const char* what) {
  std::vector<T> a(64 * kK), b(kN * kK);
  std::vector<float> d(64 * kN);
  for (size_t n = 0; n < a.size(); ++n) a[n] = T(static_cast<float>(static_cast<int>(n * 7 % 11) - 5));
  for (size_t n = 0; n < b.size(); ++n) b[n] = T(static_cast<float>(static_cast<int>(n * 5 % 13) - 6));
  T *d_a, *d_b;
  float* d_d;
  MUST(cudaMalloc(&d_a, a.size() * 2)), MUST(cudaMalloc(&d_b, b.size() * 2)), MUST(cudaMalloc(&d_d, d.size() * 4));
  MUST(cudaMemcpy(d_a, a.data(), a.size() * 2, cudaMemcpyHostToDevice));
  MUST(cudaMemcpy(d_b, b.data(), b.size() * 2, cudaMemcpyHostToDevice));
  const int shared = 64 * 128 + 64 * 1024;
  MUST(cudaFuncSetAttribute(multiply<T, kN, kForm>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  multiply<T, kN, kForm><<<1, 128, shared>>>(d_a, d_b, d_d);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(d.data(), d_d, d.size() * 4, cudaMemcpyDeviceToHost));
  bool good = true;
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < kN; ++j) {
      float want = 0;
      for (int k = 0; k < kK; ++k)
        want += static_cast<float>(a[i * kK + k]) * static_cast<float>(kForm == kRegistersTransposed ? b[k * kN + j] : b[j * kK + k]);
      good &= want == d[i * kN + j];
    }
  expect(good, what, kN);
  cudaFree(d_a), cudaFree(d_b), cudaFree(d_d);
}

template <class T, int... kN>
void test_shapes(const char* name) {
  std::printf("wgmma %s\n", name);
  (test_multiply<T, kN, kShared>("  shared x shared"), ...);
  (test_multiply<T, kN, kRegisters>("  registers x shared"), ...);
  (test_multiply<T, kN, kRegistersTransposed>("  registers x shared, transposed"), ...);
}

// Loads a box, checks its place in shared memory through `seen`, stores it to `to` at the same coordinates.
template <int kRows, int kPanels>
__global__ void copy_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, int row, int head,
                         int batch, uint16_t* seen) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t s_barrier = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(s_barrier, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(s_barrier, kRows * kPanels * 128);
    ptx::tma_load(ptx::shared_address(memory), from, s_barrier, {{0, row, 0, head, batch}});
  }
  __syncthreads();
  ptx::mbarrier_wait(s_barrier, 0);
  for (int n = threadIdx.x; n < kRows * kPanels * 64; n += blockDim.x) {
    const int r = n / (kPanels * 64), column = n % (kPanels * 64);
    seen[n] = *reinterpret_cast<uint16_t*>(memory + Panels<kRows>::chunk_offset(r, column / 8) + column % 8 * 2);
  }
  __syncthreads();
  if (threadIdx.x == 0 && row >= 0) {  // a store that begins before the tensor is an illegal instruction
    ptx::tma_store(to, ptx::shared_address(memory), {{0, row, 0, head, batch}});
    ptx::tma_store_commit();
    ptx::tma_store_wait_all();
  }
}

template <int kPanels>
void test_boxes(int64_t rows, int64_t columns) {
  constexpr int kRows = 64;
  const int64_t batches = 2, heads = 3, count = batches * rows * heads * columns;
  std::vector<uint16_t> x(count), y(count), seen(kRows * kPanels * 64);
  for (int64_t n = 0; n < count; ++n) x[n] = static_cast<uint16_t>(n % 30000 + 1);
  tw_tensor tensors[2] = {};
  uint16_t* d_seen;
  MUST(cudaMalloc(&d_seen, seen.size() * 2));
  for (tw_tensor& t : tensors) {
    MUST(cudaMalloc(&t.data, count * 2));
    t.dtype = TW_BFLOAT16, t.ndim = 4;
    const int64_t shape[4] = {batches, rows, heads, columns}, stride[4] = {rows * heads * columns, heads * columns, columns, 1};
    for (int n = 0; n < 4; ++n) t.shape[n] = shape[n], t.stride[n] = stride[n];
  }
  MUST(cudaMemcpy(tensors[0].data, x.data(), count * 2, cudaMemcpyHostToDevice));
  CUtensorMap from, to;
  if (!cuda::tensor_map({&tensors[0], columns, kRows, kPanels}, &from).ok() ||
      !cuda::tensor_map({&tensors[1], columns, kRows, kPanels}, &to).ok())
    return expect(false, "tensor_map, columns", static_cast<int>(columns));
  for (int first : {0, -40, static_cast<int>(rows) - 13}) {
    MUST(cudaMemset(tensors[1].data, 0xff, count * 2));
    copy_box<kRows, kPanels><<<1, 128, kRows * kPanels * 128>>>(from, to, first, 1, 1, d_seen);
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(seen.data(), d_seen, seen.size() * 2, cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy(y.data(), tensors[1].data, count * 2, cudaMemcpyDeviceToHost));
    bool good = true;
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kPanels * 64; ++c) {
        const int64_t row = first + r;
        const bool inside = row >= 0 && row < rows && c < columns;
        good &= seen[r * kPanels * 64 + c] == (inside ? x[((rows + row) * heads + 1) * columns + c] : 0);
      }
    for (int64_t n = 0; n < count; ++n) {
      const int64_t b = n / (rows * heads * columns), row = n / (heads * columns) % rows, h = n / columns % heads, c = n % columns;
      const bool written = first >= 0 && b == 1 && h == 1 && row >= first && row < first + kRows && c < kPanels * 64;
      good &= y[n] == (written ? x[n] : 0xffff);
    }
    expect(good, "TMA box, first row", first);
  }
  cudaFree(tensors[0].data), cudaFree(tensors[1].data), cudaFree(d_seen);
}

__global__ void round_trip(uint32_t* wrong) {
  __shared__ __align__(1024) unsigned char memory[16 * 128];
  const uint32_t at = ptx::shared_address(memory) + Panels<16>::chunk_offset(threadIdx.x & 15, threadIdx.x >> 4);
  ptx::stmatrix_x4(at, threadIdx.x, 100 + threadIdx.x, 200 + threadIdx.x, 300 + threadIdx.x);
  __syncwarp();
  uint32_t d[4];
  ptx::ldmatrix_x4(d, at);
  for (uint32_t n = 0; n < 4; ++n)
    if (d[n] != 100 * n + threadIdx.x) atomicAdd(wrong, 1);
}

}  // namespace

int main() {
  int devices = 0, major = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0)
    MUST(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) {
    std::printf("SKIPPED: no GPU of compute capability 9.0\n");
    return 0;
  }
  test_shapes<ptx::bfloat16, 64, 72, 96, 128, 136, 192, 256>("bf16");
  test_shapes<ptx::float16, 64, 72, 96, 128, 136, 192, 256>("f16");
  test_boxes<1>(100, 64);
  test_boxes<2>(100, 128);
  test_boxes<1>(77, 48);
  uint32_t *wrong, host = 0;
  MUST(cudaMalloc(&wrong, 4)), MUST(cudaMemset(wrong, 0, 4));
  round_trip<<<1, 32>>>(wrong);
  MUST(cudaMemcpy(&host, wrong, 4, cudaMemcpyDeviceToHost));
  expect(host == 0, "stmatrix, ldmatrix", 4);
  std::printf("%d cases, %d failed\n", checks, failures);
  return failures != 0;
}
