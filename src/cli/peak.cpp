#include "cli/peak.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tilewise::cli {
namespace {

constexpr int64_t kSteps = 4096;  // of a chunk: some 10 us

// A chunk of work; returns its FLOPs. Accumulators enough to hide the latency (4 cycles at 2 a cycle, 6 for vdpbf16ps),
// and few enough for the registers.
using Chunk = double (*)();

template <class Sums>
inline __attribute__((always_inline)) void keep(const Sums& sums) {  // the compiler must believe that they are used
  asm volatile("" : : "r"(&sums) : "memory");
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double chunk_avx512() {
  __m512 sum[16];
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
  for (__m512& s : sum) s = b;
  for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) sum[n] = _mm512_fmadd_ps(sum[n], a, b);
  keep(sum);
  return 2.0 * 16 * 16 * kSteps;
}

__attribute__((target("avx2,fma"))) double chunk_avx2() {
  __m256 sum[12];
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
  for (__m256& s : sum) s = b;
  for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 12
    for (int n = 0; n < 12; ++n) sum[n] = _mm256_fmadd_ps(sum[n], a, b);
  keep(sum);
  return 2.0 * 12 * 8 * kSteps;
}

__attribute__((target("avx512f,avx512bf16"))) double chunk_avx512bf16() {
  __m512 sum[16];
  const __m512 zero = _mm512_setzero_ps();
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00);  // 0.5
  for (__m512& s : sum) s = zero;
  for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) sum[n] = _mm512_dpbf16_ps(sum[n], a, a);
  keep(sum);
  return 4.0 * 16 * 16 * kSteps;
}
#endif

// What every processor has: 4 floats wide, product and sum apart unless the base instruction set fuses them.
double chunk_scalar() {
  typedef float Vector __attribute__((vector_size(16)));
  Vector sum[12];
  const Vector a = {0.5f, 0.5f, 0.5f, 0.5f}, b = {1, 1, 1, 1};
  for (Vector& s : sum) s = b;
  for (int64_t step = 0; step < kSteps; ++step)
#pragma GCC unroll 12
    for (int n = 0; n < 12; ++n) sum[n] = sum[n] * a + b;
  keep(sum);
  return 2.0 * 12 * 4 * kSteps;
}

Chunk chunk_of([[maybe_unused]] std::string_view isa) {
#if defined(__x86_64__)
  if (isa == "avx512bf16") return chunk_avx512bf16;
  if (isa == "avx512") return chunk_avx512;
  if (isa == "avx2") return chunk_avx2;
#endif
  return chunk_scalar;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::string peak_isa(std::string_view kernel_isa) {
  for (std::string_view known : {"scalar", "avx2", "avx512", "avx512bf16"})
    if (kernel_isa == known) return std::string(known);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "scalar";
}

double measure_peak(std::string_view isa, int threads, double seconds) {
  const Chunk chunk = chunk_of(isa);
  std::atomic<int> waiting{threads};
  std::vector<double> rates(static_cast<size_t>(threads));
  const auto work = [&](double* rate) {
    chunk();  // wakes the wide units
    --waiting;
    while (waiting.load() > 0) std::this_thread::yield();
    double flops = 0, elapsed = 0;
    for (const auto begin = std::chrono::steady_clock::now(); elapsed < seconds; elapsed = seconds_since(begin))
      flops += chunk();
    *rate = flops / elapsed * 1e-9;
  };
  std::vector<std::thread> pool;
  for (int n = 1; n < threads; ++n) pool.emplace_back(work, &rates[static_cast<size_t>(n)]);
  work(&rates[0]);
  for (std::thread& thread : pool) thread.join();
  double sum = 0;
  for (double rate : rates) sum += rate;
  return sum;
}

}  // namespace tilewise::cli
