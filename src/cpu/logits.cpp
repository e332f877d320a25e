#include "cpu/logits.h"

#include <limits>

namespace tilewise {

LogitRules::LogitRules(const tw_problem& p, const tw_tensors& t, bool pairs) {
  const double scale = softmax_scale_of(p) * kLog2E;
  has_addend = t.bias != nullptr || t.alibi_slopes != nullptr;
  modified = has_addend || p.softcap > 0;
  softcap = static_cast<float>(p.softcap * kLog2E);
  q_scale = static_cast<float>(scale);
  pre = post = 1;
  // Scale 0 makes q zero while packing: a factor of 0 here would meet the -inf of masked keys.
  if (pairs && q_scale != 0) (modified ? pre : post) = static_cast<float>(std::fabs(scale));
  if (p.dropout_p > 0) {
    uint64_t seed = p.dropout_seed, offset = p.dropout_offset;
    if (t.rng_state != nullptr) {
      const auto* state = static_cast<const int64_t*>(t.rng_state->data);
      seed = static_cast<uint64_t>(state[0]);
      offset = static_cast<uint64_t>(state[t.rng_state->stride[0]]);
    }
    dropout = Dropout::make(p.dropout_p, seed, offset);
  }
}

namespace {

// A bias in base 2. The largest finite ones stay finite: a row of float32's lowest number is a row of equal logits.
float base2(double bias) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return static_cast<float>(std::isinf(bias) ? bias : std::min(std::max(bias * kLog2E, -kMax), kMax));
}

}  // namespace

void fill_addend(const HeadRows& head_rows, int64_t first_row, int64_t rows, int64_t j, int64_t columns, int64_t panel,
                 float* out) {
  const tw_tensors& t = head_rows.tensors;
  const Sequence& s = head_rows.sequence;
  const int64_t last_row = head_rows.count() - 1;
  const int64_t inside = std::min(columns, s.seqlen_k - j);  // keys past the sequence are masked anyway
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = std::min(first_row + r, last_row);  // padding rows repeat the last
    const int64_t i = head_rows.query(row), h = head_rows.head(row);
    float* line = out + r * panel;
    std::fill(line, line + columns, 0.0f);
    if (t.alibi_slopes != nullptr) {
      const float slope = static_cast<float>(
          static_cast<const float*>(t.alibi_slopes->data)[alibi_offset(*t.alibi_slopes, s.batch, h)] * kLog2E);
      const float diagonal = static_cast<float>(i + s.seqlen_k - s.seqlen_q - j);
      for (int64_t c = 0; c < columns; ++c) line[c] = -slope * std::fabs(diagonal - static_cast<float>(c));
    }
    if (t.bias == nullptr) continue;
    const tw_tensor& bias = *t.bias;
    const int64_t base = bias_offset(bias, s.batch, h, i, j);
    const int64_t step = bias.shape[3] == 1 ? 0 : bias.stride[3];
    switch (bias.dtype) {
      case TW_BOOL: {
        const auto* at = static_cast<const uint8_t*>(bias.data) + base;
        for (int64_t c = 0; c < inside; ++c)
          line[c] = at[c * step] ? line[c] : -std::numeric_limits<float>::infinity();
        break;
      }
      case TW_FLOAT32: {
        const auto* at = static_cast<const float*>(bias.data) + base;
        for (int64_t c = 0; c < inside; ++c) line[c] += base2(at[c * step]);
        break;
      }
      default:
        for (int64_t c = 0; c < inside; ++c)
          line[c] += base2(load_element(bias.data, bias.dtype, base + c * step));
    }
  }
}

void fill_keep(const TileKernels& kernels, const LogitRules& rules, const HeadRows& head_rows, int64_t first_row,
               int64_t rows, int64_t j, int64_t columns, int64_t words, uint64_t* keep) {
  std::fill(keep, keep + rows * words, 0);
  const int64_t end_row = std::min(first_row + rows, head_rows.count());
  if (end_row <= first_row) return;
  const int64_t group = head_rows.group, i_begin = first_row / group, i_end = (end_row - 1) / group + 1;
  uint32_t bits[16];
  for (int64_t g = 0; g < group; ++g) {
    const int64_t batch_head = head_rows.sequence.batch * head_rows.problem.num_heads_q + head_rows.hk * group + g;
    for (int64_t i16 = round_down(i_begin, 16); i16 < i_end; i16 += 16)
      for (int64_t c = 0; c < columns; c += 32) {
        kernels.dropout_bits(rules.dropout, batch_head, i16 / 16, (j + c) / 32, bits);
        for (int64_t i = std::max(i16, i_begin); i < std::min(i16 + 16, i_end); ++i) {
          const int64_t r = i * group + g - first_row;
          if (r >= 0 && r < end_row - first_row) keep[r * words + c / 64] |= uint64_t{bits[i - i16]} << (c % 64);
        }
      }
  }
}

}  // namespace tilewise
