// tilewise run: attention over files.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/cli.h"
#include "cli/memory.h"
#include "cli/output_files.h"
#include "cli/run_inputs.h"
#include "harness/gpu.h"

namespace tilewise::cli {
namespace {

using Json = nlohmann::ordered_json;

struct RunOptions {
  std::map<std::string, std::string> files;  // by InputSpec::name
  std::string tensors, out, window, scale, softcap, dropout, seed, offset, dtype, backend = "auto", kernel, threads;
  bool causal = false, deterministic = false, json = false;
};

// What one pass did.
struct Record {
  std::string problem;
  tw_plan_info info;
  double seconds;
  int64_t peak_growth;  // bytes, -1 = unknown
  double score_matrix;  // bytes of one float32 score for each pair of tokens, which standard attention writes out
};

Problem problem_of(const RunOptions& o) {
  constexpr double kMax = std::numeric_limits<double>::max();
  Problem problem;
  problem.causal(o.causal).deterministic(o.deterministic);
  if (!o.window.empty()) {
    const size_t comma = std::min(o.window.find(','), o.window.size());
    const auto side = [&](const std::string& text) {
      return to_number<int64_t>("--window", text, -1, INT64_MAX, "LEFT,RIGHT, each an integer >= -1 (-1 = unbounded)");
    };
    problem.window(side(o.window.substr(0, comma)), side(comma < o.window.size() ? o.window.substr(comma + 1) : ""));
  }
  if (!o.scale.empty()) problem.softmax_scale(to_number<double>("--scale", o.scale, -kMax, kMax, "a finite number"));
  if (!o.softcap.empty())
    problem.softcap(to_number<double>("--softcap", o.softcap, 0, kMax, "a number >= 0 (0 = off)"));
  if (!o.dropout.empty()) {
    const auto counter = [](const char* flag, const std::string& text) {
      return text.empty() ? 0 : to_number<uint64_t>(flag, text, 0, UINT64_MAX, "an integer of 0 to 2^64 - 1");
    };
    problem.dropout(to_number<double>("--dropout", o.dropout, 0, std::nextafter(1.0, 0.0), "a probability in [0, 1)"),
                    counter("--seed", o.seed), counter("--offset", o.offset));
  }
  return problem;
}

// The target of a pass: --kernel holds for the pass that its row is of.
Target target_of(const RunOptions& o, tw_pass pass) {
  Target target = target_named(o.backend, o.kernel, thread_count(o.threads));
  for (const tw_kernel_info& info : kernels())
    if (o.kernel == info.name && info.pass != -1 && info.pass != pass) target.kernel.clear();
  return target;
}

ConstTensorView view(const Arrays& arrays, const char* name) {
  const auto found = arrays.find(name);
  return found == arrays.end() ? ConstTensorView() : ConstTensorView(found->second.tensor());
}

// Outputs of a pass, by name. All bits set, so that every page is resident before the measurement, and an
// element that nobody wrote is NaN.
class Outputs {
 public:
  TensorView add(const char* name, const std::vector<int64_t>& shape, int32_t dtype = TW_FLOAT32) {
    io::Array array = io::make_array(dtype, shape);
    std::memset(array.data, 0xff, array.bytes());
    arrays_.emplace_back(name, array);
    return array.tensor();
  }
  TensorView like(const char* name, const Arrays& inputs, const char* input) {
    const auto found = inputs.find(input);
    return found == inputs.end() ? TensorView() : add(name, found->second.shape);
  }
  const std::vector<std::pair<std::string, io::Array>>& arrays() const { return arrays_; }

 private:
  std::vector<std::pair<std::string, io::Array>> arrays_;
};

// The gradient of o in o's dtype: exact, since only wider types are taken.
io::Array widened(const io::Array& dout, int32_t q_dtype, int32_t o_dtype) {
  if (dout.dtype != q_dtype && dout.dtype != o_dtype)
    throw UsageError("--do: dtype " + dtype_text(dout.dtype) + ": must be " + dtype_text(q_dtype) + " like q, or " +
                     dtype_text(o_dtype));
  io::Array wide;
  if (const Status status = io::convert(dout, o_dtype, &wide); !status.ok())
    throw UsageError("--do: " + status.message());
  return wide;
}

io::Array as_float32(const io::Array& array) {
  io::Array narrow;
  if (const Status status = io::convert(array, TW_FLOAT32, &narrow); !status.ok()) throw Failure(status.message());
  return narrow;
}

// Does the pass run on the GPU, by --backend or by --kernel?
bool on_gpu(const RunOptions& o, tw_pass pass) {
  const Target target = target_of(o, pass);
  bool gpu = target.backend == TW_BACKEND_CUDA;
  for (const tw_kernel_info& info : kernels())
    if (!target.kernel.empty() && target.kernel == info.name) gpu = info.backend == TW_BACKEND_CUDA;
  if (const std::string missing = gpu ? harness::gpu_missing() : ""; !missing.empty())
    throw UsageError((target.kernel.empty() ? "--backend: \"cuda\": " : "--kernel: \"" + target.kernel + "\": ") + missing);
  return gpu;
}

// On copies there; timed by the GPU after a first run, which loads the kernel.
Record execute_on_gpu(const Plan& plan, const Tensors& tensors, Record record) {
  const tw_tensors host = tensors.c();
  const harness::GpuTensors there(host);
  const harness::GpuWorkspace workspace(static_cast<size_t>(record.info.workspace_bytes));
  for (int n = 0; n < 2; ++n) detail::require(harness::run_on_gpu(plan.c(), there.on_gpu(host), workspace, 1, &record.seconds));
  there.download();
  record.peak_growth = -1;
  return record;
}

Record execute(const Plan& plan, const Problem& problem, const Tensors& tensors) {
  const tw_problem& p = problem.c();
  const double pairs = static_cast<double>(p.batch * p.num_heads_q) * static_cast<double>(p.seqlen_q) * static_cast<double>(p.seqlen_k);
  Record record{problem.text(), plan.info(), 0, 0, 4 * pairs};
  if (p.device == TW_CUDA) return execute_on_gpu(plan, tensors, record);
  const PeakMemory peak;
  const auto begin = std::chrono::steady_clock::now();
  plan.run(tensors, plan.make_workspace());
  record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  record.peak_growth = peak.growth();
  return record;
}

double gflops(const Record& r) { return r.seconds > 0 ? r.info.flops / r.seconds * 1e-9 : 0; }

void report(const std::vector<Record>& records, const std::vector<std::string>& paths, bool as_json) {
  if (as_json) {
    Json json = {{"version", version()}, {"passes", Json::array()}, {"outputs", paths}};
    for (const Record& r : records)
      json["passes"].push_back({{"problem", r.problem},
                                {"kernel", r.info.kernel},
                                {"config", r.info.config},
                                {"seconds", r.seconds},
                                {"gflops", gflops(r)},
                                {"workspace_bytes", r.info.workspace_bytes},
                                {"peak_growth_bytes", r.peak_growth < 0 ? Json() : Json(r.peak_growth)},
                                {"standard_bytes", r.info.standard_bytes}});
    return print(json.dump(2) + "\n");
  }
  std::string text;
  for (const Record& r : records) {
    text += fmt::format("problem  {}\nkernel   {}{}{}\n", r.problem, r.info.kernel, r.info.config[0] ? ": " : "",
                        r.info.config);
    text += fmt::format("time     {} ({:.1f} GFLOP/s), {}\n", seconds_text(r.seconds), gflops(r),
                        r.info.backend == TW_BACKEND_CUDA ? "the second run on the GPU, copies not counted" : "one cold run");
    text += fmt::format("memory   {} workspace; {} measured above inputs and outputs; standard attention: {}, each score matrix {}\n",
                        bytes_text(static_cast<double>(r.info.workspace_bytes)),
                        r.peak_growth < 0 ? "not" : bytes_text(static_cast<double>(r.peak_growth)),
                        bytes_text(static_cast<double>(r.info.standard_bytes)), bytes_text(r.score_matrix));
  }
  text += "wrote   ";
  for (const std::string& path : paths) text += " " + path;
  print(text + "\n");
}

void run(const RunOptions& options) {
  Problem problem = problem_of(options);
  const Arrays inputs = load_inputs(options.files, options.tensors, options.dtype);
  const bool with_backward = inputs.contains("do");
  for (const tw_kernel_info& info : kernels())
    if (options.kernel == info.name && info.pass == TW_BACKWARD && !with_backward)
      throw UsageError("--kernel: \"" + options.kernel + "\" is a backward kernel: needs --do");

  Tensors tensors;
  tensors.q = view(inputs, "q"), tensors.k = view(inputs, "k"), tensors.v = view(inputs, "v");
  tensors.bias = view(inputs, "bias"), tensors.alibi_slopes = view(inputs, "alibi"),
  tensors.sink = view(inputs, "sink");
  tensors.cu_seqlens_q = view(inputs, "cu_seqlens_q"), tensors.cu_seqlens_k = view(inputs, "cu_seqlens_k");
  tensors.seqused_q = view(inputs, "seqused_q"), tensors.seqused_k = view(inputs, "seqused_k");
  tensors.page_table = view(inputs, "page_table");

  // o and lse take their shapes from q and v; the library's checks see to the rest. o is float32, so that nothing is
  // rounded twice, or float64 with float64 inputs; the library wants its gradient in the same dtype.
  Outputs outputs;
  const std::vector<int64_t>& q_shape = inputs.at("q").shape;
  std::vector<int64_t> o_shape = q_shape;
  o_shape.back() = inputs.at("v").shape.back();
  int64_t o_bytes = 0;
  if (q_shape.back() == 0 || !io::checked_bytes(o_shape, 4, &o_bytes))
    throw UsageError("--q: shape " + io::shape_text(q_shape) + ": must have a head dimension of 1 to 256");
  const int32_t o_dtype = inputs.at("q").dtype == TW_FLOAT64 ? TW_FLOAT64 : TW_FLOAT32;
  tensors.o = outputs.add("o", o_shape, o_dtype);
  tensors.lse = outputs.add("lse", q_shape.size() == 4   ? std::vector{q_shape[0], q_shape[2], q_shape[1]}
                                   : q_shape.size() == 3 ? std::vector{q_shape[1], q_shape[0]}
                                                         : q_shape);
  Problem forward_problem = describe(problem, tensors);
  if (on_gpu(options, TW_FORWARD)) forward_problem.c().device = TW_CUDA;
  const Plan forward_plan(forward_problem, target_of(options, TW_FORWARD));

  Tensors gradients = tensors;
  Problem backward_problem;
  std::optional<Plan> backward_plan;
  io::Array dout;
  if (with_backward) {
    dout = widened(inputs.at("do"), inputs.at("q").dtype, o_dtype);
    gradients.dout = dout.tensor();
    gradients.dq = outputs.like("dq", inputs, "q");
    gradients.dk = outputs.like("dk", inputs, "k");
    gradients.dv = outputs.like("dv", inputs, "v");
    if (inputs.contains("bias") && is_float(inputs.at("bias").dtype))
      gradients.dbias = outputs.like("dbias", inputs, "bias");
    gradients.dalibi = outputs.like("dalibi", inputs, "alibi");
    gradients.dsink = outputs.like("dsink", inputs, "sink");
    backward_problem = describe(problem.backward(), gradients);
    if (on_gpu(options, TW_BACKWARD)) backward_problem.c().device = TW_CUDA;
    backward_plan.emplace(backward_problem, target_of(options, TW_BACKWARD));
  }

  OutputDirectory directory(options.out);
  std::vector<Record> records{execute(forward_plan, forward_problem, tensors)};
  if (backward_plan) records.push_back(execute(*backward_plan, backward_problem, gradients));
  for (const auto& [name, array] : outputs.arrays()) directory.write_npy(name, as_float32(array));
  directory.commit();
  report(records, directory.paths(), options.json);
}

}  // namespace

void add_run(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = add_command(
      app, "run", "Attention over arrays in files, forward and (with --do) backward",
      "  tilewise run --q q.npy --k k.npy --v v.npy --causal --out result\n"
      "  tilewise run --tensors qkv.safetensors --dtype bf16 --out result --json\n"
      "  tilewise run --q q.npy --k k.npy --v v.npy --do do.npy --window 256,0 --out result\n"
      "  tilewise run --q q.npy --k k.npy --v v.npy --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --out result\n"
      "\nFiles are .npy: float16, float32 or float64 for tensors, int32 or int64 for indices, bool or uint8 for a "
      "mask.\n"
      "float64 runs on the reference. Writes o.npy, lse.npy and, with --do, dq.npy, dk.npy, dv.npy (dbias.npy, "
      "dalibi.npy,\n"
      "dsink.npy where they apply) in float32, complete or not at all.");
  for (const InputSpec& spec : input_specs())
    add_text(command, flag_of(spec), options->files[spec.name], "FILE", spec.description)->group("Tensors");
  add_text(command, "--tensors", options->tensors, "FILE",
           "A .safetensors file that holds q, k, v and, as present, do, bias, alibi, sink, cu_seqlens_q, ...")
      ->group("Tensors");
  add_text(command, "--out", options->out, "DIR", "Directory for the results, made if missing")
      ->required()
      ->group("Tensors");

  command->add_flag("--causal", options->causal, "Row i sees keys up to i + sk - sq")->group("Attention");
  add_text(command, "--window", options->window, "L,R", "Keys seen to the left and right, inclusive; -1 = unbounded")
      ->group("Attention");
  add_text(command, "--scale", options->scale, "X", "Factor of q.k (default 1 / sqrt(d))")->group("Attention");
  add_text(command, "--softcap", options->softcap, "X", "Scores become X * tanh(score / X)")->group("Attention");
  CLI::Option* dropout = add_text(command, "--dropout", options->dropout, "P", "Drop probabilities with probability P")
                             ->group("Attention");
  add_text(command, "--seed", options->seed, "S", "Of the dropout mask (default 0)")
      ->needs(dropout)
      ->group("Attention");
  add_text(command, "--offset", options->offset, "O", "Of the dropout mask (default 0)")
      ->needs(dropout)
      ->group("Attention");

  add_text(command, "--dtype", options->dtype, "TYPE", "Round q, k, v and do to f32, f16 or bf16 first")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->group("Execution");
  add_text(command, "--backend", options->backend, "NAME", "Default: auto")
      ->check(CLI::IsMember({"auto", "cpu", "cuda", "reference"}))
      ->group("Execution");
  add_text(command, "--kernel", options->kernel, "NAME", "One row of `tilewise list`, for the pass that it is of")
      ->group("Execution");
  add_text(command, "--threads", options->threads, "N", "Threads (default: the library's)")->group("Execution");
  command
      ->add_flag("--deterministic", options->deterministic,
                 "Gradients bit-identical from run to run (always so on the CPU)")
      ->group("Execution");
  command->add_flag("--json", options->json, "Report as JSON")->group("Execution");
  command->callback([options] { run(*options); });
}

}  // namespace tilewise::cli
