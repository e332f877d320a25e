#include "harness/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "core/dtype.h"
#include "harness/standard.h"

namespace tilewise::harness {
namespace {

std::string text_of(double value) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", value);
  return buffer;
}

std::string index_text(const std::vector<int64_t>& shape, int64_t n) {
  std::string text;
  for (size_t dim = shape.size(); dim-- > 0; n /= shape[dim]) text = std::to_string(n % shape[dim]) + (text.empty() ? "" : ", ") + text;
  return "[" + text + "]";
}

double round_to(int32_t dtype, double value) {
  alignas(8) char memory[8];
  store_element(memory, dtype, 0, value);
  return load_element(memory, dtype, 0);
}

double half_ulp(int32_t dtype) {  // relative, just above a power of two
  switch (dtype) {
    case TW_FLOAT16: return 0x1p-11;
    case TW_BFLOAT16: return 0x1p-8;
    case TW_FLOAT64: return 0x1p-53;
    default: return 0x1p-24;
  }
}

double half_smallest(int32_t dtype) {  // of the subnormal numbers
  switch (dtype) {
    case TW_FLOAT16: return 0x1p-25;
    case TW_BFLOAT16: return 0x1p-134;
    case TW_FLOAT64: return 0;
    default: return 0x1p-150;
  }
}

// ---- float64 and the baseline, shared by all rows ----

struct Truth {
  StandardResult reference;  // of the reference row, outputs in float32 (float64 for float64)
  StandardResult baseline;
  std::unique_ptr<StandardResult> oracle;  // made when the reference row itself is under test
  std::unique_ptr<StandardResult> given;   // float64 on the inputs as given, see Judge; made when a gradient is beyond its limit
  double max_score = 0;
};

InputOptions options_of(const CheckRequest& request) {
  InputOptions options;
  options.kind = request.input;
  options.seed = request.seed;
  options.layout = request.layout;
  options.float32_outputs = request.float32_outputs;
  options.float32_o = request.float32_o;
  options.nan_rows = request.nan_rows;
  return options;
}

// Results of another run on the same values, by output name; k and v where they are appended to.
StandardResult collect(Inputs& inputs) {
  StandardResult result;
  for (const Inputs::Named& output : inputs.outputs()) *result.output(output.name) = output.buffer->values();
  if (inputs.appends()) result.k = inputs.k.values(), result.v = inputs.v.values();
  return result;
}

bool finite_where(const std::vector<double>& values, const std::vector<double>& reference) {
  for (size_t n = 0; n < values.size(); ++n)
    if (std::isfinite(reference[n]) && !std::isfinite(values[n])) return false;
  return true;
}

std::shared_ptr<Truth> make_truth(const tw_problem& problem, const CheckRequest& request) {
  auto truth = std::make_shared<Truth>();
  InputOptions options = options_of(request);
  if (options.layout != Layout::kExpanded) options.layout = Layout::kContiguous;
  InputOptions wide = options;
  wide.float32_outputs = true;
  const std::unique_ptr<Inputs> inputs = make_inputs(problem, wide);
  {
    Inputs copy = *inputs;  // the run appends
    const RunResult result = run(copy, "reference");
    if (result.status != TW_OK) throw std::runtime_error("reference: " + result.message);
    truth->reference = collect(copy);
  }
  const std::unique_ptr<Inputs> native = make_inputs(problem, options);
  truth->baseline = standard_attention(*native, Arithmetic::kInType);
  // Scores that overflow float16 say nothing about honest arithmetic, or make the error infinite and the rule empty.
  bool usable = !truth->baseline.overflow;
  for (const Inputs::Named& output : native->outputs())
    usable = usable && finite_where(*truth->baseline.output(output.name), *truth->reference.output(output.name));
  if (!usable) truth->baseline = standard_attention(*native, Arithmetic::kFloat32);
  return truth;
}

std::shared_ptr<Truth> truth_of(const tw_problem& problem, const CheckRequest& request) {
  struct Entry {
    std::string key;
    std::shared_ptr<Truth> truth;
  };
  static std::mutex mutex;
  static std::list<Entry> cache;  // most recent first
  const std::string key = problem_text(problem) + "|" + input_kind_name(request.input) + "|" + std::to_string(request.seed) +
                          (request.layout == Layout::kExpanded ? "|expanded" : "") + (request.float32_outputs ? "|f32" : "") +
                          (request.float32_o ? "|f32o" : "") + (request.nan_rows ? "|nan" : "");
  {
    const std::lock_guard lock(mutex);
    for (auto entry = cache.begin(); entry != cache.end(); ++entry)
      if (entry->key == key) {
        cache.splice(cache.begin(), cache, entry);
        return cache.front().truth;
      }
  }
  auto truth = make_truth(problem, request);
  const std::lock_guard lock(mutex);
  cache.push_front({key, truth});
  if (cache.size() > 8) cache.pop_back();
  return truth;
}

// ---- judgement ----

struct Norms {
  double max = 0, fro = 0;
  void add(double error) {
    max = std::max(max, std::abs(error));
    fro += error * error;
  }
};

// Errors where all three are finite; fro not yet rooted.
Norms errors(const std::vector<double>& values, const std::vector<double>& reference) {
  Norms norms;
  for (size_t n = 0; n < values.size(); ++n)
    if (std::isfinite(values[n]) && std::isfinite(reference[n])) norms.add(values[n] - reference[n]);
  norms.fro = std::sqrt(norms.fro);
  return norms;
}

struct Judge {
  const tw_problem& problem;
  const CheckRequest& request;
  const StandardResult& reference;
  const StandardResult* baseline;  // nullptr: the reference row is under test, held to rounding alone
  double max_score;
  const StandardResult& condition;  // the one that knows magnitudes
  // Gradients in float64 from the o and lse that the call is given, which the contract has in delta = rowsum(dO * o). o is rounded
  // to 16 bits: that alone is an error, of the gradients of every kernel, and no arithmetic can take it back. Standard attention has
  // it as well, so it is within the limit, unless the few roundings of a problem of few pairs happen to cancel it (2 keys: 4.5e-4 by
  // o alone, 1.3e-4 by all of standard attention's roundings together). nullptr: not asked for.
  const StandardResult* given = nullptr;

  double factor() const { return problem.softcap > 0 ? 3 : 2; }
  bool is_statistic(const std::string& name) const { return name == "lse" || name == "max_logit"; }

  // Float32 roundings in a weight exp(s - m), in units of 2^-24: one of s, and beyond ordinary scores (|s| > 32) four,
  // as an exponential in base 2 rounds the folded scale, s log2(e) and m (or lse) log2(e) besides.
  // In the backward pass P = exp(s - lse) is not normalised, so what all scores of a row have in common does not cancel: the
  // three roundings count for ordinary scores too, and with lse (|s| + log n) and the exponent (log n) theirs.
  // 8 covers random roundings in the sums over keys or rows (they grow as the root of n). Of equal terms, as constant inputs
  // have them, all roundings point the same way; what holds then is the bound of recursive summation, n units for n
  // terms (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2), for the dot product in s too.
  double float_terms() const {
    const bool forward = problem.pass == TW_FORWARD, constant = request.input == InputKind::kConstant;
    const int64_t rows = problem.num_heads_k > 0 ? problem.seqlen_q * (problem.num_heads_q / problem.num_heads_k) : 0;
    const double sums = constant ? static_cast<double>(forward ? problem.seqlen_k : std::max(problem.seqlen_k, rows)) : 0;
    if (forward) return 8 + sums + max_score + 3 * std::max(0.0, max_score - 32);
    const double dot = constant ? static_cast<double>(problem.head_dim) : 0;
    return 8 + sums + (4 + dot) * max_score + 2 * std::log1p(static_cast<double>(problem.seqlen_k));
  }

  // Absolute term per element: what one more rounding of the output and of float32 sums may cost.
  double absolute(const std::string& name, int32_t dtype, double max_ref) const {
    if (baseline == nullptr) {
      // lse in float32 and o in its dtype are inputs of the backward pass: whether they are used or computed anew must
      // not matter beyond their rounding.
      double given = 1e-12 * (1 + max_score);
      if (problem.pass == TW_BACKWARD) given += float_terms() * 0x1p-24 + half_ulp(request.float32_o ? int32_t{TW_FLOAT32} : problem.dtype);
      return half_ulp(dtype) * max_ref + given * (is_statistic(name) ? max_ref + max_score : condition.magnitude_of(name)) + half_smallest(dtype);
    }
    if (is_statistic(name)) {
      const bool small = problem.dtype == TW_FLOAT16 || problem.dtype == TW_BFLOAT16;
      return (small ? 2e-5 : 5e-6) + 2e-6 * max_ref + 0x1p-23 * max_score;
    }
    // With 16-bit inputs P is rounded to their dtype, whatever the output holds: one rounding of each term.
    const double p_rounding = dtype == TW_FLOAT32 && problem.dtype != TW_FLOAT32 ? half_ulp(problem.dtype) * condition.magnitude_of(name) : 0;
    return half_smallest(dtype) + p_rounding + (dtype == TW_FLOAT32 ? 0 : half_ulp(dtype) * max_ref) + float_terms() * 0x1p-24 * condition.magnitude_of(name);
  }

  // Section "accuracy" of the tests: Gaussian inputs have limits of their own, whatever the baseline does.
  double gaussian_limit() const {
    // With a handful of keys dP - delta cancels, and the rounding of o is all that the error shows.
    const bool plain = request.input == InputKind::kGaussian && (problem.pass == TW_FORWARD || problem.seqlen_k >= 16) &&
                       std::isnan(problem.softmax_scale) && problem.dropout_p == 0 && problem.softcap == 0;
    if (!plain || baseline == nullptr) return INFINITY;
    const bool forward = problem.pass == TW_FORWARD;
    switch (problem.dtype) {
      case TW_FLOAT32: return forward ? 5e-6 : 1e-5;
      case TW_FLOAT16: return forward ? 6e-4 : 1.2e-3;
      case TW_BFLOAT16: return forward ? 4e-3 : 8e-3;
      default: return INFINITY;
    }
  }

  // "" or what is wrong.
  std::string judge(const std::string& name, const Buffer& buffer, OutputError* error) const {
    const std::vector<double> values = buffer.values();
    const std::vector<double>& expected = *reference.output(name);
    error->name = name;
    error->count = buffer.size();
    const auto wrong = [&](int64_t n, const std::string& why) {
      return name + " " + index_text(buffer.shape(), n) + ": got " + text_of(values[static_cast<size_t>(n)]) + ", reference " +
             text_of(expected[static_cast<size_t>(n)]) + ": " + why;
    };
    double max_ref = 0, fro_ref = 0;
    const int64_t width = buffer.row_size();
    for (int64_t n = 0; n < buffer.size(); ++n) {
      const double want = expected[static_cast<size_t>(n)], got = values[static_cast<size_t>(n)];
      if (buffer.poisoned(n) && !std::isnan(want)) return wrong(n, "not written");
      if (name == "dropout_mask") {
        if (got != want) return wrong(n, "must be equal");
        continue;
      }
      if (std::isnan(want) != std::isnan(got)) return wrong(n, "NaN in one of them");
      if (std::isnan(want)) continue;
      if (!std::isfinite(round_to(buffer.dtype(), want)) || !std::isfinite(got)) {
        if (round_to(buffer.dtype(), want) != got) return wrong(n, "infinite in one of them");
        continue;
      }
      max_ref = std::max(max_ref, std::abs(want));
      fro_ref += want * want;
    }
    if (name == "dropout_mask") return "";
    // Rows of no sequence or without a visible key, and keys that nobody sees: exactly zero.
    const std::vector<bool>* touched = name == "o" || name == "dq" ? &condition.seeing : name == "dk" || name == "dv" ? &condition.seen : nullptr;
    for (int64_t row = 0; touched != nullptr && row < buffer.num_rows(); ++row)
      for (int64_t n = row * width; !(*touched)[static_cast<size_t>(row)] && n < (row + 1) * width; ++n)
        if (values[static_cast<size_t>(n)] != 0) return wrong(n, "the row must be zero");
    fro_ref = std::sqrt(fro_ref);
    const double relative = fro_ref > 0 ? 1 / fro_ref : 0;
    const Norms mine = errors(values, expected);
    const Norms base = baseline != nullptr ? errors(*baseline->output(name), expected) : Norms{};
    const Norms exact = given != nullptr ? errors(*given->output(name), expected) : Norms{};
    const double slack = absolute(name, buffer.dtype(), max_ref), count = std::sqrt(static_cast<double>(std::max<int64_t>(buffer.size(), 1)));
    error->max_abs = mine.max, error->rel_fro = mine.fro * relative;
    error->baseline_max_abs = base.max, error->baseline_rel_fro = base.fro * relative;
    error->limit_max_abs = std::max(factor() * base.max, exact.max) + slack;
    // The Frobenius slack counts each element's own rounding, not the largest one's.
    const double unit = is_statistic(name) || (baseline != nullptr && buffer.dtype() == TW_FLOAT32) ? 0 : half_ulp(buffer.dtype());
    error->limit_rel_fro = std::max(factor() * base.fro, exact.fro) * relative + unit + (slack - unit * max_ref) * count * relative;
    if (!is_statistic(name) && name != "dbias" && name != "dalibi" && name != "dsink")
      error->limit_rel_fro = std::min(error->limit_rel_fro, gaussian_limit() + (slack - unit * max_ref) * count * relative * 0.1);
    if (mine.max > error->limit_max_abs) {
      for (int64_t n = 0; n < buffer.size(); ++n) {
        const double difference = std::abs(values[static_cast<size_t>(n)] - expected[static_cast<size_t>(n)]);
        if (std::isfinite(difference) && difference > error->limit_max_abs)
          return wrong(n, "error " + text_of(difference) + " above " + text_of(error->limit_max_abs) + " (baseline " + text_of(base.max) + ")");
      }
    }
    if (relative > 0 && error->rel_fro > error->limit_rel_fro)
      return name + ": Frobenius error " + text_of(error->rel_fro) + " above " + text_of(error->limit_rel_fro) + " (baseline " +
             text_of(error->baseline_rel_fro) + ")";
    return "";
  }
};

// k or v as the append must leave it: what it was, with the reference's rows at the new positions.
Buffer appended(const Inputs& inputs, const Buffer& cache, const std::vector<double>& after) {
  Buffer expected = cache;
  const tw_problem& p = inputs.problem();
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t n = 0; n < p.seqlen_new; ++n)
      for (int64_t h = 0; h < p.num_heads_k; ++h) {
        const int64_t begin = inputs.k_row(b, inputs.lengths()[static_cast<size_t>(b)].used_k + n, h) * cache.row_size();
        for (int64_t c = begin; c < begin + cache.row_size(); ++c) expected.set(c, after[static_cast<size_t>(c)]);
      }
  return expected;
}

std::string reproduce_line(const CheckRequest& request, const std::string& kernel) {
  std::string line = "tilewise check \"" + request.problem + "\"";
  if (!kernel.empty()) line += " --kernel " + kernel;
  line += std::string(" --input ") + input_kind_name(request.input) + " --seed " + std::to_string(request.seed);
  if (request.layout != Layout::kContiguous) line += std::string(" --layout ") + layout_name(request.layout);
  if (request.threads != 0) line += " --threads " + std::to_string(request.threads);
  if (request.float32_outputs) line += " --float32-outputs";
  if (request.float32_o) line += " --float32-o";
  return line;
}

void check_into(const CheckRequest& request, CheckResult* result) {
  tw_problem problem;
  if (!parse_problem(request.problem, &problem, &result->message)) {
    result->status = TW_INVALID_ARGUMENT;
    return;
  }
  if (!request.kernel.empty() && !takes(request.kernel, problem, &result->message)) {
    result->status = TW_UNSUPPORTED;
    result->refused = true;
    return;
  }
  const std::shared_ptr<Truth> truth = truth_of(problem, request);
  const std::unique_ptr<Inputs> inputs = make_inputs(problem, options_of(request));
  if (request.poison) request.poison(*inputs);
  const Inputs before = *inputs;
  const RunResult first = run(*inputs, request.kernel, request.threads);
  result->status = first.status;
  result->kernel = first.kernel;
  result->seconds = first.seconds;
  result->reproduce = reproduce_line(request, first.kernel);
  if (first.status != TW_OK) {
    result->message = first.message;
    result->refused = first.status == TW_UNSUPPORTED;
    return;
  }
  const bool is_reference = first.kernel == "reference";
  if (is_reference && truth->oracle == nullptr) {
    truth->oracle = std::make_unique<StandardResult>(standard_attention(*make_inputs(problem, options_of(request)), Arithmetic::kOracle));
  }
  const StandardResult& expected = is_reference ? *truth->oracle : truth->reference;
  const StandardResult& condition = is_reference ? *truth->oracle : truth->baseline;
  Judge judge{problem, request, expected, is_reference ? nullptr : &truth->baseline, condition.max_score, condition};

  const auto fail = [&](const std::string& message) {
    if (result->message.empty()) result->message = message;
  };
  for (const Inputs::Named& output : inputs->outputs()) {
    OutputError error;
    std::string wrong = judge.judge(output.name, *output.buffer, &error);
    if (!wrong.empty() && problem.pass == TW_BACKWARD && !is_reference && half_ulp(problem.dtype) > half_ulp(TW_FLOAT32)) {
      if (truth->given == nullptr) {
        truth->given = std::make_unique<StandardResult>(standard_attention(*make_inputs(problem, options_of(request)), Arithmetic::kOracle));
      }
      judge.given = truth->given.get();
      wrong = judge.judge(output.name, *output.buffer, &error);
    }
    fail(wrong);
    result->outputs.push_back(error);
    if (!output.buffer->guards_intact()) fail(std::string(output.name) + ": written outside its elements");
  }
  if (!first.workspace_ok) fail("workspace: written behind its end");
  Inputs untouched = before;
  if (inputs->appends()) {
    untouched.k = appended(before, untouched.k, expected.k);
    untouched.v = appended(before, untouched.v, expected.v);
  }
  const auto wanted = untouched.inputs(), got = inputs->inputs();
  for (size_t n = 0; n < got.size(); ++n) {
    if (got[n].buffer->bytes() == wanted[n].buffer->bytes()) continue;
    int64_t bad = -1;
    const bool element = !wanted[n].buffer->same_elements(*got[n].buffer, &bad);
    std::string message = got[n].name;
    if (element) {
      message.append(" ").append(index_text(got[n].buffer->shape(), bad)).append(": must be ").append(text_of(wanted[n].buffer->get(bad)));
      message.append(" after the call, is ").append(text_of(got[n].buffer->get(bad)));
    } else {
      message.append(": written outside its elements");
    }
    fail(message);
  }
  // Sums over blocks that run at once come in any order there, unless it is asked for.
  const bool any_order = first.on_gpu && problem.pass == TW_BACKWARD && !problem.deterministic;
  if (request.run_twice && !any_order) {
    Inputs again = before;
    run(again, request.kernel, request.threads);
    const auto outputs = inputs->outputs(), repeats = again.outputs();
    for (size_t n = 0; n < outputs.size(); ++n) {
      int64_t bad = -1;
      if (!outputs[n].buffer->same_elements(*repeats[n].buffer, &bad))
        fail(std::string(outputs[n].name) + " " + index_text(outputs[n].buffer->shape(), bad) + ": two runs differ, " +
             text_of(outputs[n].buffer->get(bad)) + " and " + text_of(repeats[n].buffer->get(bad)));
    }
  }
  result->ok = result->message.empty();
}

}  // namespace

CheckResult check(const CheckRequest& request) {
  CheckResult result;
  result.kernel = request.kernel;
  result.reproduce = reproduce_line(request, request.kernel);
  try {
    check_into(request, &result);
  } catch (const std::exception& error) {
    result.status = TW_INVALID_ARGUMENT;
    result.message = error.what();
  }
  return result;
}

std::string to_text(const CheckResult& result) {
  std::string text = "kernel " + result.kernel + "\n";
  char line[200];
  if (!result.outputs.empty()) {
    std::snprintf(line, sizeof line, "%-12s %12s %12s %12s %12s %12s %12s\n", "output", "max error", "standard's", "limit", "frobenius",
                  "standard's", "limit");
    text += line;
  }
  for (const OutputError& e : result.outputs) {
    std::snprintf(line, sizeof line, "%-12s %12.3g %12.3g %12.3g %12.3g %12.3g %12.3g\n", e.name.c_str(), e.max_abs, e.baseline_max_abs,
                  e.limit_max_abs, e.rel_fro, e.baseline_rel_fro, e.limit_rel_fro);
    text += line;
  }
  text += result.ok ? "ok\n" : (result.refused ? "refused: " : "FAILED: ") + result.message + "\n";
  if (!result.ok && !result.refused) text += "reproduce: " + result.reproduce + "\n";
  return text;
}

}  // namespace tilewise::harness
