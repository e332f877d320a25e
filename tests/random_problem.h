// Random problems as text, over everything that the contract allows. Whoever calls says how numbers are drawn: the tests of the
// CPU rows let rapidcheck draw them, which then shrinks a failing problem; those of the CUDA rows use a plain engine.
#pragma once
#include <algorithm>
#include <string>

namespace tilewise {

struct ProblemSizes {
  int most_q, most_k, most_batch = 4;
};

// number(low, high): both included. Every choice is a number that is smaller the plainer the problem is, so that shrinking
// numbers shrinks to small sizes and no options.
template <typename Number>
std::string random_problem(const ProblemSizes& sizes, const Number& number) {
  const auto chance = [&](int percent) { return number(0, 99) >= 100 - percent; };
  const auto size_of = [&](int most) {  // often near a multiple of 16, sometimes 0 or 1
    switch (number(0, 5)) {
      case 0: return number(0, 2);
      case 1: return std::min(most, 16 * number(0, 9) + number(0, 2));
      default: return number(1, most);
    }
  };
  const bool backward = chance(40);
  std::string text = backward ? "bwd " : "fwd ";
  const char* dtypes[] = {"f32", "bf16", "f16"};
  text += dtypes[number(0, 2)];
  const int batch = number(1, sizes.most_batch) - (chance(3) ? 1 : 0), heads_k = number(1, 3), group = number(1, 4);
  const int sq = size_of(chance(30) ? 3 : sizes.most_q), sk = size_of(sizes.most_k);
  const auto put = [&](const char* key, auto value) { text += std::string(" ") + key + "=" + std::to_string(value); };
  const int d = chance(15) ? number(1, chance(20) ? 256 : 130) : 8 * number(1, chance(20) ? 32 : 16);
  const int dv = chance(80) ? d : 8 * number(1, chance(20) ? 32 : 16);
  put("b", batch), put("hq", heads_k * group), put("hk", heads_k), put("sq", sq);
  const int dense = 0, packed = 1, paged = 2;
  const int q_layout = chance(30) ? packed : dense;
  int k_layout = backward ? (chance(40) ? packed : dense) : number(0, 2);
  const int page_size = number(1, 40), pages_each = (sk + page_size - 1) / page_size;
  put("sk", k_layout == paged ? pages_each * page_size : sk), put("d", d), put("dv", dv);
  if (q_layout == packed) put("packed_q", sq == 0 ? 0 : number(0, batch * sq + 5));
  if (k_layout == packed) put("packed_k", sk == 0 ? 0 : number(0, batch * sk + 5));
  if (k_layout == paged) text += " pages=" + std::to_string(batch * pages_each + number(1, 5)) + "x" + std::to_string(page_size);
  const int capacity = k_layout == paged ? pages_each * page_size : sk;
  const bool cache = !backward && k_layout != packed && chance(50);
  const bool cache_rows = cache && k_layout == dense && batch > 0 && chance(30);
  if (cache_rows) put("cache_batch", batch + number(1, 3));
  const int appended = cache && capacity > 0 && chance(50) ? number(1, std::min(capacity, 7)) : 0;
  if (appended > 0) put("new", appended);
  const bool rotary = cache && d >= 2 && chance(40);
  if (rotary) text += " rotary=" + std::to_string(2 * number(1, d / 2)) + (chance(50) ? ",interleaved" : "");
  const int mask = number(0, 3);
  if (mask == 1) text += " causal";
  if (mask == 2) text += " window=" + std::to_string(number(-1, 40)) + "," + std::to_string(number(-1, 40));
  if (mask == 3) text += " causal window=" + std::to_string(number(0, 60)) + ",0";
  if (chance(15)) text += std::string(" scale=") + (const char*[]){"0", "-0.2", "0.05", "1", "3"}[number(0, 4)];
  if (chance(20)) text += std::string(" softcap=") + (const char*[]){"1", "20", "50"}[number(0, 2)];
  const bool alibi = chance(20), bias = chance(20), sink = chance(20), boolean = bias && chance(50);
  if (alibi) text += chance(50) ? " alibi=h" : " alibi=bh";
  if (bias) {
    std::string dims;
    for (const char letter : {'b', 'h', 'q', 'k'})
      if (chance(60)) dims += letter;
    if (dims.empty()) dims = "1";
    text += boolean ? " mask=" + dims : std::string(" bias=") + dtypes[number(0, 2)] + ":" + dims;
  }
  if (sink) text += " sink";
  if (chance(15)) {
    text += " dropout=0.25 seed=" + std::to_string(number(0, 1000)) + (chance(30) ? " rng_state" : "");
    if (!backward && chance(50)) text += " dropout_mask";
  }
  if (chance(25)) text += " seqused_q";
  if (appended > 0 || rotary || chance(30)) text += " seqused_k";
  if (cache_rows) text += " cache_batch_idx";
  if (cache && chance(30)) text += " leftpad";
  if (rotary && chance(30)) text += " rotary_seqlens";
  if (!backward && chance(15)) text += " no_lse";
  if (!backward && chance(20)) text += " maxlogit";
  if (backward) {
    if (chance(20)) text += " dlse";
    if (chance(15)) text += " no_dq";
    if (chance(15)) text += " no_dk";
    if (chance(15)) text += " no_dv";
    if (bias && !boolean && chance(70)) text += " dbias";
    if (alibi && chance(70)) text += " dalibi";
    if (sink && chance(70)) text += " dsink";
    if (chance(20)) text += " deterministic";
  }
  if (chance(10)) text += " batch_invariant";
  if (!backward && chance(25)) put("splits", number(1, 9));
  return text;
}

}  // namespace tilewise
