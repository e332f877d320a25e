// The memory model in words: formulas with the numbers in them, tiles, traffic, and what bounds the time on a GPU.
#include <cmath>
#include <cstdio>

#include "core/dtype.h"
#include "core/memory.h"

namespace tilewise {
namespace {

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  for (; std::fabs(bytes) >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text;
}
std::string bytes_text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string number_text(double value, const char* format) {
  char text[48];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string ledger_text(const Ledger& ledger) {
  std::string text;
  for (const Ledger::Entry& entry : ledger.at_peak()) {
    char line[200];
    std::snprintf(line, sizeof line, "  %-28s %-40s %12s\n", entry.name.c_str(), entry.formula.c_str(),
                  bytes_text(entry.bytes).c_str());
    text += line;
  }
  return text;
}

std::string seconds_text(double seconds) {
  return seconds < 1e-3 ? number_text(seconds * 1e6, "%.3g us")
         : seconds < 1  ? number_text(seconds * 1e3, "%.3g ms")
                        : number_text(seconds, "%.3g s");
}

// The roofline: both times, and which of them bounds by how much.
std::string roofline(const char* name, double flops, double bytes, double rate, const tw_gpu& gpu) {
  const double arithmetic = flops / rate, memory = bytes / gpu.memory_bytes_per_second;
  const bool by_arithmetic = arithmetic >= memory;
  const double factor = by_arithmetic ? arithmetic / memory : memory / arithmetic;
  return concat("  ", name, ": ", number_text(flops / bytes, "%.4g"), " FLOP a byte; arithmetic ",
                seconds_text(arithmetic), ", memory ", seconds_text(memory), ": bound by ",
                by_arithmetic ? "arithmetic" : "bytes", ", by a factor of ", number_text(factor, "%.3g"), "\n");
}

}  // namespace

std::string explain_memory(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                           std::span<const KernelRow> rows, const tw_gpu* gpu) {
  tw_memory_info info{};
  if (Status status = memory_of(problem, options, target, rows, &info); !status.ok()) return status.message() + "\n";
  tw_problem p;
  if (Status status = device_share(problem, options, &p); !status.ok()) return status.message() + "\n";
  const bool training = p.pass == TW_BACKWARD;
  const StandardMemory standard = standard_memory(p, training);
  const tw_problem forward = forward_problem(p);
  const int64_t e = dtype_size(p.dtype), queries = query_rows(p), keys = key_rows(p);

  std::string text = concat("problem ", format(problem), "\n");
  if (options.tensor_parallel > 1 || options.context_parallel > 1)
    text += concat("one device's share ", format(p), "\n");
  text += concat("inputs ", bytes_text(info.inputs), ": q ", e, " x ", queries, " x ", p.num_heads_q, " x ", p.head_dim,
                 ", k and v ", e, " x ", keys, " x ", p.num_heads_k, " x ", p.head_dim + p.head_dim_v, "\n");
  text += concat("\nstandard attention, forward, at its worst ", bytes_text(standard.forward.peak()), ":\n",
                 ledger_text(standard.forward));
  if (training)
    text += concat("standard attention, backward, at its worst ", bytes_text(standard.backward.peak()), ":\n",
                   ledger_text(standard.backward));

  text += "\nTilewise:\n";
  const auto line = [&](const std::string& name, const std::string& formula, int64_t bytes) {
    char out[200];
    std::snprintf(out, sizeof out, "  %-28s %-40s %12s\n", name.c_str(), formula.c_str(), bytes_text(bytes).c_str());
    text += out;
  };
  const int64_t o = queries * p.num_heads_q * p.head_dim_v * e;
  line("o", concat(e, " x ", queries, " x ", p.num_heads_q, " x ", p.head_dim_v), o);
  if (info.tiled.outputs > o) line("lse", concat("4 x ", queries, " x ", p.num_heads_q), info.tiled.outputs - o);
  line("workspace, forward", info.planned ? "of the plan" : "by formula", info.tiled.workspace_forward);
  if (training) {
    line("dout, dq, dk, dv", "as o, q, k, v", info.tiled.gradients);
    line("workspace, backward", info.planned ? "of the plan" : "float32 dq and two numbers a row",
         info.tiled.workspace_backward);
  }
  if (!info.planned)
    text += "  (no such GPU, or no CUDA kernels in this build: the workspace is that of the formula)\n";

  int64_t block_m = 0;
  std::vector<tw_problem> passes = {forward};
  if (training) passes.push_back(p);
  for (const tw_problem& pass : passes) {
    Plan plan;
    if (!make_plan(pass, target, rows, &plan).ok()) continue;
    if (pass.pass == TW_FORWARD) block_m = plan.block_m;
    text += concat("  ", pass.pass == TW_FORWARD ? "forward " : "backward ", plan.row->name, ": ", plan.config, "\n");
  }

  text += concat("\ntraffic to memory: standard ", bytes_text(info.standard_bytes_moved), ", Tilewise ",
                 bytes_text(info.tiled_bytes_moved), " (",
                 number_text(info.standard_bytes_moved / info.tiled_bytes_moved, "%.3g"), "x less)\n");
  const int64_t rows_of_tile = block_m > 0 ? block_m : 128;
  const double blocks = std::ceil(static_cast<double>(p.seqlen_q) / static_cast<double>(rows_of_tile));
  const double full = 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) *
                      static_cast<double>(p.batch * p.num_heads_q) * static_cast<double>(p.seqlen_q) *
                      static_cast<double>(p.seqlen_k);
  const double seen = full > 0 ? std::min(1.0, flops(forward) / full) : 1;
  const double cached =
      static_cast<double>(p.batch * p.num_heads_q * p.seqlen_k * (p.head_dim + p.head_dim_v) * e) * blocks * seen;
  text +=
      concat("traffic from cache to tiles, forward: ", bytes_text(cached), " of k and v, read once for each block of ",
             rows_of_tile, " query rows", block_m > 0 ? "" : " (assumed)", "\n");
  text += concat("FLOPs ", number_text(info.flops, "%.4g"),
                 training ? ": 3.5 x the forward pass (2 products forward, 5 backward)\n" : "\n");
  if (gpu != nullptr) {
    const double rate = e <= 2 ? gpu->tensor_flops : gpu->vector_flops;
    text += concat("\n", gpu->name, " by its data sheet: ", number_text(rate * 1e-12, "%.4g"),
                   e <= 2 ? " TFLOP/s of its tensor cores, " : " TFLOP/s in float32, ",
                   number_text(gpu->memory_bytes_per_second * 1e-9, "%.4g"), " GB/s, turns at ",
                   number_text(rate / gpu->memory_bytes_per_second, "%.3g"), " FLOP a byte\n");
    text += roofline("standard", info.flops, info.standard_bytes_moved, rate, *gpu);
    text += roofline("Tilewise", info.flops, info.tiled_bytes_moved, rate, *gpu);
    if (std::max(info.standard.total, info.tiled.total) > 0) {
      const auto fits = [&](int64_t total) { return total <= gpu->memory_bytes ? " (fits)" : " (does not fit)"; };
      text += concat("  memory in all: standard ", bytes_text(info.standard.total), fits(info.standard.total),
                     ", Tilewise ", bytes_text(info.tiled.total), fits(info.tiled.total), "\n");
    }
  }
  return text;
}

}  // namespace tilewise
