// Rung 5. Tiled attention (FlashAttention, Dao et al. 2022): rung 4 without S and P, by means of rung 3.
//
// Take block_m queries and walk over the keys, block_n at a time. A tile of S is computed, turned into a tile of P
// against the maximum seen *so far*, multiplied into O and forgotten. When a later tile raises the maximum, what O and
// the sum hold is too large by exp(m - m'), exactly as in the online softmax, and is rescaled:
//
//   m' = max(m, rowmax(S_tile))      P_tile = exp(S_tile - m')      a = exp(m - m')
//   l' = a l + rowsum(P_tile)        O' = a O + P_tile V_tile       finally O / l
//
// The result is the same attention, not an approximation. The extra memory is one tile, whatever n.
#include "ladder.h"

using namespace ladder;

constexpr size_t kBlockM = 128, kBlockN = 64;  // the P tile is 32 KB: it stays in a first- or second-level cache

static void tiled_attention(const Floats& q, const Floats& k, const Floats& v, size_t n, size_t d, Floats& o) {
  const float softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  Floats p(kBlockM * kBlockN), row_max(kBlockM), row_sum(kBlockM);
  std::fill(o.begin(), o.end(), 0.0f);
  for (size_t m0 = 0; m0 < n; m0 += kBlockM) {
    const size_t rows = std::min(kBlockM, n - m0);
    std::fill(row_max.begin(), row_max.end(), -std::numeric_limits<float>::infinity());
    std::fill(row_sum.begin(), row_sum.end(), 0.0f);
    for (size_t n0 = 0; n0 < n; n0 += kBlockN) {
      const size_t keys = std::min(kBlockN, n - n0);
      for (size_t i = 0; i < rows; ++i) {
        const float* q_row = &q[(m0 + i) * d];
        float* o_row = &o[(m0 + i) * d];
        float* p_row = &p[i * kBlockN];

        float new_max = row_max[i];
        for (size_t j = 0; j < keys; ++j) {  // S = Q K^T / sqrt(d), into the place of P
          float dot = 0;
          for (size_t c = 0; c < d; ++c) dot += q_row[c] * k[(n0 + j) * d + c];
          p_row[j] = dot * softmax_scale;
          new_max = std::max(new_max, p_row[j]);
        }

        const float rescale = std::exp(row_max[i] - new_max);  // 0 for the first tile, 1 if the maximum stands
        float sum = 0;
        for (size_t j = 0; j < keys; ++j) sum += p_row[j] = std::exp(p_row[j] - new_max);
        row_sum[i] = row_sum[i] * rescale + sum;
        row_max[i] = new_max;

        for (size_t c = 0; c < d; ++c) o_row[c] *= rescale;
        for (size_t j = 0; j < keys; ++j) {  // O += P V
          for (size_t c = 0; c < d; ++c) o_row[c] += p_row[j] * v[(n0 + j) * d + c];
        }
      }
    }
    for (size_t i = 0; i < rows; ++i) {  // once per row, not once per tile
      for (size_t c = 0; c < d; ++c) o[(m0 + i) * d + c] /= row_sum[i];
    }
  }
}

#ifndef LADDER_RUNG_5_AS_HEADER  // rung 7 includes this file, to measure itself against tiled_attention
int main(int argc, char** argv) {
  const size_t n = size_argument(argc, argv, 2000), d = 64;  // 2000 is no multiple of either block: tails are covered
  std::printf("tiled attention, n = %zu, d = %zu, block_m = %zu, block_n = %zu\n\n", n, d, kBlockM, kBlockN);

  const Floats q = normal(n * d, 1), k = normal(n * d, 2), v = normal(n * d, 3);  // the inputs of rung 4
  Floats o(n * d);
  const double time = milliseconds([&] { tiled_attention(q, k, v, n, d, o); });
  const double error = max_error(o, attention_float64(q, k, v, n, d));
  print_result("no n x n matrix", error, time);

  // Q and O move once. K and V move once per block of queries, so traffic falls as block_m grows. The time hardly
  // changes against rung 4: one scalar dot product after the other is too slow to wait for memory. Rung 7 is not.
  const double matrix = double(n) * double(n), input = double(n) * double(d);
  const double num_m_blocks = double((n + kBlockM - 1) / kBlockM);
  print_traffic("tiled", input + num_m_blocks * 2 * input, input);
  print_traffic("(rung 4: standard)", 2 * matrix + 3 * input, 2 * matrix + input);
  const double tile = double(kBlockM * kBlockN + 2 * kBlockM), standard = 2 * matrix;
  std::printf("memory   %.3f MB for a tile of P and the row state at any n; rung 4 %.2f MB\n\n", megabytes(tile),
              megabytes(standard));

  // Attention that must rescale on every tile: logits grow with j, by 500 / sqrt(d) over the sequence.
  Floats growing = k;
  for (size_t j = 0; j < n; ++j) growing[j * d] = 500 * static_cast<float>(j) / static_cast<float>(n);
  Floats q_growing = q, o_growing(n * d);
  for (size_t i = 0; i < n; ++i) q_growing[i * d] = 1;
  tiled_attention(q_growing, growing, v, n, d, o_growing);

  check(error < 1e-5, "O agrees with float64, as in rung 4: tiling is exact");
  check(max_error(o_growing, attention_float64(q_growing, growing, v, n, d)) < 2e-5,
        "logits that grow from tile to tile: the rescaling is right");
  return exit_code();
}
#endif
