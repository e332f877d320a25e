// tilewise report: one HTML page about this machine: what it has, what runs on it, how exact, how fast, in how much
// memory.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/bench.h"
#include "cli/chart.h"
#include "cli/cli.h"
#include "cli/output_files.h"
#include "harness/check.h"
#include "harness/run.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ReportOptions {
  std::string out = "tilewise.html", threads, time = "0.2";
  std::vector<std::string> benches;
};

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #222; --soft: #666; --line: #ddd;
  --good: #0b6e99; --bad: #c2410c; --page: #fff; --band: #f6f6f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --soft: #aaa; --line: #444;
  --good: #6fc3e6; --bad: #f0a57a; --page: #181818; --band: #222; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } p.note { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; } th { background: var(--band); }
td.n { text-align: right; } td.yes { color: var(--good); text-align: center; } td.no { color: var(--soft); text-align: center; }
.bad { color: var(--bad); font-weight: 700; } svg { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; } pre { background: var(--band); padding: 0.8rem; overflow-x: auto; }
)";

// A table under construction.
struct Table {
  std::string html;
  explicit Table(const std::vector<std::string>& heads) {
    html = "<div class=\"wide\"><table>\n<thead><tr>";
    for (const std::string& head : heads) html += "<th>" + escaped(head) + "</th>";
    html += "</tr></thead>\n<tbody>\n";
  }
  void begin() { html += "<tr>"; }
  void end() { html += "</tr>\n"; }
  void text(const std::string& value) { html += "<td>" + escaped(value) + "</td>"; }
  void code(const std::string& value) { html += "<td><code>" + escaped(value) + "</code></td>"; }
  void number(const std::string& value, bool bad = false) {
    html += fmt::format("<td class=\"n{}\">{}</td>", bad ? " bad" : "", escaped(value));
  }
  void mark(bool yes, const std::string& why) {
    html += yes ? "<td class=\"yes\">&#10003;</td>"
                : fmt::format("<td class=\"no\" title=\"{}\">&ndash;</td>", escaped(why));
  }
  std::string done() { return html + "</tbody></table></div>\n"; }
};

std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return "<section>\n<h2>" + escaped(title) + "</h2>\n" + (note.empty() ? "" : "<p class=\"note\">" + note + "</p>\n") +
         body + "</section>\n";
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const size_t colon = line.find(':'); colon != std::string::npos && colon + 2 < line.size())
        return line.substr(colon + 2);
  return "processor of unknown name";
}

// What each kernel takes; the reason why not is the mark's tooltip.
std::string support() {
  constexpr struct {
    const char* name;
    const char* dtype;  // nullptr: the row's first of f32, bf16
    const char* settings;
  } kColumns[] = {{"f32", "f32", ""},
                  {"f16", "f16", ""},
                  {"bf16", "bf16", ""},
                  {"f64", "f64", ""},
                  {"d 256", nullptr, "d=256"},
                  {"d 80", nullptr, "d=80"},
                  {"causal", nullptr, "causal"},
                  {"window", nullptr, "window=64,0"},
                  {"softcap", nullptr, "softcap=20"},
                  {"ALiBi", nullptr, "alibi=h"},
                  {"bias", nullptr, "bias=f32:hqk"},
                  {"mask", nullptr, "mask=bqk"},
                  {"sink", nullptr, "sink"},
                  {"dropout", nullptr, "dropout=0.1"},
                  {"packed", nullptr, "packed_q=2 packed_k=200"},
                  {"paged", nullptr, "pages=32x16 seqused_k"},
                  {"sq 1", nullptr, "sq=1"}};
  std::vector<std::string> heads = {"kernel", "pass"};
  for (const auto& column : kColumns) heads.push_back(column.name);
  Table table(heads);
  for (const tw_kernel_info& kernel : kernels())
    for (const int pass : {TW_FORWARD, TW_BACKWARD}) {
      if (kernel.pass != -1 && kernel.pass != pass) continue;
      const bool few = std::string_view(kernel.name).starts_with("decode");  // of query rows is what these rows take
      const std::string device = kernel.backend == TW_BACKEND_CUDA ? " cuda" : "";
      const auto takes = [&](const std::string& dtype, const std::string& settings, std::string* why) {
        const std::string text = fmt::format("{} {}{} b=2 hq=4 hk=2 sq={} sk=128 d=64 {}", pass == TW_FORWARD ? "fwd" : "bwd",
                                             dtype, device, few ? 2 : 128, settings);
        tw_problem problem;
        return harness::parse_problem(text, &problem, why) && harness::takes(kernel.name, problem, why);
      };
      std::string why;
      const std::string own = takes("f32", "", &why) || kernel.backend == TW_BACKEND_REFERENCE ? "f32" : "bf16";
      table.begin();
      table.code(kernel.name);
      table.text(pass_text(pass));
      for (const auto& column : kColumns) {
        why.clear();
        const bool yes = takes(column.dtype ? column.dtype : own, column.settings, &why);
        table.mark(yes, one_line(why));
      }
      table.end();
    }
  return table.done();
}

std::string kernel_list() {
  Table table({"kernel", "backend", "pass", "needs", "here", "takes"});
  for (const tw_kernel_info& k : kernels()) {
    table.begin();
    table.code(k.name);
    for (const std::string& cell : {backend_text(k.backend), pass_text(k.pass), std::string(k.isa)}) table.text(cell);
    table.mark(k.available, "this machine has no " + std::string(k.isa));
    table.text(k.summary);
    table.end();
  }
  return table.done();
}

std::string accuracy(int threads, bool* all_good) {
  Table table({"problem", "kernel", "output", "largest error", "standard attention's", "ratio", ""});
  for (const char* text : {"fwd f32 b=1 hq=4 sq=512 d=64 causal", "fwd bf16 b=1 hq=4 hk=2 sq=512 d=128 causal",
                           "fwd f16 b=1 hq=4 sq=512 d=64 softcap=20", "fwd bf16 b=4 hq=16 hk=4 sq=1 sk=1024 d=128",
                           "bwd f32 b=1 hq=4 sq=256 d=64 causal", "bwd bf16 b=1 hq=4 hk=2 sq=256 d=128 causal"}) {
    harness::CheckRequest request;
    request.problem = text, request.threads = threads;
    const harness::CheckResult result = harness::check(request);
    *all_good = *all_good && result.ok;
    for (const harness::OutputError& output : result.outputs) {
      table.begin();
      table.code(text);
      table.code(result.kernel);
      table.text(output.name);
      table.number(fmt::format("{:.2e}", output.max_abs), output.max_abs > output.limit_max_abs);
      table.number(fmt::format("{:.2e}", output.baseline_max_abs));
      table.number(output.baseline_max_abs > 0 ? fmt::format("{:.2f}", output.max_abs / output.baseline_max_abs) : "-");
      table.text(result.ok ? "ok" : "FAILED");
      table.end();
    }
  }
  return table.done();
}

std::string bench_table(const Json& record) {
  Table table({"problem", "kernel", "median", "GFLOP/s", "of peak", "standard attention", "faster"});
  for (const Json& result : record.at("results")) {
    const double median = result.at("samples").at("median");
    table.begin();
    table.code(result.at("problem"));
    table.code(result.at("kernel"));
    table.number(seconds_text(median));
    table.number(fmt::format("{:.1f}", result.at("gflops").get<double>()));
    table.number(fmt::format("{:.0f} %", result.at("percent_of_peak").get<double>()));
    const auto standard = result.find("standard_samples");
    table.number(standard == result.end() ? "" : seconds_text(standard->at("median")));
    table.number(standard == result.end() ? "" : fmt::format("{:.2f}x", standard->at("median").get<double>() / median));
    table.end();
  }
  return table.done();
}

// The grid of bench/python/sdpa.py: torch's time over ours.
std::string peer_table(const Json& record) {
  Table table({"dtype", "pass", "mask", "d", "s", "torch SDPA over Tilewise"});
  for (const Json& row : record.at("rows")) {
    table.begin();
    table.text(row.at("dtype"));
    table.text(row.at("pass"));
    table.text(row.at("causal").get<bool>() ? "causal" : "full");
    table.number(row.at("d").dump());
    table.number(row.at("s").dump());
    const double ratio = row.at("ratio");
    table.number(fmt::format("{:.2f}x", ratio), ratio < 1);
    table.end();
  }
  return table.done();
}

std::string bench_of_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError("--bench: \"" + path + "\": cannot be read");
  const Json record = Json::parse(file, nullptr, false);
  const std::string from = "<p class=\"note\">From <code>" + escaped(path) + "</code>.</p>\n";
  try {
    if (record.is_object() && record.contains("results")) return from + bench_table(record);
    if (record.is_object() && record.contains("rows")) return from + peer_table(record);
  } catch (const Json::exception&) {  // the sentence below says what is wanted
  }
  throw UsageError("--bench: \"" + path + "\": must be a file of `tilewise bench --json` or of bench/python/sdpa.py");
}

std::string memory_curves(int threads) {
  std::string html;
  constexpr struct {
    const char* title;
    const char* device;
    const char* text;
  } kShapes[] = {
      {"This CPU, 8 heads of 64, float32", "cpu", "bwd f32 b=1 hq=8 d=64 causal"},
      {"A GPU, 16 heads of 64, bfloat16", "cuda", "bwd bf16 cuda b=1 hq=16 d=64 causal"},
      {"A GPU, Llama 3 8B: 32 heads over 8, of 128, bfloat16", "cuda", "bwd bf16 cuda b=1 hq=32 hk=8 d=128 causal"}};
  for (const auto& shape : kShapes) {
    Chart chart;
    chart.title = shape.title;
    chart.subtitle = "peak above the inputs, forward and backward, causal";
    chart.x_label = "sequence length (tokens)";
    chart.series = {{"standard", "#c2410c", {}, {}, false}, {"Tilewise", "#0b6e99", {}, {}, false}};
    for (int64_t s = 512; s <= 131072; s *= 2) {
      const tw_memory_info info =
          memory(parse_problem(fmt::format("{} sq={}", shape.text, s)), target_named("auto", "", threads));
      for (int n = 0; n < 2; ++n) {
        const tw_memory_use& use = n == 0 ? info.standard : info.tiled;
        chart.series[static_cast<size_t>(n)].x.push_back(static_cast<double>(s));
        chart.series[static_cast<size_t>(n)].y.push_back(
            static_cast<double>(std::max(use.peak_forward, use.peak_backward)));
      }
    }
    html += "<figure>\n" + chart.svg() + "</figure>\n";
  }
  return html;
}

void run(const ReportOptions& options, int* exit_status) {
  const int threads = thread_count(options.threads);
  const double time = to_number<double>("--time", options.time, 0, 3600, "seconds, 0 to 3600");
  require_writable("--out", options.out);
  std::string speed;
  for (const std::string& path : options.benches) speed += bench_of_file(path);
  if (options.benches.empty()) {
    BenchRequest request;
    request.problems = {"fwd f32 b=1 hq=4 sq=1024 d=64",          "fwd f32 b=1 hq=4 sq=1024 d=64 causal",
                        "fwd bf16 b=1 hq=4 sq=1024 d=128 causal", "fwd bf16 b=4 hq=32 hk=8 sq=1 sk=2048 d=128",
                        "bwd f32 b=1 hq=4 sq=1024 d=64",          "bwd bf16 b=1 hq=4 sq=1024 d=128 causal"};
    request.threads = threads, request.seconds = time, request.standard = true;
    speed = bench_table(bench_record(request));
  }
  bool exact = true;
  const std::string errors = accuracy(threads, &exact);
  if (!exact) *exit_status = kFailed;
  const std::string page =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n"
      "<title>Tilewise on " +
      escaped(processor()) + "</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n<h1>Tilewise " + version() +
      "</h1>\n<p class=\"note\">" + escaped(processor()) +
      fmt::format(", {} thread{}, ", threads, threads == 1 ? "" : "s") + date_text() + "</p>\n" +
      section("Machine", "", "<pre>" + escaped(machine()) + "</pre>\n") +
      section("Kernels", "Best first: the first that takes a problem runs.", kernel_list()) +
      section("What each takes",
              "A dash is a refusal; its tooltip says why. <code>tilewise explain</code> says it for any problem.",
              support()) +
      section("Accuracy",
              exact ? "Against float64, beside standard attention in the same dtype: at most twice its error (three "
                      "times with softcap)."
                    : "Against float64, beside standard attention in the same dtype. <span class=\"bad\">Some checks "
                      "FAILED.</span>",
              errors) +
      section("Speed",
              options.benches.empty() ? "Measured for this page, in turns, beside a peak of multiply-adds in the same "
                                        "run; standard attention is the project's own."
                                      : "",
              speed) +
      section("Memory", "Predicted; <code>tilewise memory --verify</code> measures.", memory_curves(threads)) +
      "</body>\n</html>\n";
  write_text(options.out, page);
  print(options.out + "\n");
}

}  // namespace

void add_report(CLI::App& app, int* exit_status) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* command =
      add_command(app, "report", "Write one HTML page about this machine: support, accuracy, speed, memory",
                  "  tilewise report --out machine.html\n"
                  "  tilewise report --bench bench/results/cpu.json --bench bench/results/python_sdpa.json");
  add_text(command, "--out", options->out, "FILE", "The page, complete in itself")->capture_default_str();
  command
      ->add_option("--bench", options->benches,
                   "Speed out of a file of `tilewise bench --json` or bench/python/sdpa.py; else it is measured")
      ->type_name("FILE");
  add_text(command, "--time", options->time, "SECONDS", "Per problem, if speed is measured")->capture_default_str();
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)");
  command->callback([options, exit_status] { run(*options, exit_status); });
}

}  // namespace tilewise::cli
