// Every CUDA row against the float64 reference, over shapes, layouts and options. Skips where there is no GPU; with
// TILEWISE_TEST_BACKEND=cpu the rows of the CPU walk through the same list.
//   rows_test [forward|decode|backward|cases] [regular expression] [another] [K/N]: cases that match both, of these every N-th from K on; decode: the part of forward
//   with few queries a sequence; cases: the lines of tests/cases
//   rows_test random SECONDS [SEED]: random problems, until the time is up
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <regex>

#include "conformance/cases.h"
#include "core/status.h"
#include "harness/check.h"
#include "harness/gpu.h"
#include "random_problem.h"

namespace tilewise {
namespace {

using namespace harness;

struct Check {
  std::string text;
  Layout layout = Layout::kContiguous;
  InputKind kind = InputKind::kGaussian;
  bool float_out = false;
  bool nan_rows = false;  // NaN in rows that some queries see and others do not
};

// Logits of standard deviation 100.
std::string steep(const std::string& head_dim) { return " scale=" + std::to_string(100 / std::sqrt(std::stod(head_dim))); }

constexpr const char* kDtypes[] = {"bf16 ", "f16 ", "f32 "};

std::vector<Check> forward_cases() {
  std::vector<Check> cases;
  const auto add = [&](std::string text, Layout layout = Layout::kContiguous, InputKind kind = InputKind::kGaussian, bool float_out = false) {
    cases.push_back({"fwd " + text, layout, kind, float_out});
  };
  const auto both = [&](const std::string& text, Layout layout = Layout::kContiguous, InputKind kind = InputKind::kGaussian) {
    for (const char* dtype : kDtypes) add(dtype + text, layout, kind);
  };
  // Head dims: every multiple of 8, plain and general; some that are not.
  for (const int d : {1, 2, 7, 12, 33, 65, 100, 127, 129, 210, 255}) {
    both("b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + " causal");
    both("b=2 hq=4 hk=2 sq=9 sk=700 splits=3 d=" + std::to_string(d) + " dv=" + std::to_string(256 - d));
  }
  for (int d = 8; d <= 256; d += 8) {
    add("f32 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : " softcap=5"));
    add("bf16 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : ""));
    add("f16 b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + " softcap=5" + (d % 16 ? "" : " causal"));
    add("f16 b=1 hq=4 hk=2 sq=9 sk=150 d=" + std::to_string(d));
  }
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{64, 128}, {128, 64}, {192, 128}, {40, 256}, {256, 8}, {72, 104}})
    both("b=2 hq=2 sq=140 sk=200 d=" + std::to_string(d) + " dv=" + std::to_string(dv) + " causal");
  // Lengths around the tiles, masks.
  for (auto [sq, sk] : std::vector<std::pair<int, int>>{{1, 1}, {1, 5}, {5, 1}, {2, 5}, {5, 2}, {17, 97}, {64, 64}, {65, 63}, {127, 129}, {128, 128}, {113, 203}, {203, 113}, {256, 511}, {511, 256}, {1000, 1025}}) {
    const std::string s = "b=1 hq=2 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) + " d=64";
    both(s), both(s + " causal"), both(s + " window=10,-1"), both(s + " window=100,3"), both(s + " window=0,0"), both(s + " window=-1,40");
    both(s + " causal window=70,0"), both(s + " causal softcap=10 sink"), both(s + " alibi=h causal maxlogit"), both(s + " mask=bhqk causal");
  }
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=300 sk=333 d=") + d;
    both(s + " causal softcap=20 alibi=bh bias=f32:hqk sink dropout=0.3 seed=5 maxlogit");
    both(s + " dropout=0.1 seed=9 offset=3 dropout_mask"), both(s + " dropout=0.5 rng_state dropout_mask window=50,20");
    both(s + " bias=bf16:bk"), both(s + " bias=f16:q"), both(s + " bias=f32:1"), both(s + " mask=qk"), both(s + " mask=bk"), both(s + " sink no_lse");
    both(s + " scale=0"), both(s + " scale=-0.125 causal"), both(s + " scale=1e-8"), both(s + " scale=2 maxlogit");
    both(s + " causal", Layout::kContiguous, InputKind::kPeaked), both(s + steep(d)), both(s + " sink" + steep(d));
    both(s + " seqused_q seqused_k causal"), both(s + " leftpad seqused_k"), both(s + " leftpad causal sink");
    for (Layout layout : {Layout::kTransposed, Layout::kFusedQkv, Layout::kUnaligned, Layout::kEveryOther})
      both(s + " causal", layout), both(s + " softcap=3", layout);
    add("bf16 " + s + " causal", Layout::kContiguous, InputKind::kGaussian, true), add("bf16 " + s + " sink", Layout::kUnaligned, InputKind::kGaussian, true);
    const std::string packed = std::string("b=7 hq=4 hk=1 sq=200 sk=210 d=") + d;
    both(packed + " packed_q=900 packed_k=800"), both(packed + " packed_q=900 packed_k=800 causal"), both(packed + " packed_q=900 causal seqused_q seqused_k");
    both(packed + " packed_q=900 packed_k=800 causal sink alibi=h seqused_q"), both(packed + " packed_k=800 window=30,10");
    both(packed + " pages=80x16 seqused_k causal"), both(packed + " pages=300x5 seqused_k packed_q=1000"), both(packed + " pages=10x256 seqused_k sink");
    const std::string decode = std::string("b=3 hq=8 hk=2 sk=1500 d=") + d;
    for (const char* sq : {" sq=1", " sq=3", " sq=64"})
      for (const char* rest : {"", " causal", " seqused_k sink", " splits=5 seqused_k", " splits=3 causal sink maxlogit", " splits=7 alibi=h window=300,-1", " splits=128 leftpad seqused_k", " pages=400x16 seqused_k", " cache_batch=5 cache_batch_idx seqused_k causal softcap=9"})
        both(decode + sq + rest);
    // Rows of several heads in a tile, and a bias or mask whose rows can be copied.
    for (const char* rest : {" sq=1 mask=bhqk", " sq=3 bias=bf16:hqk", " sq=3 splits=3 mask=bk", " sq=64 bias=f32:bhqk causal", " sq=64 splits=4 mask=hqk seqused_k"})
      both(std::string("b=3 hq=8 hk=2 sk=1504 d=") + d + rest);
    for (const char* sq : {" sq=1", " sq=5", " sq=130"})
      for (const char* rest : {"", " rotary=16", " rotary=32,interleaved causal", " rotary=64 rotary_seqlens causal", " leftpad causal", " pages=400x16 rotary=8 causal", " cache_batch=5 cache_batch_idx rotary=64"})
        both(std::string("b=3 hq=4 hk=2 sk=300 new=5 seqused_k d=") + d + sq + rest);
    both(std::string("b=4 hq=4 hk=2 sq=70 sk=500 packed_q=240 rotary=32 seqused_k causal d=") + d);
    both(std::string("b=3 hq=4 hk=2 sq=200 sk=1500 splits=4 causal d=") + d);
    both(std::string("b=4 hq=4 hk=2 sq=70 sk=500 packed_q=240 splits=4 sink seqused_q seqused_k d=") + d);
    add(std::string("bf16 b=2 hq=4 hk=2 sq=5 sk=500 splits=4 d=") + d, Layout::kUnaligned);
  }
  for (const char* d : {"64", "128", "192", "256"})
    for (const char* rest : {" causal", " window=20,10", " causal softcap=5", " mask=qk", " causal pages=40x16", " causal splits=3"})
      for (const char* dtype : kDtypes)
        cases.push_back({std::string("fwd ") + dtype + "b=2 hq=4 hk=2 sq=150 sk=170 d=" + d + rest, Layout::kContiguous, InputKind::kGaussian, false, true});
  // Several tiles of every kernel in both directions.
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=420 sk=600 d=") + d;
    for (const char* rest : {"", " no_lse", " causal", " causal no_lse", " window=-1,40", " window=-1,300", " window=100,30", " window=300,-1", " window=700,700",
                             " causal scale=-0.2", " causal softcap=20", " softcap=5 sink maxlogit scale=-0.3", " alibi=bh causal", " alibi=h window=200,90",
                             " causal maxlogit", " causal sink", " leftpad seqused_k causal", " leftpad window=99,33", " cache_batch=5 cache_batch_idx seqused_k",
                             " seqused_q seqused_k causal", " sm_margin=100 causal", " batch_invariant", " dropout=0.2 seed=7", " dropout=0.3 causal maxlogit",
                             " dropout=0.5 rng_state window=100,60 dropout_mask", " dropout=0.2 leftpad seqused_k causal", " dropout=0.4 window=70,-1"})
      both(s + rest);
    for (const char* rest : {" causal", "", " window=-1,100 no_lse", " sink", " causal softcap=40"})
      both(s + rest + steep(d));
    const std::string paged = std::string("b=2 hq=4 hk=2 sq=300 sk=768 d=") + d;
    for (const char* rest : {" pages=100x16 seqused_k causal", " pages=50x32 seqused_k window=200,30", " pages=30x64", " pages=12x128 leftpad seqused_k causal",
                             " pages=7x384 softcap=9 sink seqused_k", " pages=100x16 dropout=0.2 causal seqused_k", " pages=210x8 alibi=h causal",
                             " pages=100x16 leftpad window=50,-1 maxlogit"})
      both(paged + rest);
    both(paged + " pages=100x16 causal seqused_k" + steep(d));
    both(paged + " dv=72 pages=100x16 causal"), both(paged + " packed_q=500 pages=40x64 causal sink");
    const std::string packed = std::string("b=5 hq=4 hk=1 sq=400 sk=450 packed_q=800 packed_k=900 d=") + d;
    for (const char* rest : {"", " causal", " window=90,50 sink", " causal softcap=7 maxlogit", " causal batch_invariant"}) both(packed + rest);
    // Nothing at the edges of tiles.
    for (const char* rest : {"", " no_lse", " sink", " scale=-0.3", " batch_invariant"}) both(std::string("b=3 hq=6 hk=2 sq=384 sk=256 d=") + d + rest);
    both(std::string("b=2 hq=4 hk=2 sq=256 sk=512 d=") + d + steep(d)), both(std::string("b=2 hq=4 hk=2 sq=256 sk=512 no_lse d=") + d + steep(d));
    // Tiles by several blocks each.
    for (const char* rest : {"", " no_lse", " sink", " scale=-0.3"}) both(std::string("b=1 hq=2 sq=130 sk=1500 d=") + d + rest);
    both(std::string("b=1 hq=6 hk=2 sq=300 sk=2500 d=") + d + " dv=72"), both(std::string("b=2 hq=4 sq=70 sk=1700 batch_invariant d=") + d);
    both(std::string("b=2 hq=2 hk=1 sq=600 sk=350 causal d=") + d), both(std::string("b=2 hq=2 hk=1 sq=600 sk=200 window=20,100 d=") + d);
    for (const char* rest : {" causal", " window=200,100", " causal softcap=5", " seqused_k", " leftpad causal"})
      for (const char* dtype : kDtypes)
        cases.push_back({std::string("fwd ") + dtype + "b=2 hq=4 hk=2 sq=300 sk=420 d=" + d + rest, Layout::kContiguous, InputKind::kGaussian, false, true});
  }
  // Query heads that share tiles, and their tiles several blocks. All combinations at d 128, a part of them elsewhere.
  for (const char* d : {"128", "256", "96", "192 dv=72"}) {
    size_t turn = 0;
    for (const char* heads : {"hq=8 hk=1 sq=17", "hq=16 hk=2 sq=40", "hq=8 hk=1 sq=130", "hq=4 hk=1 sq=70", "hq=6 hk=3 sq=100", "hq=24 hk=3 sq=300"})
      for (const char* rest : {"", " causal", " causal sink", " window=300,-1 no_lse", " window=-1,40", " causal scale=1.5"})
        if (++turn % 5 == 0 || std::string(d) == "128") add(std::string(turn % 3 ? "bf16" : "f16") + " b=2 " + heads + " sk=1300 d=" + d + rest);
    for (const char* rest : {"", " causal", " seqused_q seqused_k causal", " window=50,9 sink"})
      add(std::string("bf16 b=5 hq=8 hk=1 sq=40 sk=450 packed_q=120 packed_k=900 d=") + d + rest);
    add(std::string("bf16 b=3 hq=8 hk=1 sq=33 sk=1500 seqused_k leftpad causal d=") + d);
    add(std::string("f16 b=1 hq=8 hk=1 sq=100 sk=3000 causal batch_invariant d=") + d);
    add(std::string("bf16 b=1 hq=8 hk=1 sq=100 sk=3000 causal sm_margin=100 d=") + d, Layout::kTransposed);
    add(std::string("bf16 b=1 hq=64 hk=8 sq=16 sk=2000 d=") + d, Layout::kUnaligned);  // to the general row, without its splits
    add(std::string("f16 b=1 hq=64 hk=8 sq=16 sk=2000 d=") + d, Layout::kContiguous, InputKind::kGaussian, true);
    cases.push_back({std::string("fwd bf16 b=2 hq=8 hk=2 sq=60 sk=420 causal d=") + d, Layout::kContiguous, InputKind::kGaussian, false, true});
  }
  // Every kind of bias and mask that the copy engine brings, every broadcast, and in turn what they meet.
  constexpr const char* kMeets[] = {"", " causal", " window=200,90", " softcap=9", " alibi=h causal", " sink", " maxlogit", " dropout=0.2 seed=3 causal",
                                    " seqused_q seqused_k", " leftpad seqused_k causal", " scale=-0.2", " no_lse window=-1,30", " causal softcap=7 alibi=bh sink dropout=0.3 maxlogit"};
  size_t meeting = 0;
  for (const char* d : {"64", "128", "256", "96", "192 dv=72"})
    for (const char* bias : {"bias=bf16:", "bias=f16:", "bias=f32:", "mask="})
      for (const char* dims : {"bhqk", "hqk", "bqk", "qk", "bk", "hk", "k"})
        for (const char* dtype : {"bf16", "f16"}) {
          const std::string name = bias;
          if ((name == "bias=bf16:" || name == "bias=f16:") && name.find(std::string("=") + dtype) == std::string::npos) continue;
          const InputKind kind = meeting % 2 == 0 ? InputKind::kGaussian : InputKind::kNegative;
          add(concat(dtype, " b=2 hq=4 hk=2 sq=200 sk=352 d=", d, " ", bias, dims, kMeets[meeting++ % std::size(kMeets)]), Layout::kContiguous, kind);
        }
  for (const char* d : {"64", "128", "256"})
    for (const char* bias : {"bias=bf16:bhqk", "bias=f32:hqk", "mask=bk", "mask=qk"}) {
      const std::string s = concat("bf16 b=2 hq=4 hk=2 d=", d, " ", bias), packed = concat("bf16 b=5 hq=4 hk=1 d=", d, " ", bias);
      for (const char* rest : {" sq=333 sk=450 causal", " sq=700 sk=320 causal", " sq=130 sk=1536 window=300,200"}) add(s + rest);
      for (Layout layout : {Layout::kTransposed, Layout::kExpanded, Layout::kUnaligned, Layout::kEveryOther}) add(s + " sq=192 sk=320 causal", layout);
      add(s + " sq=200 sk=320" + steep(d)), add(s + " sq=200 sk=320", Layout::kContiguous, InputKind::kGrowing);
      add(packed + " sq=200 sk=224 packed_q=500 packed_k=600 causal"), add(s + " sq=300 sk=768 pages=100x16 seqused_k causal");
      cases.push_back({"fwd " + s + " sq=150 sk=176", Layout::kContiguous, InputKind::kGaussian, false, true});
    }
  // Zero sizes.
  for (const char* rest : {"b=0 hq=2 sq=5 sk=5", "b=2 hq=2 sq=0 sk=5", "b=2 hq=2 sq=5 sk=0", "b=2 hq=2 sq=5 sk=0 sink", "b=1 hq=0 sq=5", "b=2 hq=2 sq=100 sk=0 causal splits=2"})
    both(std::string(rest) + " d=64");
  return cases;
}

// One or a few queries over many keys: every row count up to the 16 of a product and beyond, splits, caches.
std::vector<Check> decode_cases() {
  std::vector<Check> cases;
  const auto both = [&](const std::string& text, Layout layout = Layout::kContiguous, InputKind kind = InputKind::kGaussian,
                        bool float_out = false, bool nan_rows = false) {
    for (const char* dtype : {"bf16", "f16"}) cases.push_back({std::string("fwd ") + dtype + " " + text, layout, kind, float_out, nan_rows});
  };
  for (const char* d : {"64", "128", "256"}) {
    const auto end = [&](const char* rest) { return std::string(" d=") + d + rest; };
    for (const char* heads : {"hq=3 hk=3", "hq=8 hk=2", "hq=14 hk=2", "hq=32 hk=2", "hq=32 hk=1"})
      for (const char* rest : {"", " splits=3 sink", " splits=40 seqused_k maxlogit", " window=100,-1 splits=2", " pages=120x16 seqused_k", " alibi=h leftpad"})
        both(std::string("b=3 ") + heads + " sq=1 sk=528" + end(rest));
    for (const char* sk : {"1", "15", "16", "17", "63", "64", "65", "129", "500"})
      for (const char* rest : {"", " splits=128 causal sink"}) both(std::string("b=2 hq=8 hk=2 sq=3 sk=") + sk + end(rest));
    for (const char* sq : {"2", "4", "5", "8"})
      for (const char* rest : {" causal", " causal splits=4 maxlogit", " window=33,7 splits=3", " causal softcap=9 seqused_k seqused_q sink", " causal seqused_k seqused_q splits=5 sink",
                               " scale=-0.2 causal", " scale=0 splits=2", " batch_invariant causal", " sm_margin=20 causal", " no_lse causal"})
        both(std::string("b=3 hq=8 hk=2 sk=400 sq=") + sq + end(rest));
    for (const char* pages : {" pages=2000x1", " pages=300x5", " pages=90x16", " pages=5x256"})
      for (const char* rest : {" seqused_k causal", " leftpad seqused_k splits=3", " window=50,10 splits=2"})
        both(std::string("b=3 hq=8 hk=2 sq=2 sk=") + (std::string(pages) == " pages=5x256" ? "256" : std::string(pages) == " pages=300x5" ? "400" : "432") + end("") + pages + rest);
    for (Layout layout : {Layout::kTransposed, Layout::kFusedQkv, Layout::kUnaligned, Layout::kEveryOther})
      both(std::string("b=2 hq=8 hk=2 sq=2 sk=500") + end(" causal"), layout), both(std::string("b=2 hq=8 hk=2 sq=2 sk=500") + end(" splits=4"), layout);
    both(std::string("b=2 hq=8 hk=2 sq=2 sk=432") + end(" pages=90x16"), Layout::kUnaligned);
    for (const char* rest : {"", " causal splits=4", " sink", " causal softcap=40"}) both(std::string("b=2 hq=8 hk=2 sq=3 sk=400") + end(rest) + steep(d));
    for (const char* rest : {"", " causal splits=4"}) both(std::string("b=2 hq=8 hk=2 sq=3 sk=400") + end(rest), Layout::kContiguous, InputKind::kPeaked);
    for (const char* rest : {" causal", " splits=3"}) both(std::string("b=2 hq=8 hk=2 sq=3 sk=400") + end(rest), Layout::kContiguous, InputKind::kGaussian, true);
    for (const char* rest : {" causal", " window=20,3", " window=60,0 splits=2", " causal splits=7", " causal softcap=5"})
      both(std::string("b=2 hq=8 hk=2 sq=4 sk=100") + end(rest), Layout::kContiguous, InputKind::kGaussian, false, true);
    for (const char* rest : {"", " causal", " causal splits=3 sink", " causal seqused_q seqused_k splits=2 sink alibi=bh", " window=30,10 maxlogit"}) {
      both(std::string("b=5 hq=8 hk=2 sq=4 sk=300 packed_q=17 packed_k=900") + end(rest));
      both(std::string("b=5 hq=8 hk=2 sq=4 sk=320 packed_q=17 pages=120x16") + end(rest));
    }
    both(std::string("b=3 hq=8 hk=2 sq=2 sk=300 new=3 seqused_k rotary=32 causal splits=3") + end(""));
  }
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{8, 8}, {40, 72}, {72, 40}, {96, 96}, {192, 128}, {128, 256}, {248, 8}})
    for (const char* rest : {" causal", " splits=5 sink"}) both("b=2 hq=8 hk=2 sq=2 sk=500 d=" + std::to_string(d) + " dv=" + std::to_string(dv) + rest);
  return cases;
}

std::vector<Check> backward_cases() {
  std::vector<Check> cases;
  const auto both = [&](const std::string& text, Layout layout = Layout::kContiguous, InputKind kind = InputKind::kGaussian) {
    for (const char* dtype : kDtypes) cases.push_back({std::string("bwd ") + dtype + text, layout, kind});
  };
  for (const int d : {1, 2, 7, 12, 33, 65, 100, 127, 129, 210, 255})
    both("b=1 hq=4 hk=2 sq=133 sk=150 d=" + std::to_string(d) + " dv=" + std::to_string(256 - d) + " causal");
  for (int d = 8; d <= 256; d += 8) both("b=1 hq=2 sq=133 sk=150 d=" + std::to_string(d) + (d % 16 ? " causal" : " softcap=5"));
  for (auto [d, dv] : std::vector<std::pair<int, int>>{{64, 128}, {128, 64}, {192, 128}, {40, 256}, {256, 8}, {72, 104}})
    both("b=2 hq=2 sq=140 sk=200 d=" + std::to_string(d) + " dv=" + std::to_string(dv) + " causal");
  for (auto [sq, sk] : std::vector<std::pair<int, int>>{{1, 1}, {1, 5}, {5, 1}, {2, 5}, {5, 2}, {17, 97}, {64, 64}, {65, 63}, {127, 129}, {128, 128}, {113, 203}, {203, 113}, {256, 511}, {511, 256}}) {
    const std::string s = "b=1 hq=2 sq=" + std::to_string(sq) + " sk=" + std::to_string(sk) + " d=64";
    both(s), both(s + " causal"), both(s + " window=10,-1"), both(s + " window=100,3"), both(s + " window=0,0"), both(s + " window=-1,40");
    both(s + " causal window=70,0 deterministic"), both(s + " causal softcap=10 sink dsink"), both(s + " alibi=h causal dalibi"), both(s + " mask=bhqk causal");
  }
  for (const char* d : {"64", "128", "256"}) {
    const std::string s = std::string("b=2 hq=4 hk=2 sq=300 sk=333 d=") + d;
    both(s + " causal"), both(s), both(s + " deterministic"), both(s + " causal deterministic dlse");
    both(s + " causal softcap=20 alibi=bh bias=f32:hqk sink dropout=0.3 seed=5 dbias dalibi dsink dlse");
    both(s + " causal softcap=20 alibi=bh bias=f32:bhqk sink dropout=0.3 seed=5 dbias dalibi dsink dlse deterministic");
    both(s + " dropout=0.1 seed=9 offset=3"), both(s + " dropout=0.5 rng_state window=50,20"), both(s + " dropout=0.4 seed=3 softcap=8 deterministic");
    both(s + " dropout=0.2 causal", Layout::kUnaligned), both(s + " dropout=0.2 causal deterministic");
    both(s + " bias=bf16:bk dbias"), both(s + " bias=f16:q dbias"), both(s + " bias=f32:1 dbias"), both(s + " bias=f32:bhqk dbias"), both(s + " mask=qk"), both(s + " mask=bk");
    both(s + " bias=f32:bhqk dbias deterministic"), both(s + " causal alibi=bh bias=f32:hqk sink dropout=0.3 seed=5 dbias dalibi dsink dlse deterministic");
    both(s + " alibi=h dalibi window=60,40 dropout=0.1 rng_state"), both(s + " mask=hqk causal dropout=0.2 softcap=6 scale=-0.1");
    both(s + " scale=0"), both(s + " scale=-0.125 causal"), both(s + " no_dq"), both(s + " no_dk no_dv"), both(s + " no_dk");
    both(s + " causal", Layout::kContiguous, InputKind::kPeaked);
    both(s + " seqused_q seqused_k causal");
    for (Layout layout : {Layout::kTransposed, Layout::kFusedQkv, Layout::kUnaligned, Layout::kEveryOther})
      both(s + " causal", layout), both(s + " softcap=3", layout);
    const std::string packed = std::string("b=7 hq=4 hk=1 sq=200 sk=210 d=") + d;
    both(packed + " packed_q=900 packed_k=800"), both(packed + " packed_q=900 packed_k=800 causal deterministic"), both(packed + " packed_q=900 causal seqused_q seqused_k");
    both(packed + " packed_q=900 packed_k=800 causal sink dsink alibi=h dalibi seqused_q"), both(packed + " packed_k=800 window=30,10");
    // Blocks that take many key blocks one after the other.
    const auto few = [&](const std::string& text) { cases.push_back({"bwd bf16 " + text}), cases.push_back({"bwd f16 " + text}); };
    for (const char* margin : {" sm_margin=131", " sm_margin=129", " sm_margin=125"}) {
      for (const char* rest : {"", " causal", " deterministic", " causal deterministic", " window=40,30", " window=90,-1 deterministic", " window=20,60 deterministic",
                               " seqused_q seqused_k causal", " seqused_q seqused_k deterministic", " causal no_dq", " no_dk",
                               " dropout=0.2 seed=4", " dropout=0.1 seed=4 causal", " dropout=0.3 window=40,30 deterministic", " dropout=0.6 seqused_q seqused_k causal",
                               " alibi=h dalibi causal", " bias=f32:hqk dbias window=40,30", " softcap=9 dropout=0.2 seqused_q seqused_k deterministic"})
        few(s + rest + margin);
      for (const char* rest : {" packed_q=900 packed_k=800", " packed_q=900 packed_k=800 causal deterministic", " packed_q=900 packed_k=800 deterministic",
                               " packed_k=800 window=30,10", " packed_q=300 packed_k=700 causal", " packed_q=900 packed_k=800 dropout=0.2 causal",
                               " packed_q=900 packed_k=800 dropout=0.1 rng_state deterministic", " packed_q=900 packed_k=800 causal alibi=bh dalibi dropout=0.2"})
        few(packed + rest + margin);
      // More key blocks a head than those up to which the first to add to dq stores.
      for (const char* rest : {"", " causal"}) few(std::string("b=1 hq=2 hk=1 sq=130 sk=2100 d=") + d + rest + margin);
      few(std::string("b=9 hq=2 hk=1 sq=30 sk=200 causal d=") + d + margin), few(std::string("b=9 hq=2 hk=1 sq=130 sk=700 deterministic d=") + d + margin);
      few(std::string("b=2 hq=6 hk=2 sq=700 sk=400 causal deterministic d=") + d + margin);
    }
    // Bias and masks whose tiles can be copied ahead, rows of a multiple of 16 bytes: every type and broadcast, and what they meet.
    const std::string copied = std::string("b=2 hq=4 hk=2 sq=300 sk=336 d=") + d;
    int turn = 0;
    const auto alternate = [&](const std::string& text, Layout layout = Layout::kContiguous) {
      cases.push_back({(turn++ % 2 ? "bwd f16 " : "bwd bf16 ") + text, layout});
    };
    for (const std::string bias : {" bias=bf16:", " bias=f32:", " mask="}) {
      for (const char* dims : {"bhqk sm_margin=129", "hqk causal", "bqk", "qk causal", "bhk sm_margin=129", "bk causal"}) alternate(copied + bias + dims);
      for (const char* rest : {"hqk window=40,30 deterministic", "bqk dropout=0.2 seed=4", "qk alibi=h dalibi causal", "bk seqused_q seqused_k causal", "bhqk scale=0 deterministic",
                               "hqk causal softcap=9 alibi=bh dropout=0.3 sink dsink dlse", "hqk sm_margin=131 causal deterministic", "bhqk no_dq"})
        alternate(copied + bias + rest);
      if (bias != " mask=")
        for (const char* rest : {"bhqk dbias", "hqk dbias sm_margin=131", "bhqk dbias causal alibi=h seqused_q seqused_k", "bk dbias deterministic"}) alternate(copied + bias + rest);
      for (const char* lengths : {"b=3 hq=2 sq=1 sk=16", "b=1 hq=2 hk=1 sq=129 sk=2064 sm_margin=131"}) alternate(lengths + bias + "hqk d=" + d);
      for (const Layout layout : {Layout::kUnaligned, Layout::kExpanded}) alternate(copied + bias + "hqk", layout);
      alternate(std::string("b=7 hq=4 hk=1 sq=200 sk=208 packed_q=900 packed_k=800 d=") + d + bias + "bqk causal");
    }
    for (const char* rest : {" bias=f16:hqk", " bias=f16:bhqk dbias causal"}) cases.push_back({"bwd bf16 " + copied + rest});
    for (const char* rest : {" mask=bhqk causal", " mask=bhqk dropout=0.3", " mask=bhqk window=20,10", " bias=bf16:bhqk causal"})
      cases.push_back({std::string("bwd bf16 b=2 hq=4 hk=2 sq=150 sk=176 d=") + d + rest, Layout::kContiguous, InputKind::kGaussian, false, true});
    // Float32 gradients, several tasks a block.
    cases.push_back({"bwd bf16 " + s + " causal sm_margin=131", Layout::kContiguous, InputKind::kGaussian, true});
    cases.push_back({"bwd bf16 " + packed + " packed_q=900 packed_k=800 sm_margin=131", Layout::kContiguous, InputKind::kGaussian, true});
    // More key blocks than multiprocessors: where dq is summed, it is written beside the main kernel.
    for (const char* rest : {"", " causal", " causal deterministic", " seqused_q seqused_k", " causal sink dsink dlse", " window=40,30 dropout=0.2", " alibi=h dalibi bias=f32:hqk dbias"})
      cases.push_back({std::string("bwd bf16 b=17 hq=4 hk=4 sq=70 sk=200 d=") + d + rest});
    for (const char* rest : {"", " causal deterministic"})
      cases.push_back({std::string("bwd f16 b=36 hq=4 hk=2 sq=70 sk=130 packed_q=900 packed_k=1800 d=") + d + rest});
  }
  for (const char* d : {"64", "128", "192", "256"})
    for (const char* rest : {" causal", " window=20,10", " causal softcap=5", " mask=qk", " causal deterministic", " causal dropout=0.3", " window=20,10 dropout=0.5",
                             " mask=qk dropout=0.2 softcap=5", " mask=bqk causal", " alibi=h window=20,10 dalibi"})
      for (const char* dtype : kDtypes)
        cases.push_back({std::string("bwd ") + dtype + "b=2 hq=4 hk=2 sq=150 sk=170 d=" + d + rest, Layout::kContiguous, InputKind::kGaussian, false, true});
  // Computed again in an order of its own; at d 64 with more turns than the row above it has tiles.
  for (const char* d : {"64", "128", "256"})
    cases.push_back({std::string("bwd bf16 b=2 hq=4 hk=2 sq=1000 sk=1100 causal deterministic d=") + d, Layout::kContiguous, InputKind::kGaussian, false, true});
  for (const char* rest : {"b=0 hq=2 sq=5 sk=5", "b=2 hq=2 sq=0 sk=5", "b=2 hq=2 sq=5 sk=0", "b=2 hq=2 sq=5 sk=0 sink dsink", "b=1 hq=0 sq=5"})
    both(std::string(rest) + " d=64");
  return cases;
}

// A random problem, which one row at least must take. Longer than the CPU's: their tiles are larger.
Check random_case(std::mt19937_64& engine) {
  const auto number = [&](int low, int high) { return low + static_cast<int>(engine() % static_cast<uint64_t>(high - low + 1)); };
  const std::string text = random_problem({number(0, 9) < 8 ? 140 : 400, number(0, 9) < 8 ? 200 : 700}, number);
  const auto layout = number(0, 1) == 0 ? Layout::kContiguous : static_cast<Layout>(number(0, kNumLayouts - 1));
  const auto kind = number(0, 1) == 0 ? InputKind::kGaussian : static_cast<InputKind>(number(0, kNumInputKinds - 1));
  return {text, layout, kind, number(0, 9) == 0};
}

// The lines of tests/cases, as tests/conformance takes them for the rows of the CPU.
std::vector<Check> listed_cases() {
  std::vector<Check> checks;
  for (const Case& one : read_cases())
    for (const char* dtype : {"bf16", "f16", "f32"}) {
      const std::string problem = with_dtype(one.problem, dtype);
      if (problem.empty()) continue;
      std::vector<std::string> passes = {problem};
      if (problem.starts_with("fwd") && !one.comment.starts_with("forward only"))
        if (const std::string backward = backward_of(problem); !backward.empty()) passes.push_back(backward);
      for (const std::string& pass : passes) {
        const size_t turn = checks.size();
        checks.push_back({pass});
        checks.push_back({pass, static_cast<Layout>(turn % kNumLayouts), static_cast<InputKind>(1 + turn % (kNumInputKinds - 1))});
      }
    }
  return checks;
}

class Tally {
 public:
  explicit Tally(bool verbose) : verbose_(verbose) {}

  // The case on every row that takes it; one must.
  void run(const Check& c, uint64_t seed) {
    CheckRequest request;
    request.problem = c.text, request.seed = seed, request.input = c.kind, request.layout = c.layout;
    request.float32_outputs = c.float_out, request.nan_rows = c.nan_rows;
    bool taken = false;
    std::string refusals;
    for (const tw_kernel_info& row : kernels()) {
      if (!under_test(row)) continue;
      request.kernel = row.name;
      const CheckResult result = check(request);
      if (result.refused) {
        refusals += result.message + "\n";
        continue;
      }
      taken = true;
      ++ran_;
      if (!result.ok) {
        ++failed_;
        std::printf("FAIL %s%s: %s\n%s", c.text.c_str(), c.nan_rows ? " (NaN rows)" : "", result.message.c_str(), to_text(result).c_str());
      } else if (verbose_ || ran_ % 97 == 0) {
        std::printf("ok   %s\n%s", c.text.c_str(), to_text(result).c_str());
      }
      std::fflush(stdout);
    }
    if (taken) return;
    ++failed_;
    std::printf("FAIL no row takes %s\n%s", c.text.c_str(), refusals.c_str());
  }

  int report() const {
    std::printf("%d cases, %d failed, %.1f s\n", ran_, failed_, seconds());
    return failed_ != 0;
  }
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  bool verbose_;
  int ran_ = 0, failed_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// shard: "k/n" takes every n-th of the cases that the filters leave, from the k-th on.
int run_cases(const std::string& which, const std::string& first_filter, const std::string& second_filter, const std::string& shard) {
  uint64_t remainder = 0, shards = 1;
  if (!shard.empty()) remainder = std::strtoull(shard.c_str(), nullptr, 10), shards = std::strtoull(shard.c_str() + shard.find('/') + 1, nullptr, 10);
  const std::regex first(first_filter), second(second_filter);
  std::vector<Check> cases;
  if (which == "cases") cases = listed_cases();
  if (which == "forward" || which.empty()) cases = forward_cases();
  if (which == "forward" || which == "decode" || which.empty())
    for (Check& c : decode_cases()) cases.push_back(c);
  if (which == "backward" || which.empty())
    for (Check& c : backward_cases()) cases.push_back(c);
  Tally tally(!second_filter.empty());
  uint64_t seed = 0;
  for (const Check& c : cases)
    if (std::regex_search(c.text, first) && std::regex_search(c.text, second) && seed++ % shards == remainder) tally.run(c, seed);
  return tally.report();
}

int run_random(double seconds, uint64_t seed) {
  std::mt19937_64 engine(seed);
  Tally tally(false);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (uint64_t n = 1; tally.seconds() < seconds; ++n) tally.run(random_case(engine), n);
  return tally.report();
}

}  // namespace
}  // namespace tilewise

int main(int argc, char** argv) {
  using namespace tilewise;
  setenv("TILEWISE_TEST_BACKEND", "cuda", 0);
  if (const std::string missing = harness::gpu_missing(); !missing.empty() && std::string(std::getenv("TILEWISE_TEST_BACKEND")) == "cuda") {
    std::printf("SKIPPED: no GPU: %s\n", missing.c_str());
    return 0;
  }
  const auto argument = [&](int n) { return std::string(argc > n ? argv[n] : ""); };
  if (argument(1) == "random")
    return run_random(std::atof(argument(2).c_str()), argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  return run_cases(argument(1), argument(2), argument(3), argument(4));
}
