// One kernel, one problem, one verdict: the test of the conformance matrix and of `tilewise check`.
//
// Rule: error against float64 at most 2 times (3 with softcap) that of standard attention in the same dtype, plus a small
// absolute term, in the maximum norm and in the Frobenius norm (or what the rounding of the o that a backward pass is given leaves
// in float64, plus that term: see Judge); the same places NaN, inf and zero; guards intact; inputs unmodified; an appended cache
// equal to the reference's bit for bit; two runs equal bit for bit (but for a GPU's gradients, where deterministic ones were not
// asked for).
// The row "reference" itself is held against standard attention in float64 (standard.h), which shares no code with it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/inputs.h"
#include "harness/run.h"

namespace tilewise::harness {

struct CheckRequest {
  std::string problem;  // text form
  std::string kernel;   // "" = the one that the plan chooses
  InputKind input = InputKind::kGaussian;
  uint64_t seed = 1;
  Layout layout = Layout::kContiguous;
  int threads = 0;               // 0 = the library's default
  bool float32_outputs = false;  // see InputOptions
  bool float32_o = false;
  bool nan_rows = false;
  bool run_twice = true;
  std::function<void(Inputs&)> poison = {};  // changes what must not matter in the kernel's inputs; the truth is that of the inputs without
};

struct OutputError {
  std::string name;            // "o", "lse", "dq", ...
  int64_t count = 0;           // elements
  double max_abs = 0;          // largest error against float64
  double rel_fro = 0;          // |x - ref| / |ref|, Frobenius; 0 if ref is 0
  double baseline_max_abs = 0;
  double baseline_rel_fro = 0;
  double limit_max_abs = 0;    // what the rule allows
  double limit_rel_fro = 0;
};

struct CheckResult {
  bool ok = false;
  bool refused = false;      // the kernel does not take the problem: no failure (message: its words)
  tw_status status = TW_OK;  // of the call
  std::string kernel;        // the row that ran
  std::vector<OutputError> outputs;
  std::string message;       // "" if ok; else what is wrong: output, first bad index, both values
  std::string reproduce;     // tilewise check "..." --kernel NAME --input KIND --seed N [--layout NAME] [--threads N] ...
  double seconds = 0;        // of one run of the kernel
};

// Keeps the float64 results of the last few problems, so that the rows of a table share them. Thread-safe.
CheckResult check(const CheckRequest& request);

// A table of the outputs, one a line, then the message and the line to reproduce: for people.
std::string to_text(const CheckResult& result);

}  // namespace tilewise::harness
