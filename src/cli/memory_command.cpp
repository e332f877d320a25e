// tilewise memory: what attention takes, what fits, and whether that is so. The model itself is the library's
// (tw_memory).
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cases.h"
#include "cli/chart.h"
#include "cli/cli.h"
#include "cli/memory_verify.h"
#include "cli/models.h"
#include "cli/output_files.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;

struct MemoryOptions {
  std::vector<std::string> problems, sweeps;
  std::string model, config, seqlen = "4096", batch = "1", dtype = "bf16", pass = "bwd", device = "cuda", extra, cases;
  std::string layers = "1", tensor_parallel = "1", context_parallel = "1", gpu, budget, solve = "sq";
  std::string format = "text", svg, threads;
  bool decode = false, checkpointing = false, explain = false, verify = false, models = false;
};

int64_t bytes_of(const std::string& flag, const std::string& text) {  // "24GiB", "80GB", "1.5e9"
  constexpr struct {
    const char* name;
    double bytes;
  } kUnits[] = {{"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"kB", 1e3},
                {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},    {"B", 1}};
  std::string number = text;
  double unit = 1;
  for (const auto& known : kUnits)
    if (text.ends_with(known.name)) {
      unit = known.bytes, number.resize(text.size() - std::string_view(known.name).size());
      break;
    }
  while (!number.empty() && number.back() == ' ') number.pop_back();
  const double value = to_number<double>(flag, number, 1e-9, 1e18, "a size above 0 as in 24GiB, 80GB or 1e9");
  return static_cast<int64_t>(std::min(value * unit, 1e18));
}

int64_t count_of(const std::string& flag, const std::string& text) {
  return to_number<int64_t>(flag, text, 1, int64_t{1} << 40, "an integer >= 1");
}

// ---- which problems ---------------------------------------------------------------------------------------

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

// "sq=512..16384" (doubling) or "dtype=f32,bf16"
std::pair<std::string, std::vector<std::string>> sweep_of(const std::string& text) {
  const size_t equals = text.find('='), dots = text.find("..");
  if (equals == std::string::npos || equals == 0 || equals + 1 == text.size())
    throw UsageError("--sweep: \"" + text + "\": must be KEY=FIRST..LAST, which doubles, or KEY=A,B,C");
  const std::string key = text.substr(0, equals);
  std::vector<std::string> values;
  if (dots == std::string::npos) return {key, split(text.substr(equals + 1), ',')};
  const int64_t first = count_of("--sweep", text.substr(equals + 1, dots - equals - 1)),
                last = count_of("--sweep", text.substr(dots + 2));
  if (first > last) throw UsageError("--sweep: \"" + text + "\": the first value must not be above the last");
  for (int64_t value = first; value <= last; value *= 2) values.push_back(std::to_string(value));
  return {key, values};
}

// The text with one setting changed: the last of a key counts.
std::string with(const std::string& text, const std::string& key, const std::string& value) {
  if (key != "dtype") return text + " " + key + "=" + value;
  std::vector<std::string> words = split(text, ' ');
  if (words.size() > 1) words[1] = value;
  std::string changed;
  for (const std::string& word : words) changed += (changed.empty() ? "" : " ") + word;
  return changed;
}

struct Request {
  std::vector<std::string> texts;  // of problems, as given
  tw_model model{};                // name "" = none
  tw_memory_options options;
  Target target;
  std::string gpu;
  int64_t budget = 0;
};

tw_gpu gpu_named(const std::string& name) {
  std::string names;
  for (int32_t n = 0; n < tw_gpu_count(); ++n) {
    tw_gpu gpu{};
    gpu.struct_size = sizeof gpu;
    detail::require(tw_gpu_at(n, &gpu));
    if (name == gpu.name) return gpu;
    names += std::string(names.empty() ? "" : ", ") + gpu.name;
  }
  throw UsageError("--gpu: \"" + name + "\": must be one of " + names);
}

Request request_of(const MemoryOptions& o) {
  Request r;
  tw_memory_options_init(&r.options);
  r.options.checkpointing = o.checkpointing;
  r.options.tensor_parallel = count_of("--tensor-parallel", o.tensor_parallel);
  r.options.context_parallel = count_of("--context-parallel", o.context_parallel);
  r.target = target_named("auto", "", thread_count(o.threads));
  r.texts = o.problems;
  if (!o.cases.empty())
    for (const std::string& line : read_cases(o.cases)) r.texts.push_back(line);
  if (!o.model.empty() || !o.config.empty()) {
    r.model = o.model.empty() ? model_of_config(o.config) : model_named(o.model);
    ModelShape shape;
    shape.batch = count_of("--batch", o.batch);
    shape.seqlen = count_of("--seqlen", o.seqlen);
    shape.pass = o.decode ? "fwd" : o.pass, shape.dtype = o.dtype, shape.device = o.device, shape.decode = o.decode;
    r.texts.push_back(problem_of_model(r.model, shape));
    r.options.hidden_size = r.model.hidden_size;
  }
  if (r.texts.empty()) throw UsageError("problem: none given; must be a problem's text, --cases, --model or --config");
  if (!o.gpu.empty()) r.gpu = gpu_named(o.gpu).name;
  for (std::string& text : r.texts) {
    if (!o.extra.empty()) text += " " + o.extra;
    if (!r.gpu.empty() && (" " + text + " ").find(" cuda ") == std::string::npos) text += " cuda";
  }
  r.options.layers = o.layers != "all" ? count_of("--layers", o.layers)
                     : r.model.name[0]
                         ? r.model.layers
                         : throw UsageError("--layers: \"all\": must be an integer without --model and --config");
  r.options.window = r.model.window, r.options.window_layers = windowed_layers(r.model, r.options.layers);
  for (const std::string& text : o.sweeps) {
    const auto [key, values] = sweep_of(text);
    std::vector<std::string> more;
    for (const std::string& problem : r.texts)
      for (const std::string& value : values) more.push_back(with(problem, key, value));
    r.texts = more;
  }
  if (!o.budget.empty()) r.budget = bytes_of("--budget", o.budget);
  return r;
}

// ---- one problem ------------------------------------------------------------------------------------------

struct Row {
  Problem problem;
  tw_memory_info info;
};

Row row_of(const Request& r, const Problem& problem, const tw_memory_options& options) {
  return {problem, memory(problem, options, r.target)};
}

int64_t peak(const tw_memory_use& use) { return std::max(use.peak_forward, use.peak_backward); }
double ratio(int64_t standard, int64_t tiled) {
  return tiled > 0 ? static_cast<double>(standard) / static_cast<double>(tiled) : 0;
}
std::string mebibytes(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / 0x1p20); }
std::string size_text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

Json json_of(const tw_memory_use& use) {
  return {{"outputs", use.outputs},
          {"saved", use.saved},
          {"gradients", use.gradients},
          {"workspace_forward", use.workspace_forward},
          {"workspace_backward", use.workspace_backward},
          {"peak_forward", use.peak_forward},
          {"peak_backward", use.peak_backward},
          {"total", use.total}};
}

Json json_of(const Row& row) {
  return {{"problem", row.problem.text()},
          {"workspace_from", row.info.planned ? "plan" : "formula"},
          {"inputs", row.info.inputs},
          {"layer_input", row.info.layer_input},
          {"standard", json_of(row.info.standard)},
          {"tilewise", json_of(row.info.tiled)},
          {"ratio", ratio(peak(row.info.standard), peak(row.info.tiled))},
          {"flops", row.info.flops},
          {"standard_bytes_moved", row.info.standard_bytes_moved},
          {"tilewise_bytes_moved", row.info.tiled_bytes_moved}};
}

struct Column {
  const char* name;
  int64_t tw_memory_use::*member;
};
constexpr Column kColumns[] = {{"outputs", &tw_memory_use::outputs},
                               {"saved", &tw_memory_use::saved},
                               {"gradients", &tw_memory_use::gradients},
                               {"workspace fwd", &tw_memory_use::workspace_forward},
                               {"workspace bwd", &tw_memory_use::workspace_backward},
                               {"peak fwd", &tw_memory_use::peak_forward},
                               {"peak bwd", &tw_memory_use::peak_backward},
                               {"total", &tw_memory_use::total}};

std::string ratio_text(int64_t standard, int64_t tiled) {
  const double value = ratio(standard, tiled);
  return tiled <= 0 || standard <= 0 ? "-" : value < 10 ? fmt::format("{:.2f}x", value) : fmt::format("{:.0f}x", value);
}

std::string table_of_one(const Row& row, const tw_memory_options& options) {
  std::string text = fmt::format("problem  {}\ninputs   {}", row.problem.text(), size_text(row.info.inputs));
  if (options.layers > 1)
    text += fmt::format(" a layer, {} layers{}{}", options.layers,
                        options.window_layers > 0 ? fmt::format(", {} of them with a window of {}", options.window_layers, options.window) : "",
                        options.checkpointing ? ", checkpointing" : "");
  if (options.tensor_parallel * options.context_parallel > 1)
    text += fmt::format(", on each of {} devices", options.tensor_parallel * options.context_parallel);
  text += row.info.planned ? "" : "; CUDA workspace by formula, as no plan can be made here";
  text += "\n\n         ";
  for (const Column& column : kColumns) text += fmt::format(" {:>13}", column.name);
  for (const auto& [name, use] : {std::pair{"standard", &row.info.standard}, std::pair{"Tilewise", &row.info.tiled}}) {
    text += fmt::format("\n{:<9}", name);
    for (const Column& column : kColumns) text += fmt::format(" {:>13}", size_text(use->*column.member));
  }
  text += "\nratio    ";
  for (const Column& column : kColumns)
    text += fmt::format(" {:>13}", ratio_text(row.info.standard.*column.member, row.info.tiled.*column.member));
  return text + "\n\npeaks are above the inputs; the total has them, and every layer\n";
}

// ---- several problems -------------------------------------------------------------------------------------

constexpr const char* kHeads[] = {"standard fwd", "standard bwd", "Tilewise fwd", "Tilewise bwd", "ratio"};

std::vector<std::string> cells(const Row& row) {
  const tw_memory_use &standard = row.info.standard, &tiled = row.info.tiled;
  std::vector<std::string> texts;
  for (const tw_memory_use* use : {&standard, &tiled})
    for (const int64_t bytes : {use->peak_forward, use->peak_backward})
      texts.push_back(bytes < 1 << 20 ? size_text(bytes) : mebibytes(bytes) + " MiB");
  texts.push_back(ratio_text(peak(standard), peak(tiled)));
  return texts;
}

std::string table_of_many(const std::vector<Row>& rows) {
  std::string text = "peak memory above the inputs\n";
  for (const char* head : kHeads) text += fmt::format("{:>15} ", head);
  text += " problem\n";
  for (const Row& row : rows) {
    for (const std::string& cell : cells(row)) text += fmt::format("{:>15} ", cell);
    text += " " + row.problem.text() + "\n";
  }
  return text;
}

std::string markdown(const std::vector<Row>& rows) {
  std::string text = "| problem |";
  for (const char* head : kHeads) text += std::string(" ") + head + " |";
  text += "\n|---|---|---|---|---|---|\n";
  for (const Row& row : rows) {
    text += "| `" + row.problem.text() + "` |";
    for (const std::string& cell : cells(row)) text += " " + cell + " |";
    text += "\n";
  }
  return text;
}

std::string csv(const std::vector<Row>& rows) {
  std::string text = "problem,workspace_from,inputs";
  for (const char* what : {"standard", "tilewise"})
    for (const Column& column : kColumns) {
      std::string name = column.name;
      std::replace(name.begin(), name.end(), ' ', '_');
      text += fmt::format(",{}_{}", what, name);
    }
  text += "\n";
  for (const Row& row : rows) {
    text += fmt::format(
        "{},{},{}",
        row.problem.text().find(',') == std::string::npos ? row.problem.text() : "\"" + row.problem.text() + "\"",
        row.info.planned ? "plan" : "formula", row.info.inputs);
    for (const tw_memory_use* use : {&row.info.standard, &row.info.tiled})
      for (const Column& column : kColumns) text += fmt::format(",{}", use->*column.member);
    text += "\n";
  }
  return text;
}

// Peaks over the sequence length; one pair of lines for each other setting.
std::string chart_of(const std::vector<Row>& rows, int64_t budget) {
  constexpr const char* kRed[] = {"#c2410c", "#e8793a", "#f0a57a", "#f6c9ae"};
  constexpr const char* kBlue[] = {"#0b6e99", "#3c9cc4", "#7fbfdc", "#b5dbeb"};
  std::vector<std::pair<std::string, std::vector<const Row*>>> groups;
  const auto varies = [&](auto&& get) {
    for (const Row& row : rows)
      if (get(row) != get(rows.front())) return true;
    return false;
  };
  const bool dtypes = varies([](const Row&r) { return r.problem.c().dtype; }),
             dims = varies([](const Row&r) { return r.problem.c().head_dim; });
  const bool passes = varies([](const Row&r) { return r.problem.c().pass; }),
             batches = varies([](const Row&r) { return r.problem.c().batch; });
  for (const Row& row : rows) {
    const tw_problem& p = row.problem.c();
    std::string name;
    if (passes) name += p.pass == TW_FORWARD ? ", forward" : ", training";
    if (dtypes) name += ", " + dtype_text(p.dtype);
    if (dims) name += fmt::format(", d {}", p.head_dim);
    if (batches) name += fmt::format(", b {}", p.batch);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == name; });
    if (group == groups.end()) group = groups.insert(groups.end(), {name, {}});
    group->second.push_back(&row);
  }
  if (groups.size() > 4)
    throw UsageError(fmt::format("--svg: {} pairs of lines: must be at most 4 to be told apart", groups.size()));
  const tw_problem& p = rows.front().problem.c();
  Chart chart;
  chart.title =
      p.pass == TW_FORWARD && !passes ? "Memory of attention, forward" : "Memory of attention, forward and backward";
  chart.subtitle = fmt::format("peak above the inputs: batch {}, {} heads{}, head dim {}, {}", p.batch, p.num_heads_q,
                               p.num_heads_k != p.num_heads_q ? fmt::format(" over {} key heads", p.num_heads_k) : "",
                               p.head_dim, dtype_text(p.dtype));
  chart.x_label = "sequence length (tokens)";
  chart.limit = static_cast<double>(budget), chart.limit_name = "budget " + size_text(budget);
  for (const bool standard : {true, false})
    for (size_t n = 0; n < groups.size(); ++n) {
      Series line{std::string(standard ? "standard" : "Tilewise") + groups[n].first,
                  standard ? kRed[n] : kBlue[n],
                  {},
                  {},
                  false};
      for (const Row* row : groups[n].second) {
        line.x.push_back(static_cast<double>(std::max(row->problem.c().seqlen_q, row->problem.c().seqlen_k)));
        line.y.push_back(static_cast<double>(peak(standard ? row->info.standard : row->info.tiled)));
      }
      if (!std::is_sorted(line.x.begin(), line.x.end()) || line.x.front() <= 0)
        throw UsageError("--svg: the sequence lengths must ascend from 1 on, as in --sweep sq=512..16384");
      chart.series.push_back(std::move(line));
    }
  return chart.svg();
}

// ---- what fits --------------------------------------------------------------------------------------------

struct Fit {
  std::string what, problem;
  int64_t standard = 0, tiled = 0;
};

std::vector<Fit> fits_of(const Request& r, const std::string& key) {
  std::string text = r.texts.front();
  const tw_problem given = parse_problem(text).c();
  const int64_t layers = r.options.layers > 1 ? r.options.layers : r.model.name[0] ? r.model.layers : 1;
  std::vector<Fit> fits;
  const auto add = [&](const std::string& what, const Problem& problem, int64_t with_layers, bool checkpointing) {
    tw_memory_options options = r.options;
    options.layers = with_layers, options.checkpointing = checkpointing;
    options.window_layers = windowed_layers(r.model, with_layers);
    const tw_target target = r.target.c();
    Fit fit{what, problem.text()};
    detail::require(tw_memory_largest(&problem.c(), &options, &target, r.budget, key.c_str(), 1, &fit.standard));
    detail::require(tw_memory_largest(&problem.c(), &options, &target, r.budget, key.c_str(), 0, &fit.tiled));
    fits.push_back(fit);
  };
  Problem forward = parse_problem(given.pass == TW_FORWARD ? text : text.replace(text.find("bwd"), 3, "fwd"));
  add("one layer, forward", forward, 1, false);
  if (given.pass == TW_BACKWARD) add("one layer, forward and backward", parse_problem(r.texts.front()), 1, false);
  if (layers > 1) {
    const int64_t windowed = windowed_layers(r.model, layers);
    add(windowed > 0 ? fmt::format("{} layers, forward ({} keep {} tokens)", layers, windowed, r.model.window)
                     : fmt::format("{} layers, forward (all keep k and v)", layers),
        forward, layers, false);
    if (given.pass == TW_BACKWARD) {
      add(fmt::format("{} layers, forward and backward", layers), parse_problem(r.texts.front()), layers, false);
      add(fmt::format("{} layers, the same with checkpointing", layers), parse_problem(r.texts.front()), layers, true);
    }
  }
  return fits;
}

std::string fits_text(const Request& r, const std::vector<Fit>& fits, const std::string& key) {
  const char* name = key == "sq" ? "sequence length" : key == "b" ? "batch" : "number of query heads";
  std::string text =
      r.model.name[0] ? fmt::format("model    {}: attention alone, without weights\n", r.model.name) : "";
  text += fmt::format("problem  {}\nlargest {} within {}\n\n{:<42} {:>12} {:>12} {:>8}\n", r.texts.front(), name,
                      size_text(r.budget), "", "standard", "Tilewise", "ratio");
  for (const Fit& fit : fits)
    text += fmt::format("{:<42} {:>12} {:>12} {:>8}\n", fit.what, fit.standard, fit.tiled,
                        ratio_text(fit.tiled, fit.standard));
  return text;
}

std::string fits_other(const std::vector<Fit>& fits, const std::string& key, int64_t budget,
                       const std::string& format) {
  if (format == "json") {
    Json json = {{"budget", budget}, {"key", key}, {"largest", Json::array()}};
    for (const Fit& fit : fits)
      json["largest"].push_back(
          {{"what", fit.what}, {"problem", fit.problem}, {"standard", fit.standard}, {"tilewise", fit.tiled}});
    return json.dump(2) + "\n";
  }
  const bool csv = format == "csv";
  std::string text = csv ? "what,standard,tilewise\n" : "| | standard | Tilewise |\n|---|---|---|\n";
  for (const Fit& fit : fits)
    text += csv ? fmt::format("\"{}\",{},{}\n", fit.what, fit.standard, fit.tiled)
                : fmt::format("| {} | {} | {} |\n", fit.what, fit.standard, fit.tiled);
  return text;
}

// ---- predicted against measured ---------------------------------------------------------------------------

bool verify(const Request& r, const std::string& format) {
  const int threads = r.target.num_threads;
  std::vector<MemoryCheck> checks;
  for (const std::string& text : r.texts)
    for (MemoryCheck& check : verify_memory(parse_problem(text), threads)) checks.push_back(std::move(check));
  size_t failed = 0;
  for (const MemoryCheck& check : checks) failed += !check.ok();
  if (format == "json") {
    Json json = {{"tool", "tilewise memory --verify"},
                 {"version", version()},
                 {"date", date_text()},
                 {"machine", machine()},
                 {"threads", threads},
                 {"method",
                  "CPU: each part in a process of its own; growth of VmHWM above q, k, v; freed memory returned at once, 4 "
                  "KiB pages; GPU: high-water mark of the device's memory pool above q, k, v, and what was taken beside it; "
                  "backward: both passes"},
                 {"bound", "1 % and 2 MiB"},
                 {"failed", failed},
                 {"checks", Json::array()}};
    for (const MemoryCheck& check : checks)
      json["checks"].push_back({{"problem", check.problem},
                                {"what", check.what},
                                {"pass", check.pass},
                                {"predicted", check.predicted},
                                {"measured", check.measured},
                                {"error", check.error()},
                                {"ok", check.ok()}});
    print(json.dump(1) + "\n");
    return failed == 0;
  }
  std::string text = fmt::format("{:>12} {:>12} {:>8}       {:<9} {:<9} {}\n", "predicted", "measured", "error", "",
                                 "peak", "problem");
  for (const MemoryCheck& check : checks)
    text += fmt::format("{:>8} MiB {:>8} MiB {:>+7.2f}% {:>5} {:<9} {:<9} {}\n", mebibytes(check.predicted),
                        mebibytes(check.measured), 100 * check.error(), check.ok() ? "ok" : "FAIL", check.what,
                        check.pass, check.problem);
  print(text + fmt::format("{} within 1 % and 2 MiB, {} beyond\n", checks.size() - failed, failed));
  return failed == 0;
}

void list_models() {
  std::string text = fmt::format("{:<16} {:>7} {:>7} {:>4} {:>4} {:>4} {:>4} {:>7} {:>12} {:>8} {}\n", "model",
                                 "hidden", "layers", "hq", "hk", "d", "dv", "window", "without it", "softcap", "sink");
  for (int32_t n = 0; n < tw_model_count(); ++n) {
    tw_model m{};
    m.struct_size = sizeof m;
    detail::require(tw_model_at(n, &m));
    text += fmt::format("{:<16} {:>7} {:>7} {:>4} {:>4} {:>4} {:>4} {:>7} {:>12} {:>8} {}\n", m.name, m.hidden_size,
                        m.layers, m.num_heads_q, m.num_heads_k, m.head_dim, m.head_dim_v, m.window, m.layers_full,
                        m.softcap, m.sink ? "yes" : "no");
  }
  text += fmt::format("\n{:<10} {:>5} {:>4} {:>10} {:>10} {:>15} {:>15}\n", "GPU", "sm", "SMs", "memory GB", "GB/s",
                      "bf16 TFLOP/s", "f32 TFLOP/s");
  for (int32_t n = 0; n < tw_gpu_count(); ++n) {
    tw_gpu g{};
    g.struct_size = sizeof g;
    detail::require(tw_gpu_at(n, &g));
    text += fmt::format("{:<10} {:>5} {:>4} {:>10.0f} {:>10.0f} {:>15.1f} {:>15.1f}\n", g.name, g.capability,
                        g.multiprocessors, static_cast<double>(g.memory_bytes) * 1e-9, g.memory_bytes_per_second * 1e-9,
                        g.tensor_flops * 1e-12, g.vector_flops * 1e-12);
  }
  print(text);
}

std::string explained(const Request& r, const Problem& problem) {
  return explain_memory(problem, r.options, r.target, r.gpu);
}

void run(const MemoryOptions& options, int* exit_status) {
  if (options.models) return list_models();
  const Request r = request_of(options);
  if (!options.svg.empty()) require_writable("--svg", options.svg);
  if (options.verify) {
    if (!verify(r, options.format)) *exit_status = kFailed;
    return;
  }
  std::vector<Row> rows;
  if (r.budget == 0 || !options.sweeps.empty() || !options.svg.empty())
    for (const std::string& text : r.texts) rows.push_back(row_of(r, parse_problem(text), r.options));
  if (!options.svg.empty()) write_text(options.svg, chart_of(rows, r.budget));
  if (r.budget > 0 && options.sweeps.empty()) {
    const std::vector<Fit> fits = fits_of(r, options.solve);
    return print(options.format == "text" ? fits_text(r, fits, options.solve)
                                          : fits_other(fits, options.solve, r.budget, options.format));
  }
  if (options.explain) {
    for (const Row& row : rows) print(explained(r, row.problem));
    return;
  }
  if (options.format == "json") {
    Json json = Json::array();
    for (const Row& row : rows) json.push_back(json_of(row));
    print((rows.size() == 1 ? json[0] : json).dump(2) + "\n");
  } else if (options.format == "csv") {
    print(csv(rows));
  } else if (options.format == "markdown") {
    print(markdown(rows));
  } else {
    print(rows.size() == 1 ? table_of_one(rows[0], r.options) : table_of_many(rows));
  }
}

}  // namespace

void add_memory(CLI::App& app, int* exit_status) {
  auto o = std::make_shared<MemoryOptions>();
  CLI::App* command = add_command(
      app, "memory", "Say what attention takes in memory, standard and tiled, and what fits",
      "  tilewise memory \"bwd bf16 cuda b=1 hq=16 sq=16384 d=64\"\n"
      "  tilewise memory \"bwd bf16 cuda b=1 hq=16 sq=512 d=64\" --sweep sq=512..16384 --svg memory.svg\n"
      "  tilewise memory --model llama3-8b --budget 24GiB\n"
      "  tilewise memory --config config.json --seqlen 32768 --layers all --checkpointing --tensor-parallel 8\n"
      "  tilewise memory --model llama3-8b --seqlen 8192 --gpu RTX-4090 --explain\n"
      "  tilewise memory \"bwd f32 hq=4 sq=1024 d=64 causal\" --verify\n"
      "A \"fwd\" problem stands for inference, a \"bwd\" one for training: forward and backward.");
  command->add_option("problem", o->problems, "Problem texts")->type_name("PROBLEM");
  add_text(command, "--cases", o->cases, "FILE", "Problem texts, one a line");
  CLI::Option* model =
      add_text(command, "--model", o->model, "NAME", "Attention of a known model; --models lists them");
  add_text(command, "--config", o->config, "FILE", "Attention of a Hugging Face config.json")->excludes(model);
  command->add_flag("--models", o->models, "List models and GPUs");
  add_text(command, "--seqlen", o->seqlen, "N", "Of a model: tokens; with --decode, keys in the cache")
      ->capture_default_str();
  add_text(command, "--batch", o->batch, "N", "Of a model: sequences")->capture_default_str();
  add_text(command, "--dtype", o->dtype, "NAME", "Of a model: f32, f16, bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "f16", "bf16"}));
  add_text(command, "--pass", o->pass, "NAME", "Of a model: fwd (inference) or bwd (training)")
      ->capture_default_str()
      ->check(CLI::IsMember({"fwd", "bwd"}));
  add_text(command, "--device", o->device, "NAME", "Of a model: cuda or cpu")
      ->capture_default_str()
      ->check(CLI::IsMember({"cuda", "cpu"}));
  command->add_flag("--decode", o->decode, "Of a model: one query a sequence against a KV cache");
  add_text(command, "--extra", o->extra, "TEXT",
           "More settings for every problem, as in \"dropout=0.1 deterministic\"");
  command->add_option("--sweep", o->sweeps, "KEY=FIRST..LAST, doubling, or KEY=A,B,C; keys of a problem, and dtype")
      ->type_name("SWEEP");
  add_text(command, "--layers", o->layers, "N", "Layers, or all of a model's")->capture_default_str();
  command->add_flag("--checkpointing", o->checkpointing, "Layers keep their input alone and run forward twice");
  add_text(command, "--tensor-parallel", o->tensor_parallel, "N", "Devices that share the heads")
      ->capture_default_str();
  add_text(command, "--context-parallel", o->context_parallel, "N", "Devices that share the rows of q, k and v")
      ->capture_default_str();
  add_text(command, "--budget", o->budget, "SIZE", "Find the largest that fits, as in 24GiB or 80GB");
  add_text(command, "--solve", o->solve, "KEY", "What to enlarge: sq, b or hq")
      ->capture_default_str()
      ->check(CLI::IsMember({"sq", "b", "hq"}));
  add_text(command, "--gpu", o->gpu, "NAME", "With --explain: what bounds the time on a GPU of --models");
  add_text(command, "--format", o->format, "NAME", "text, json, csv or markdown")
      ->capture_default_str()
      ->check(CLI::IsMember({"text", "json", "csv", "markdown"}));
  add_text(command, "--svg", o->svg, "FILE", "Draw peak memory over the sequence length");
  command->add_flag("--explain", o->explain, "Show the formulas with the numbers in them, tiles, traffic and FLOPs");
  command->add_flag("--verify", o->verify, "Run it, on this CPU or for problems with cuda on GPU 0, and compare; exit status 1 beyond 1 % and 2 MiB");
  add_text(command, "--threads", o->threads, "N",
           "Threads (default: the library's); the CPU's workspace grows with them");
  command->callback([o, exit_status] { run(*o, exit_status); });
}

}  // namespace tilewise::cli
