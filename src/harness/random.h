// Random numbers by position: a hash of (seed, stream, n), so that element n has its value whatever the order.
#pragma once
#include <cmath>
#include <cstdint>

namespace tilewise::harness {

inline uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

struct Random {
  uint64_t seed;
  uint64_t stream;

  uint64_t bits(uint64_t n) const { return mix(mix(seed * 1000003 + stream) + n); }
  double uniform(uint64_t n) const { return (static_cast<double>(bits(n) >> 11) + 0.5) * 0x1p-53; }  // (0, 1)
  double normal(uint64_t n) const {  // Box and Muller
    return std::sqrt(-2 * std::log(uniform(2 * n))) * std::cos(6.283185307179586 * uniform(2 * n + 1));
  }
  int64_t below(uint64_t n, int64_t bound) const {  // [0, bound); 0 if bound <= 0
    return bound <= 0 ? 0 : static_cast<int64_t>(bits(n) % static_cast<uint64_t>(bound));
  }
};

// The same as a sequence.
struct RandomSequence {
  Random random;
  uint64_t next = 0;
  int64_t below(int64_t bound) { return random.below(next++, bound); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }  // inclusive
  bool one_in(int64_t n) { return below(n) == 0; }
};

}  // namespace tilewise::harness
