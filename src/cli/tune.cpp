// tilewise tune: measures how rows may cut a problem, on the CPU or on a GPU, and keeps what is faster than the default.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cases.h"
#include "cli/cli.h"
#include "cli/output_files.h"
#include "harness/gpu.h"
#include "harness/inputs.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr double kWorthIt = 0.01;  // a choice has to be faster by this much, or the default stays
constexpr double kWins = 0.6;      // and in this share of its meetings with the default
constexpr size_t kFinalists = 6;
constexpr size_t kLeastPairs = 15, kMostPairs = 400;
constexpr double kLeastOnGpu = 1e-3;  // seconds of a sample: launches in a row, so that the first one's way to the GPU counts little
constexpr int kMostLaunches = 64;

struct TuneOptions {
  std::vector<std::string> problems;
  std::string cases, out, json, time = "3", threads;
};

struct Candidate {
  std::string kernel, config;  // "" and "" = the default
  std::unique_ptr<Plan> plan;
  tw_plan_info info{};
  double seconds =
      std::numeric_limits<double>::infinity();  // the fastest of its runs: others are slower by the machine's doing
};

struct Tuned {
  std::string problem, kernel, config, default_kernel, default_config;
  double seconds = 0, default_seconds = 0;  // fastest runs
  double faster = 1;                        // the default's time over the choice's, median of pairs
  size_t pairs = 0, candidates = 0;
  bool kept = false;  // or the default stays
};

// What to try with a row; where a value is none of a row's, the row refuses it by name, and that is that.
std::vector<std::string> configs_of(const tw_kernel_info& row) {
  const bool on_gpu = row.backend == TW_BACKEND_CUDA;
  std::vector<std::string> configs = {""};  // another row than the default's
  if (on_gpu) {
    for (const int block_m : {64, 128, 192, 256})
      for (const int block_n : {64, 128, 192, 256}) configs.push_back(fmt::format("block_m={} block_n={}", block_m, block_n));
    for (const int splits : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) configs.push_back(fmt::format("splits={}", splits));
    return configs;
  }
  configs.clear();  // the CPU's rows differ by instruction set, and a lesser one is no candidate uncut
  for (const int block_m : row.pass == TW_BACKWARD ? std::vector{0} : std::vector{24, 48, 96, 192})
    for (const int block_n : {64, 128, 192, 256})
      for (const int splits : {0, 1, 2, 4, 8}) {
        std::string config = fmt::format("block_n={}", block_n);
        if (block_m > 0) config = fmt::format("block_m={} ", block_m) + config;
        if (splits > 0) config += fmt::format(" splits={}", splits);
        configs.push_back(config);
      }
  return configs;
}

// The default first, then every cut that a row takes.
std::vector<Candidate> candidates_of(const Problem& problem, int threads) {
  const bool on_gpu = problem.c().device == TW_CUDA;
  const std::string backend = on_gpu ? "cuda" : "cpu";
  std::vector<Candidate> found;
  const auto add = [&](const std::string& kernel, const std::string& config) {
    Target target = target_named(backend, kernel, threads);
    target.config = config;
    try {
      Candidate candidate{kernel, config, std::make_unique<Plan>(problem, target), {}};
      candidate.info = candidate.plan->info();
      // A cut that changes nothing has the text of one that is here already.
      for (const Candidate& other : found)
        if (std::string_view(other.info.kernel) == candidate.info.kernel &&
            std::string_view(other.info.config) == candidate.info.config &&
            other.info.num_splits == candidate.info.num_splits)
          return;
      found.push_back(std::move(candidate));
    } catch (const Error&) {  // this row or this cut does not take it
    }
  };
  add("", "");
  if (found.empty()) Plan(problem, target_named(backend, "", threads));  // throws, and says why
  for (const tw_kernel_info& row : kernels()) {
    if (!row.available || row.backend != (on_gpu ? TW_BACKEND_CUDA : TW_BACKEND_CPU) || row.pass != problem.c().pass ||
        std::string_view(row.isa) == "scalar")
      continue;
    for (const std::string& config : configs_of(row)) add(row.name, config);
  }
  return found;
}

// A problem's tensors and workspace where it runs, and how long a plan takes there.
class Stage {
 public:
  Stage(const Problem& problem, int64_t workspace_bytes, int threads) {
    std::string error;
    const tw_status status = harness::Inputs::make(problem.c(), {}, &inputs_, &error);
    if (status != TW_OK) throw Error(status, error);
    tensors_ = inputs_->tensors();
    size_ = static_cast<size_t>(workspace_bytes);
    const bool on_gpu = problem.c().device == TW_CUDA;
    if (on_gpu) {
      there_ = std::make_unique<harness::GpuTensors>(tensors_);
      tensors_ = there_->on_gpu(tensors_);
      gpu_workspace_ = std::make_unique<harness::GpuWorkspace>(size_);
    } else {
      workspace_ = Workspace(size_);
    }
    if (problem.c().pass == TW_BACKWARD) {
      const tw_problem forward = inputs_->forward_problem();
      const tw_tensors t = harness::without_gradients(tensors_);
      const Target target = target_named(on_gpu ? "cuda" : "cpu", "", threads);
      const tw_target where = target.c();
      detail::require(tw_forward(&forward, &t, &where, nullptr));
    }
  }

  bool on_gpu() const { return there_ != nullptr; }

  double seconds(const Plan& plan) {
    double seconds = 0;
    if (on_gpu()) {
      detail::require(harness::run_on_gpu(plan.c(), tensors_, *gpu_workspace_, launches_, &seconds));
      return seconds;
    }
    const auto begin = Clock::now();
    detail::require(tw_run(plan.c(), &tensors_, workspace_.data(), size_, nullptr));
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void set_launches(double seconds) {
    launches_ = static_cast<int>(std::clamp(kLeastOnGpu / std::max(seconds, 1e-9), 1.0, double{kMostLaunches}));
  }

 private:
  std::unique_ptr<harness::Inputs> inputs_;
  std::unique_ptr<harness::GpuTensors> there_;
  std::unique_ptr<harness::GpuWorkspace> gpu_workspace_;
  Workspace workspace_;
  size_t size_ = 0;
  tw_tensors tensors_{};
  int launches_ = 1;
};

Tuned tune(const std::string& text, int threads, double budget) {
  const Problem problem = parse_problem(text);
  std::vector<Candidate> candidates = candidates_of(problem, threads);
  int64_t most = 0;
  for (const Candidate& candidate : candidates) most = std::max(most, candidate.info.workspace_bytes);
  Stage stage(problem, most, threads);
  const auto run = [&](Candidate& candidate) {
    const double seconds = stage.seconds(*candidate.plan);
    candidate.seconds = std::min(candidate.seconds, seconds);
    return seconds;
  };
  if (stage.on_gpu()) {
    for (Candidate& candidate : candidates) stage.seconds(*candidate.plan);  // a kernel is loaded when it first runs
    stage.set_launches(stage.seconds(*candidates.front().plan));
  }
  const auto begin = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const auto by_time = [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; };
  // In turns, so that a slow moment of the machine meets all; then the slower half goes, until few are left.
  const size_t count = candidates.size();
  do {
    const size_t rounds = candidates.size() <= kFinalists + 1 ? 5 : 2;
    for (size_t round = 0; round < rounds; ++round)
      for (Candidate& candidate : candidates) run(candidate);
    if (candidates.size() > kFinalists + 1) {
      std::sort(candidates.begin() + 1, candidates.end(), by_time);
      candidates.resize(1 + std::max(kFinalists, (candidates.size() - 1) / 2));
    }
  } while (count > 1 && (candidates.size() > kFinalists + 1 || spent() < budget));
  // The best against the default in pairs, each first in turn: neighbours on the machine slow both alike, and the
  // median of the ratios forgets the pairs that they met in between.
  const size_t best =
      static_cast<size_t>(std::min_element(candidates.begin(), candidates.end(), by_time) - candidates.begin());
  std::vector<double> ratios;
  const auto pairs_begin = Clock::now();
  while (best != 0 && (ratios.size() < kLeastPairs ||
                       (std::chrono::duration<double>(Clock::now() - pairs_begin).count() < budget / 2 &&
                        ratios.size() < kMostPairs))) {
    const bool usual_first = ratios.size() % 2 == 0;
    const double first = run(candidates[usual_first ? 0 : best]), second = run(candidates[usual_first ? best : 0]);
    ratios.push_back(usual_first ? first / second : second / first);
  }
  std::sort(ratios.begin(), ratios.end());
  const double faster = ratios.empty() ? 1 : ratios[ratios.size() / 2];
  const Candidate& usual = candidates.front();
  const auto won = ratios.end() - std::upper_bound(ratios.begin(), ratios.end(), 1.0);
  const bool worth_it = faster > 1 + kWorthIt && static_cast<double>(won) > kWins * static_cast<double>(ratios.size());
  const Candidate& chosen = worth_it ? candidates[best] : usual;
  return {problem.text(), chosen.info.kernel, worth_it ? chosen.config : "", usual.info.kernel, usual.info.config,
          chosen.seconds, usual.seconds,      worth_it ? faster : 1,         ratios.size(),     count,             worth_it};
}

double load_average() {  // of the last minute: what else the machine has to do; -1 if it does not say
  double load = -1;
  return getloadavg(&load, 1) == 1 ? load : -1;
}

// "NVIDIA H200, sm_90, 132 multiprocessors": what the library compares a file's GPU with.
std::string gpu_line() {
  const std::string text = "\n" + machine(), mark = "\ncuda 0 ";
  const size_t at = text.find(mark);
  return at == std::string::npos ? "" : text.substr(at + mark.size(), text.find('\n', at + 1) - at - mark.size());
}

// "cpu ...; caches ...": what the library compares a file's machine with.
std::string machine_line() {
  std::string line;
  const std::string text = machine();
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string part = text.substr(at, end - at);
    if (part.starts_with("cpu ") || part.starts_with("caches ")) line += (line.empty() ? "" : "; ") + part;
    at = end + 1;
  }
  return line;
}

void run(const TuneOptions& o) {
  const int threads = thread_count(o.threads);
  const double time = to_number<double>("--time", o.time, 0, 86400, "seconds, 0 to 86400");
  std::vector<std::string> texts = o.problems;
  if (!o.cases.empty())
    for (const std::string& text : read_cases(o.cases)) texts.push_back(text);
  if (texts.empty()) throw UsageError("problem: none given; must be a problem's text, or --cases");
  bool any_on_gpu = false;
  for (const std::string& text : texts) {
    if (parse_problem(text).c().device != TW_CUDA) continue;
    if (const std::string why = harness::gpu_missing(); !why.empty())
      throw UsageError("problem: \"" + text + "\" is of a GPU: " + why);
    any_on_gpu = true;
  }
  const char* from_environment = std::getenv("TILEWISE_TUNING");
  const std::string out = !o.out.empty()                                     ? o.out
                          : from_environment != nullptr && *from_environment ? from_environment
                                                                             : "tilewise.tuning";
  require_writable("--out", out);
  if (!o.json.empty()) require_writable("--json", o.json);

  std::string file = fmt::format(
      "# Made by `tilewise tune` on {}. Plans use it where TILEWISE_TUNING names it; without it they choose by "
      "themselves.\n"
      "tilewise {}\nmachine {}\nthreads {}\n",
      date_text(), version(), machine_line(), threads);
  if (any_on_gpu) file += "gpu " + gpu_line() + "\n";
  Json json = {{"tool", "tilewise tune"},
               {"version", version()},
               {"date", date_text()},
               {"machine", machine()},
               {"threads", threads},
               {"load_average", load_average()},
               {"method",
                "candidates in turns, the fastest run of each; the best against the default in pairs, median of the "
                "ratios; kept if that is above 1.01 and it won 60 % of them; on a GPU a run is 1 ms of launches in a row, by events"},
               {"results", Json::array()}};
  print(fmt::format("{:>10} {:>10} {:>7}  {:<52} {}\n", "default", "tuned", "faster", "choice", "problem"));
  for (const std::string& text : texts) {
    const Tuned tuned = tune(text, threads, time);
    const std::string choice = tuned.kept                   ? tuned.kernel + (tuned.config.empty() ? "" : " " + tuned.config)
                               : tuned.candidates > 1 ? "the default"
                                                      : "the default: no row here cuts it otherwise";
    print(fmt::format("{:>10} {:>10} {:>6.1f}%  {:<52} {}\n", seconds_text(tuned.default_seconds),
                      seconds_text(tuned.seconds), 100 * (tuned.faster - 1), choice, tuned.problem));
    if (tuned.kept)
      file += fmt::format("{}: {}  # {}, {:.1f} % faster than the default\n", tuned.problem, choice,
                          seconds_text(tuned.seconds), 100 * (tuned.faster - 1));
    else
      file += fmt::format("# {}: the default, {}\n", tuned.problem, seconds_text(tuned.default_seconds));
    json["results"].push_back({{"problem", tuned.problem},
                               {"default_kernel", tuned.default_kernel},
                               {"default_config", tuned.default_config},
                               {"default_seconds", tuned.default_seconds},
                               {"kernel", tuned.kernel},
                               {"config", tuned.config},
                               {"seconds", tuned.seconds},
                               {"faster", tuned.faster},
                               {"pairs", tuned.pairs},
                               {"candidates", tuned.candidates}});
  }
  json["load_average_after"] = load_average();
  write_text(out, file);
  if (!o.json.empty()) write_text(o.json, json.dump(1) + "\n");
  print(fmt::format("{} written; export TILEWISE_TUNING={} to use it\n", out, out));
}

}  // namespace

void add_tune(CLI::App& app) {
  auto options = std::make_shared<TuneOptions>();
  CLI::App* command =
      add_command(app, "tune", "Measure how problems are best cut on this CPU or GPU, and keep the winners",
                  "  tilewise tune \"fwd f32 hq=16 sq=2048 d=64\" \"bwd f32 hq=16 sq=2048 d=64\" --out my.tuning\n"
                  "  tilewise tune --cases bench/cases/tune.txt --time 10\n"
                  "  TILEWISE_TUNING=my.tuning tilewise explain \"fwd f32 hq=16 sq=2048 d=64\"\n"
                  "  tilewise tune \"fwd bf16 cuda b=8 hq=16 sq=1024 d=128 causal\"\n"
                  "A file of another version, machine, number of threads or GPU is not used; explain says so. On a GPU the\n"
                  "candidates are the other rows, other blocks of forward_sm90, and other splits of decode_sm80 and forward_sm80.");
  command->add_option("problem", options->problems, "Problem texts")->type_name("PROBLEM");
  add_text(command, "--cases", options->cases, "FILE", "Problem texts, one a line");
  add_text(command, "--out", options->out, "FILE", "The winners (default: TILEWISE_TUNING, else tilewise.tuning)");
  add_text(command, "--json", options->json, "FILE", "Write machine, version and times to a file");
  add_text(command, "--time", options->time, "SECONDS", "Per problem, once few candidates are left")
      ->capture_default_str();
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)");
  command->callback([options] { run(*options); });
}

}  // namespace tilewise::cli
