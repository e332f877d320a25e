// Rung 7. The algorithm of rung 5 on the whole machine: vectors and threads.
//
// Rung 5 spends its time in dot products, and C++ forbids the compiler to reorder a float sum: one addition after the
// other. The cure is the shape of every fast matrix product: turn K once, so that neighbouring keys are neighbours in
// memory, and keep 4 x 2 vectors of the result in registers, so that each load serves several sums side by side.
//
// Threads are simpler: blocks of queries share nothing but read-only inputs. A block's result does not depend on who
// computes it or when, so any number of threads gives the same bits.
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>

#define LADDER_RUNG_5_AS_HEADER
#include "05_tiled_attention.cpp"  // NOLINT(bugprone-suspicious-include): the baseline, without a second copy of it

using namespace ladder;

constexpr size_t kLanes = __BIGGEST_ALIGNMENT__ / sizeof(float);  // 4 with SSE or NEON, 8 with AVX, 16 with AVX-512
typedef float Vec __attribute__((vector_size(kLanes * 4)));  // a GCC and Clang extension: operators act lane by lane
typedef int IntVec __attribute__((vector_size(kLanes * 4)));

constexpr size_t kTile = 64;  // block_m, block_n and head_dim in one: every matrix below is made of 64 x 64 tiles
constexpr size_t kRows = 4;   // 4 x 2 vectors of sums, 2 of B and 1 of A fit the 16 registers of SSE and AVX
static_assert(kTile % (2 * kLanes) == 0 && kTile % kRows == 0);
struct alignas(64) Tile {     // whole cache lines: a vector never straddles two, which would halve the load rate
  float x[kTile * kTile];
};
using Tiles = std::vector<Tile>;
constexpr float kInf = std::numeric_limits<float>::infinity();

static inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

static inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

// 2^x for x <= 0: 2^round(x) by way of the exponent bits, times the Taylor series of the rest, in [-0.5, 0.5]. Degree 6
// leaves 1.2e-7, one float rounding. Below -126 the result is 0, which is what a masked key (-inf) weighs.
static inline Vec exp2_vec(Vec x) {
  const Vec t = x < -126.0f ? Vec{} - 126.0f : x;
  const Vec n = (t + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 leaves no fraction bits: rounds to nearest
  const Vec f = t - n;
  Vec p = (f * 1.5403530e-4f + 1.3333558e-3f) * f + 9.6181291e-3f;
  p = (p * f + 5.5504109e-2f) * f + 2.4022651e-1f;
  p = (p * f + 6.9314718e-1f) * f + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x < -126.0f ? Vec{} : p * std::bit_cast<Vec>(exponent);
}

// C += A B, all [kTile, kTile]. Serves S = Q K^T and O += P V alike.
static void multiply_add(const float* a, const float* b, float* c) {
  for (size_t j = 0; j < kTile; j += 2 * kLanes) {
    for (size_t i = 0; i < kTile; i += kRows) {
      Vec sum[kRows][2] = {};  // -O3 unrolls the loops over r, so that these are registers
      for (size_t t = 0; t < kTile; ++t) {
        const Vec b0 = load(b + t * kTile + j), b1 = load(b + t * kTile + j + kLanes);
        for (size_t r = 0; r < kRows; ++r) {
          const float a_value = a[(i + r) * kTile + t];
          sum[r][0] += a_value * b0, sum[r][1] += a_value * b1;
        }
      }
      for (size_t r = 0; r < kRows; ++r) {
        float* c_row = c + (i + r) * kTile + j;
        store(c_row, load(c_row) + sum[r][0]);
        store(c_row + kLanes, load(c_row + kLanes) + sum[r][1]);
      }
    }
  }
}

// One block of queries: rung 5 in tiles. kt[t] is K^T [d, keys] and v[t] is V [keys, d] of the t-th block of keys.
static void attend_block(const Floats& q, const Tiles& kt, const Tiles& v, size_t n, size_t m0, Floats& o) {
  const size_t rows = std::min(kTile, n - m0);
  Tile q_tile = {}, p, o_tile = {};
  Floats row_max(kTile, -kInf), row_sum(kTile);
  const float scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(kTile));  // exp(x) = 2^(x log2 e): folded into Q
  for (size_t c = 0; c < rows * kTile; ++c) q_tile.x[c] = q[m0 * kTile + c] * scale_log2;

  for (size_t n0 = 0; n0 < n; n0 += kTile) {
    p = {};
    multiply_add(q_tile.x, kt[n0 / kTile].x, p.x);
    for (size_t i = 0; i < rows; ++i) {
      float* p_row = p.x + i * kTile;
      for (size_t j = std::min(kTile, n - n0); j < kTile; ++j) p_row[j] = -kInf;  // keys past the end
      Vec max = load(p_row), sum = {};
      for (size_t j = kLanes; j < kTile; j += kLanes) max = load(p_row + j) > max ? load(p_row + j) : max;
      float new_max = row_max[i];
      for (size_t x = 0; x < kLanes; ++x) new_max = std::max(new_max, max[x]);
      for (size_t j = 0; j < kTile; j += kLanes) {
        const Vec e = exp2_vec(load(p_row + j) - new_max);
        store(p_row + j, e);
        sum += e;
      }
      const float rescale = std::exp2(row_max[i] - new_max);
      row_max[i] = new_max, row_sum[i] *= rescale;
      for (size_t x = 0; x < kLanes; ++x) row_sum[i] += sum[x];
      for (size_t c = 0; c < kTile; ++c) o_tile.x[i * kTile + c] *= rescale;
    }
    multiply_add(p.x, v[n0 / kTile].x, o_tile.x);
  }
  for (size_t c = 0; c < rows * kTile; ++c) o[m0 * kTile + c] = o_tile.x[c] / row_sum[c / kTile];
}

static void fast_attention(const Floats& q, const Floats& k, const Floats& v, size_t n, size_t num_threads, Floats& o) {
  Tiles kt((n + kTile - 1) / kTile), v_tiles(kt.size());  // zero where the last block of keys has no more keys
  for (size_t j = 0; j < n; ++j) {
    for (size_t c = 0; c < kTile; ++c) {
      kt[j / kTile].x[c * kTile + j % kTile] = k[j * kTile + c];
      v_tiles[j / kTile].x[j % kTile * kTile + c] = v[j * kTile + c];
    }
  }
  std::atomic<size_t> next{0};  // a free thread takes the next block: no thread waits for a slower one
  const auto work = [&] {
    for (size_t m0; (m0 = next.fetch_add(kTile)) < n;) attend_block(q, kt, v_tiles, n, m0, o);
  };
  std::vector<std::thread> threads;
  for (size_t t = 1; t < num_threads; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, 2000), d = kTile;
  std::printf("tiled attention with vectors and threads, n = %zu, d = %zu, %zu lanes\n\n", n, d, kLanes);
  const Floats q = normal(n * d, 1), k = normal(n * d, 2), v = normal(n * d, 3);  // the inputs of rungs 4 and 5
  const Doubles expected = attention_float64(q, k, v, n, d);
  Floats o_rung5(n * d), o_1(n * d), o_2(n * d);
  const double time_rung5 = milliseconds([&] { tiled_attention(q, k, v, n, d, o_rung5); });
  const double time_1 = milliseconds([&] { fast_attention(q, k, v, n, 1, o_1); });
  const double time_2 = milliseconds([&] { fast_attention(q, k, v, n, 2, o_2); });

  const double flop = 4 * double(n) * double(n) * double(d);  // Q K^T and P V, a multiplication and an addition each
  print_result("rung 5", max_error(o_rung5, expected), time_rung5);
  print_result("vectors, 1 thread", max_error(o_1, expected), time_1);
  print_result("vectors, 2 threads", max_error(o_2, expected), time_2);
  std::printf("speed    rung 5 %.1f GFLOP/s; vectors x %.1f = %.1f GFLOP/s; 2 threads x %.2f = %.1f GFLOP/s\n",
              flop / time_rung5 / 1e6, time_rung5 / time_1, flop / time_1 / 1e6, time_1 / time_2, flop / time_2 / 1e6);
  const double input = double(n) * double(d), num_m_blocks = double((n + kTile - 1) / kTile);
  print_traffic("tiled, block_m = 64", (3 + 2 * num_m_blocks) * input, 3 * input);
  std::printf("memory   %.2f MB for tiles of K^T and V, %.3f MB per thread for tiles of Q, P and O: linear in n\n\n",
              megabytes(2 * input), megabytes(3 * double(kTile * kTile)));

  check(max_error(o_1, expected) < 1e-5, "O agrees with float64, as in rungs 4 and 5");
  check(std::memcmp(o_1.data(), o_2.data(), n * d * sizeof(float)) == 0, "1 and 2 threads: the same bits");
  return exit_code();
}
