// What forward_sm90, backward_sm90 and ("decode: ") decode_sm80 take and why they refuse the rest, in its own words, and how rows may
// be cut; needs no GPU.
#include <cstdio>
#include <string>
#include <vector>

#include "core/plan.h"
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
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f32:hqk", ""},
    {"fwd f16 cuda b=2 hq=8 sq=2048 d=64 bias=f16:bhqk dropout=0.1 softcap=20 alibi=h sink maxlogit causal", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=256 mask=bk", ""},
    {"fwd bf16 cuda b=4 hq=8 sq=500 d=128 packed_q=1200 packed_k=1200 mask=bhqk", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f16:hqk", "bias in f16 with q in bf16"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=bf16:bq", "differ from key to key"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=256 mask=qk dropout=0.1", "dropout with a bias"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4096 d=128 pages=600x16 mask=qk seqused_k", ""},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 sk=4096 d=128 pages=600x16 leftpad mask=qk", "left padding"},
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
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f32:hqk dbias softcap=20", "softcap with the gradient of bias or alibi_slopes"},
    {"bwd f16 cuda b=2 hq=8 sq=2048 d=192 dv=128 alibi=h dalibi", "gradient of bias or alibi_slopes with head dims above 128"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 sk=0 d=128", "no keys or no rows"},
};

// What the table gives to which row, with a GPU of Hopper's kind.
struct ChoiceCase {
  const char* problem;
  const char* row;
  const char* config;  // how it begins
};

const ChoiceCase kChoiceCases[] = {
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=64 mask=bk", "forward_sm90", "tile 192x64x64"},
    {"fwd f16 cuda b=2 hq=8 sq=2048 d=96 bias=f16:hqk causal", "forward_sm90", "tile 128x64x128"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=192 dv=128 bias=f32:bhqk", "forward_sm90", "tile 128x64x256"},
    {"fwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=f16:hqk", "forward_sm80", ""},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 causal", "backward_sm90", "tile 64x128x128"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 dropout=0.1", "backward_sm90", "dropout, tile 64x128x128"},
    {"bwd f16 cuda b=2 hq=8 hk=2 sq=2048 d=64 dropout=0.1 rng_state causal deterministic", "backward_sm90", "dropout, tile 128x128x64"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=256 causal deterministic", "backward_sm90", "two passes, dq: tile 128x64x256"},
    {"bwd f16 cuda b=2 hq=8 sq=2048 d=192 dv=128 dropout=0.1 window=100,0", "backward_sm90", "dropout, tile 64x64x256"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=96 softcap=20 causal", "backward_sm90", "general, tile 64x128x128"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=256 softcap=20 alibi=bh bias=f32:hqk dropout=0.1", "backward_sm90", "general, tile 64x64x256"},
    {"bwd f16 cuda b=2 hq=8 sq=2048 d=64 alibi=h dalibi", "backward_sm90", "general, tile 128x128x64"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=128 bias=bf16:bqk dbias deterministic", "backward_sm90", "bias, tile 64x128x128"},
    {"bwd bf16 cuda b=4 hq=8 sq=500 d=128 packed_q=1200 packed_k=1200 mask=bhqk causal", "backward_sm90", "bias, tile 64x128x128"},
    {"bwd bf16 cuda b=2 hq=8 sq=2048 d=256 bias=bf16:bqk dbias", "backward_sm80", "general"},
    {"bwd f32 cuda b=2 hq=8 sq=2048 d=64 dropout=0.1", "backward_sm80", "dropout"},
};

// How a row cuts where a measurement or a caller wants it otherwise.
struct CutCase {
  const char* problem;
  const char* row;
  const char* config;
  const char* expected;  // "192x128, 1 splits", or words of the refusal
};

const CutCase kCutCases[] = {
    {"fwd bf16 cuda b=2 hq=8 sq=8192 d=64", "forward_sm90", "block_m=192", "192x128, 1 splits"},
    {"fwd bf16 cuda b=2 hq=8 sq=8192 d=64", "forward_sm90", "block_m=256 block_n=64", "256x64, 1 splits"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 d=64 causal", "forward_sm90", "block_n=128", "192x128, 1 splits"},
    {"fwd f16 cuda b=2 hq=8 sq=8192 d=128 causal", "forward_sm90", "block_n=64", "128x64, 1 splits"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 d=128 causal no_lse", "forward_sm90", "block_m=128 block_n=128", "128x128, 1 splits"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 d=128", "forward_sm90", "block_m=192", "\"block_m=192\": forward_sm90 has no such blocks"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 d=64 softcap=20", "forward_sm90", "block_n=128", "forward_sm90 has no such blocks"},
    {"fwd bf16 cuda b=2 hq=8 sq=1024 d=256", "forward_sm90", "splits=2", "\"splits=2\": forward_sm90 takes block_m block_n"},
    {"fwd bf16 cuda b=1 hq=8 hk=1 sq=1 sk=8192 d=128", "forward_sm80", "splits=7", "64x64, 7 splits"},
    {"fwd bf16 cuda b=1 hq=8 hk=1 sq=1 sk=8192 d=128", "forward_sm80", "splits=1", "64x64, 1 splits"},
    {"fwd bf16 cuda b=1 hq=8 sq=512 sk=8192 d=64", "forward_sm80", "splits=2", "128x64, 2 splits"},
    {"fwd bf16 cuda b=1 hq=8 sq=1 sk=8192 d=128 splits=3", "forward_sm80", "splits=2", "splits 2: the problem says num_splits"},
    {"fwd bf16 cuda b=1 hq=8 sq=1 sk=8192 d=128", "forward_sm80", "block_n=64", "forward_sm80 takes splits"},
    {"fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=8192 d=128", "decode_sm80", "splits=5", "5 splits"},
    {"fwd bf16 cuda b=1 hq=32 hk=8 sq=1 sk=8192 d=128 batch_invariant", "decode_sm80", "splits=5", "num_splits or batch_invariant"},
    {"bwd bf16 cuda b=1 hq=8 sq=512 d=128", "backward_sm90", "block_n=64", "backward_sm90 cuts by itself"},
    {"bwd bf16 cuda b=1 hq=8 sq=512 d=128", "backward_sm80", "block_m=64", "backward_sm80 cuts by itself"},
};

// The table without its `available`: there need not be a GPU.
std::vector<KernelRow> available_rows() {
  std::vector<KernelRow> rows(cuda_kernels().begin(), cuda_kernels().end());
  for (KernelRow& row : rows) row.available = [] { return true; };
  return rows;
}

// row, choice: "" for what the plan chooses.
Status plan_with(const char* problem, const char* row, const char* choice, Plan* plan) {
  static const std::vector<KernelRow> rows = available_rows();
  tw_problem p;
  Target target;
  target.kernel = row;
  if (Status status = parse(problem, &p); !status.ok()) return status;
  if (*choice)
    if (Status status = parse_choice(choice, &target.choice); !status.ok()) return status;
  return make_plan(p, target, rows, plan);
}

int report(bool ok, const std::string& what, const std::string& text) {
  std::printf("%s %s: %s\n", ok ? "ok  " : "FAIL", what.c_str(), text.c_str());
  return ok ? 0 : 1;
}

int run_choices() {
  int failed = 0;
  for (const ChoiceCase& c : kChoiceCases) {
    Plan plan;
    const Status status = plan_with(c.problem, "", "", &plan);
    const bool ok = status.ok() && std::string(plan.row->name) == c.row && plan.config.starts_with(c.config);
    failed += report(ok, c.problem, status.ok() ? concat(plan.row->name, ": ", plan.config) : status.message());
  }
  return failed;
}

int run_cuts() {
  int failed = 0;
  for (const CutCase& c : kCutCases) {
    Plan plan;
    const Status status = plan_with(c.problem, c.row, c.config, &plan);
    const std::string text = status.ok() ? concat(plan.block_m, "x", plan.block_n, ", ", plan.num_splits, " splits") : status.message();
    failed += report(text.find(c.expected) != std::string::npos, concat(c.problem, ", ", c.row, " ", c.config), text);
  }
  return failed;
}

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
    failed += report(ok, c.problem, text.empty() ? plan.config : text);
  }
  return failed;
}

}  // namespace
}  // namespace tilewise

int main() { return tilewise::run() + tilewise::run_choices() + tilewise::run_cuts(); }
