// The online softmax as an object: scores that arrive in chunks, never all in memory, by two workers that are merged.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "tilewise/tilewise.hpp"

namespace {

constexpr int64_t kScores = 1'000'000, kChunk = 4096;

float score_at(int64_t n) { return 20 * std::sin(static_cast<float>(n) * 0.001f); }  // a stream
float value_at(int64_t n) { return static_cast<float>(n % 7); }

// Pushes scores [begin, end), and their values, chunk by chunk.
void stream(tilewise::Accumulator& accumulator, int64_t begin, int64_t end) {
  std::vector<float> scores, values;
  for (int64_t at = begin; at < end; at += kChunk) {
    scores.clear(), values.clear();
    for (int64_t n = at; n < std::min(at + kChunk, end); ++n)
      scores.push_back(score_at(n)), values.push_back(value_at(n));
    const int64_t count = static_cast<int64_t>(scores.size());
    accumulator.push({scores.data(), {1, count}}, {values.data(), {count, 1}});
  }
}

}  // namespace

int main() try {
  tilewise::Accumulator first(1, 1), second(1, 1);
  stream(first, 0, kScores / 2);
  stream(second, kScores / 2, kScores);  // elsewhere: another thread, another machine
  first.merge(second);
  float lse = 0, mean = 0;
  first.lse({&lse, {1}});
  first.result({&mean, {1, 1}});

  double max = -INFINITY, sum = 0, weighted = 0;  // with everything at hand
  for (int64_t n = 0; n < kScores; ++n) max = std::max<double>(max, score_at(n));
  for (int64_t n = 0; n < kScores; ++n) {
    const double p = std::exp(score_at(n) - max);
    sum += p, weighted += p * value_at(n);
  }
  std::printf("log-sum-exp of %lld scores: %.6f (all at once: %.6f)\n", static_cast<long long>(kScores), lse,
              max + std::log(sum));
  std::printf("softmax-weighted mean:       %.6f (all at once: %.6f)\n", mean, weighted / sum);
  const bool right = std::fabs(lse - (max + std::log(sum))) < 1e-4 && std::fabs(mean - weighted / sum) < 1e-3;

  // The second pass of a softmax over a stream: probabilities of any chunk.
  std::vector<float> scores(8), probabilities(8);
  for (int64_t n = 0; n < 8; ++n) scores[static_cast<size_t>(n)] = score_at(1570 + n);  // near the maximum
  first.probabilities({scores.data(), {1, 8}}, {probabilities.data(), {1, 8}});
  const double expected = std::exp(score_at(1570) - max) / sum;
  return right && std::fabs(probabilities[0] - expected) < 1e-4 * expected ? 0 : 1;
} catch (const tilewise::Error& error) {
  std::fprintf(stderr, "error %d: %s\n", error.status(), error.what());
  return 1;
}
