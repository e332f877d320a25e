// What forward_sm90, backward_sm90 and ("decode: ") decode_sm80 take and why they refuse the rest, in its own words; needs no GPU.
#include <cstdio>
#include <string>

#include "core/problem.h"
#include "cuda/backend.h"

namespace tilewise {
namespace {

struct Case {
  const char* problem;
  const char* reason;  // "": the row takes it
};

const Case kCases[] = {
    {"fwd bf16 cuda b=2 hq=32 hk=8 sq=2048 d=128 causal", ""},
    {"fwd f16 cuda b=2 hq=8 sq=2048 d=64 window=100,30 softcap=20 alibi=h sink maxlogit", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=200 sk=900 d=256 scale=-0.1 leftpad seqused_k seqused_q", ""},
    {"fwd bf16 cuda b=4 hq=8 sq=500 d=72 dv=104 packed_q=1200 packed_k=1200 causal", ""},
    {"fwd bf16 cuda b=4 hq=8 sq=50 d=128 packed_q=120 packed_k=120 causal batch_invariant", ""},
    {"fwd f32 cuda b=2 hq=8 sq=2048 d=64", "dtype"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=100", "multiples of 8"},
    {"fwd bf16 cuda b=2 hq=8 sq=64 d=128", "seqlen_q 64"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 dropout=0.1 dropout_mask", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 dropout=0.1 causal", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4096 d=128 pages=600x16 causal", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4080 d=128 pages=600x20", "page_size 20"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4096 d=128 pages=600x16 leftpad dropout=0.1", "left padding"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f32:hqk", "bias"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4096 new=70 d=128", "append"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 splits=3", "num_splits"},
    {"decode: fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=4096 d=128", ""},
    {"decode: fwd f16 cuda b=4 hq=32 hk=8 sq=8 sk=4096 d=192 dv=128 pages=2000x16 seqused_k leftpad causal softcap=9 alibi=h sink maxlogit", ""},
    {"decode: fwd bf16 cuda b=4 hq=32 hk=8 sq=1 sk=4096 new=1 rotary=64 seqused_k d=128 splits=7 batch_invariant", ""},
    {"decode: fwd bf16 cuda b=1 hq=32 hk=8 sq=9 sk=4096 d=128", "36 query rows per key head"},
    {"decode: fwd f32 cuda b=1 hq=32 hk=8 sq=1 sk=4096 d=128", "dtype"},
    {"decode: fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=4096 d=100", "multiples of 8"},
    {"decode: fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=4096 d=128 mask=k", "bias"},
    {"decode: fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=4096 d=128 dropout=0.1", "dropout"},
    {"decode: fwd bf16 cuda b=4 hq=8 sq=2 sk=4096 d=128 packed_q=8 batch_invariant", "packed queries"},
    {"decode: fwd bf16 cuda b=4 hq=8 sq=2 sk=0 d=128", "no keys or no rows"},
    {"bwd bf16 cuda b=2 hq=32 hk=8 sq=2048 d=128 causal", ""},
    {"bwd f16 cuda b=2 hq=8 sq=50 sk=70 d=192 dv=128 window=10,3 dlse sink dsink", ""},
    {"bwd bf16 cuda b=4 hq=8 sq=500 d=64 packed_q=1200 packed_k=1200 seqused_q causal deterministic", ""},
    {"bwd f32 cuda b=2 hq=8 sq=2048 d=64", "dtype"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 softcap=20", "softcap"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 dropout=0.1", "dropout"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f32:hqk", "bias"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 alibi=h", "alibi_slopes"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 sk=0 d=128", "no keys or no rows"},
};

int run() {
  int failed = 0;
  for (const Case& c : kCases) {
    std::string problem = c.problem, name = problem.starts_with("fwd") ? "forward_sm90" : "backward_sm90";
    if (problem.starts_with("decode: ")) name = "decode_sm80", problem = problem.substr(8);
    const KernelRow* row = nullptr;
    for (const KernelRow& r : cuda_kernels())
      if (r.name == name) row = &r;
    if (row == nullptr) return std::printf("%s is not in the table\n", name.c_str()), 1;
    tw_problem p;
    Plan plan;
    std::string text;
    if (Status s = parse(problem, &p); !s.ok()) text = s.message();
    else if (text = row->refusal(p); text.empty()) {
      plan.problem = p;
      plan.row = row;
      if (Status s2 = row->plan(p, plan.target, &plan); !s2.ok()) text = s2.message();
    }
    const bool ok = *c.reason ? text.find(c.reason) != std::string::npos : text.empty();
    failed += !ok;
    std::printf("%s %s: %s\n", ok ? "ok  " : "FAIL", c.problem, text.empty() ? plan.config.c_str() : text.c_str());
  }
  return failed;
}

}  // namespace
}  // namespace tilewise

int main() { return tilewise::run(); }
