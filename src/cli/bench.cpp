// tilewise bench: time per call, GFLOP/s, and the share of a peak measured in the same run.
#include <CLI/CLI.hpp>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/output_files.h"
#include "cli/peak.h"
#include "cli/standard.h"
#include "harness/gpu.h"
#include "harness/inputs.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr double kPeakSeconds = 0.02;    // of one burst of a peak measurement
constexpr double kSampleSeconds = 1e-3;  // shorter calls are timed several at a time
constexpr size_t kLeastSamples = 3;

struct BenchOptions {
  std::vector<std::string> problems;
  std::string kernel, threads, time = "1", json;
  bool standard = false;
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Times of one thing, in seconds per call.
struct Samples {
  std::vector<double> seconds;
  double total = 0;
  int64_t calls = 1;  // per sample

  // call(times) runs it that often and tells the seconds; 0: to be measured here.
  template <class F>
  void take(F&& call) {
    const auto timed = [&](int64_t times) {
      const auto begin = Clock::now();
      const double told = call(times);
      return told > 0 ? told : seconds_since(begin);
    };
    if (seconds.empty() && total == 0) {  // warm-up, and how many calls a sample needs
      total = timed(1);
      const double second = timed(1);
      calls = std::clamp<int64_t>(static_cast<int64_t>(kSampleSeconds / std::max(second, 1e-9)), 1, 100000);
      total += second;
    }
    const double elapsed = timed(calls);
    total += elapsed;
    seconds.push_back(elapsed / static_cast<double>(calls));
  }
  double quantile(double q) const {  // of the sorted samples, linear between them
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    const double at = q * static_cast<double>(sorted.size() - 1);
    const size_t low = static_cast<size_t>(at), high = std::min(low + 1, sorted.size() - 1);
    return sorted[low] + (at - static_cast<double>(low)) * (sorted[high] - sorted[low]);
  }
  double median() const { return quantile(0.5); }
  Json json() const {
    return {{"unit", "s per call"},
            {"count", seconds.size()},
            {"calls_per_sample", calls},
            {"min", quantile(0)},
            {"quarter", quantile(0.25)},
            {"median", median()},
            {"three_quarters", quantile(0.75)},
            {"max", quantile(1)}};
  }
};

// FLOPs of the sequences as they are: ragged batches hold less than their longest sequence says.
double useful_flops(const tw_plan_info& info, const harness::Inputs& inputs) {
  const tw_problem& p = inputs.problem();
  const bool ragged = p.q_layout != TW_DENSE || p.k_layout != TW_DENSE ||
                      (p.features & (TW_HAS_SEQUSED_Q | TW_HAS_SEQUSED_K | TW_HAS_LEFTPAD_K));
  if (!ragged) return info.flops;
  double pairs = 0;
  for (const harness::Lengths& length : inputs.lengths()) {
    const int64_t sq = length.seqlen_q, sk = length.seqlen_k;
    const int64_t right = p.causal ? 0 : p.window_right;
    if (p.causal && p.window_left < 0 && sq == sk) {  // the field's convention: half
      pairs += static_cast<double>(sq) * static_cast<double>(sk) / 2;
      continue;
    }
    for (int64_t i = 0; i < sq; ++i) {
      const int64_t at = i + sk - sq;
      const int64_t begin = p.window_left < 0 ? 0 : std::max<int64_t>(0, at - std::min(p.window_left, at));
      const int64_t end = right < 0 || right >= sk - 1 - at ? sk : at + right + 1;
      pairs += static_cast<double>(std::max<int64_t>(0, end - begin));
    }
  }
  const double forward = 2 * pairs * static_cast<double>(p.num_heads_q * (p.head_dim + p.head_dim_v));
  return p.pass == TW_BACKWARD ? 2.5 * forward : forward;
}

// One problem with its plan and data, and what was measured.
struct Entry {
  std::string text;
  tw_plan_info info;
  std::unique_ptr<harness::Inputs> inputs;
  std::unique_ptr<Plan> plan;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<harness::GpuTensors> there;  // of a problem on the GPU
  std::unique_ptr<harness::GpuWorkspace> gpu_workspace;
  tw_tensors tensors;  // there, if so
  std::string isa;     // of its peak; "" on a GPU, whose peak is not measured here
  double flops = 0;
  Samples samples, standard;
  std::vector<float> standard_o;

  // Seconds on the GPU; 0 on the CPU.
  double run(int64_t times) {
    double seconds = 0;
    if (there != nullptr) {
      detail::require(harness::run_on_gpu(plan->c(), tensors, *gpu_workspace, static_cast<int>(times), &seconds));
      return seconds * static_cast<double>(times);
    }
    for (int64_t n = 0; n < times; ++n) detail::require(tw_run(plan->c(), &tensors, workspace->data(), workspace->size(), nullptr));
    return 0;
  }
};

// Two ways to the same numbers, or the comparison is void. The bound is far above bfloat16's rounding of values near 1.
void require_same_results(const Entry& entry) {
  constexpr double kBound = 0.05;
  for (size_t n = 0; n < entry.standard_o.size(); ++n) {
    const double kernel = entry.inputs->o.get(static_cast<int64_t>(n)),
                 standard = static_cast<double>(entry.standard_o[n]);
    if (!(std::fabs(kernel - standard) <= kBound))
      throw Failure(fmt::format("\"{}\": o[{}] is {} by {}, and {} by standard attention: must agree within {}",
                                entry.text, n, kernel, entry.info.kernel, standard, kBound));
  }
}

Entry make_entry(const std::string& text, const BenchRequest& options, int threads) {
  Entry entry;
  const Problem problem = parse_problem(text);
  const bool on_gpu = problem.c().device == TW_CUDA;
  if (const std::string missing = on_gpu ? harness::gpu_missing() : ""; !missing.empty())
    throw UsageError("problem: \"" + text + "\": " + missing);
  if (on_gpu && options.standard) throw UsageError("--standard: runs on the CPU; the problems must be without cuda");
  entry.text = problem.text();
  entry.plan = std::make_unique<Plan>(problem, target_named("auto", options.kernel, threads));
  entry.info = entry.plan->info();
  std::string error;
  const tw_status status = harness::Inputs::make(problem.c(), {}, &entry.inputs, &error);
  if (status != TW_OK) throw Error(status, error);
  entry.tensors = entry.inputs->tensors();
  if (on_gpu) {
    entry.there = std::make_unique<harness::GpuTensors>(entry.tensors);
    entry.tensors = entry.there->on_gpu(entry.tensors);
    entry.gpu_workspace = std::make_unique<harness::GpuWorkspace>(static_cast<size_t>(entry.info.workspace_bytes));
  } else {
    entry.workspace = std::make_unique<Workspace>(entry.plan->make_workspace());
  }
  if (problem.c().pass == TW_BACKWARD) {  // o and lse have to be those of q, k, v
    const tw_problem forward = entry.inputs->forward_problem();
    const tw_tensors t = harness::without_gradients(entry.tensors);
    Target target;
    target.num_threads = threads;
    const tw_target where = target.c();
    detail::require(tw_forward(&forward, &t, &where, nullptr));
  }
  entry.flops = useful_flops(entry.info, *entry.inputs);
  for (const tw_kernel_info& info : kernels())
    if (!on_gpu && std::strcmp(info.name, entry.info.kernel) == 0) entry.isa = peak_isa(info.isa);
  if (options.standard && standard_takes(problem.c())) {
    const tw_problem& p = problem.c();
    entry.standard_o.resize(static_cast<size_t>(p.batch * p.seqlen_q * p.num_heads_q * p.head_dim_v));
  }
  return entry;
}

// One line on a terminal's stderr, rewritten as the work goes on.
class Progress {
 public:
  explicit Progress(double expected) : on_(isatty(2) == 1 && expected > 2), expected_(expected) {}
  ~Progress() {
    if (on_) std::fputs("\r\x1b[K", stderr);
  }
  void show(const std::string& what) {
    if (!on_ || seconds_since(shown_) < 0.2) return;
    shown_ = Clock::now();
    std::fprintf(stderr, "\r\x1b[K%.0f of about %.0f s: %.60s", seconds_since(begin_), expected_, what.c_str());
  }

 private:
  bool on_;
  double expected_;
  Clock::time_point begin_ = Clock::now(), shown_ = begin_;
};

struct Peak {
  double before = 0, after = 0;
  double mean() const { return (before + after) / 2; }
};

// The best of three short bursts: a thread that is put aside for a moment is no property of the roof.
double best_peak(const std::string& isa, int threads) {
  double best = 0;
  for (int burst = 0; burst < 3; ++burst) best = std::max(best, measure_peak(isa, threads, kPeakSeconds));
  return best;
}

double gflops(const Entry& entry, double seconds) { return seconds > 0 ? entry.flops / seconds * 1e-9 : 0; }
using Peaks = std::map<std::string, Peak>;
// Of the peak of its instruction set; negative where none was measured.
double percent(const Entry& entry, const Peaks& peaks) {
  const auto peak = peaks.find(entry.isa);
  return peak == peaks.end() ? -1 : 100 * gflops(entry, entry.samples.median()) / peak->second.mean();
}

std::string table(const std::vector<Entry>& entries, const Peaks& peaks, bool standard) {
  std::string text =
      fmt::format("{:>10} {:>10} {:>9} {:>6}{}  {:<20} {}\n", "median", "min", "GFLOP/s", "peak",
                  standard ? fmt::format(" {:>10} {:>7}", "standard", "faster") : "", "kernel", "problem");
  for (const Entry& entry : entries) {
    const double median = entry.samples.median();
    std::string beside;
    if (standard)
      beside = entry.standard_o.empty() ? fmt::format(" {:>10} {:>7}", "-", "-")
                                        : fmt::format(" {:>10} {:>6.2f}x", seconds_text(entry.standard.median()),
                                                      entry.standard.median() / median);
    const double share = percent(entry, peaks);
    text += fmt::format("{:>10} {:>10} {:>9.1f} {:>6}{}  {:<20} {}\n", seconds_text(median),
                        seconds_text(entry.samples.quantile(0)), gflops(entry, median),
                        share < 0 ? "-" : fmt::format("{:.1f}%", share), beside, entry.info.kernel, entry.text);
  }
  for (const auto& [isa, peak] : peaks) {
    text += fmt::format("peak {}: {:.0f} GFLOP/s before, {:.0f} after", isa, peak.before, peak.after);
    if (std::fabs(peak.before - peak.after) > 0.1 * peak.mean())
      text += " (they differ by more than 10 %: the machine is busy)";
    text += "\n";
  }
  if (standard)
    text +=
        "standard: float32, blocked matrix products, each head's scores in memory; forward, dense, at most causal\n";
  return text;
}

Json record(const std::vector<Entry>& entries, const Peaks& peaks, int threads) {
  Json json = {{"tool", "tilewise bench"},
               {"version", version()},
               {"date", date_text()},
               {"machine", machine()},
               {"threads", threads}};
  json["peaks"] = Json::array();
  for (const auto& [isa, peak] : peaks)
    json["peaks"].push_back({{"isa", isa}, {"unit", "GFLOP/s"}, {"before", peak.before}, {"after", peak.after}});
  json["results"] = Json::array();
  for (const Entry& entry : entries) {
    Json result = {{"problem", entry.text},
                   {"kernel", entry.info.kernel},
                   {"config", entry.info.config},
                   {"workspace_bytes", entry.info.workspace_bytes},
                   {"standard_bytes", entry.info.standard_bytes},
                   {"flops", entry.flops},
                   {"samples", entry.samples.json()},
                   {"gflops", gflops(entry, entry.samples.median())},
                   {"peak_isa", entry.isa.empty() ? Json() : Json(entry.isa)},
                   {"percent_of_peak", entry.isa.empty() ? Json() : Json(percent(entry, peaks))}};
    if (!entry.standard_o.empty()) result["standard_samples"] = entry.standard.json();
    json["results"].push_back(std::move(result));
  }
  return json;
}

struct Measured {
  std::vector<Entry> entries;
  Peaks peaks;
};

Measured measure(const BenchRequest& options) {
  const int threads = options.threads;
  const double time = options.seconds;
  Measured measured;
  std::vector<Entry>& entries = measured.entries;
  for (const std::string& text : options.problems) entries.push_back(make_entry(text, options, threads));

  Peaks& peaks = measured.peaks;
  for (const Entry& entry : entries)
    if (!entry.isa.empty()) peaks[entry.isa] = {};
  for (auto& [isa, peak] : peaks) peak.before = best_peak(isa, threads);
  {
    // Problems take turns, so that a slow minute of the machine is shared by all.
    Progress progress(time * static_cast<double>(entries.size()) * (options.standard ? 2 : 1));
    const auto wanting = [&](const Samples& samples) {
      return samples.seconds.size() < kLeastSamples || samples.total < time;
    };
    for (bool more = true; more;) {
      more = false;
      for (Entry& entry : entries) {
        progress.show(entry.text);
        if (wanting(entry.samples)) entry.samples.take([&](int64_t times) { return entry.run(times); }), more = true;
        if (!entry.standard_o.empty() && wanting(entry.standard)) {
          entry.standard.take([&](int64_t times) {
            for (int64_t n = 0; n < times; ++n)
              standard_attention(entry.inputs->problem(), entry.tensors, entry.standard_o.data(), threads);
            return 0.0;
          });
          more = true;
        }
      }
    }
  }
  for (const Entry& entry : entries) require_same_results(entry);
  for (auto& [isa, peak] : peaks) peak.after = best_peak(isa, threads);
  return measured;
}

void run(const BenchOptions& options) {
  BenchRequest request{options.problems, options.kernel, thread_count(options.threads), 0, options.standard};
  request.seconds = to_number<double>("--time", options.time, 0, 86400, "seconds, 0 to 86400");
  if (!options.json.empty()) require_writable("--json", options.json);
  const int threads = request.threads;
  const auto [entries, peaks] = measure(request);
  if (!options.json.empty()) write_text(options.json, record(entries, peaks, threads).dump(2) + "\n");
  print(fmt::format("tilewise {}, {} thread{}\n", version(), threads, threads == 1 ? "" : "s") +
        table(entries, peaks, options.standard));
}

}  // namespace

nlohmann::ordered_json bench_record(const BenchRequest& request) {
  const auto [entries, peaks] = measure(request);
  return record(entries, peaks, request.threads);
}

void add_bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      add_command(app, "bench", "Time problems, beside a peak measured in the same run",
                  "  tilewise bench \"fwd f32 hq=16 sq=2048 d=64\" \"bwd f32 hq=16 sq=2048 d=64\"\n"
                  "  tilewise bench \"fwd bf16 b=8 hq=32 hk=8 sq=1 sk=4096 d=128\" --threads 1 --time 5\n"
                  "  tilewise bench \"fwd f32 hq=8 sq=1024 d=64 causal\" --standard --json result.json");
  command->add_option("problem", options->problems, "Problem texts; they take turns")->type_name("PROBLEM")->required();
  add_text(command, "--kernel", options->kernel, "NAME", "One row of `tilewise list` (default: the planned one)");
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)");
  add_text(command, "--time", options->time, "SECONDS", "Per problem; at least 3 samples are taken")
      ->capture_default_str();
  command->add_flag("--standard", options->standard, "Time plain standard attention too");
  add_text(command, "--json", options->json, "FILE", "Write machine, version, samples and peaks to a file");
  command->callback([options] { run(*options); });
}

}  // namespace tilewise::cli
