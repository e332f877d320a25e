#include "cuda/decode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/config_decode.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/forward.h"
#include "cuda/launch.h"

namespace tilewise::cuda {
namespace {

struct DecodeKernels {  // what one line of kernels.def compiles
  DecodeConfig config;
  int (*launch)(const ForwardParams&, int64_t, bool, void*);
};

constexpr DecodeKernels kKernels[] = {
#define TW_DECODE_SM80(E, D) {decode_config(Element::E, D), launch_decode<Element::E, D>},
#include "cuda/kernels.def"
};

const DecodeKernels* find_kernels(const tw_problem& p) {
  for (const DecodeKernels& kernels : kKernels)
    if (kernels.config.element == element_of(p.dtype) && kernels.config.head_dim >= std::max(p.head_dim, p.head_dim_v))
      return &kernels;
  return nullptr;
}

// Two blocks of 16 rows read the same keys at the same time, the second from L2; with more, a tile of 64 rows reads less.
constexpr int64_t kMaxRows = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of 16 rows of a key head; and all blocks before the keys are split.
int64_t num_blocks(const tw_problem& p) {
  return std::max<int64_t>(ceil_div(p.seqlen_q * std::max<int64_t>(group_size(p), 1), DecodeConfig::kRows), 1);
}
int64_t num_items(const tw_problem& p) {
  const int64_t batch = p.batch + (p.q_layout == TW_PACKED);  // one more for the rows of no sequence
  return num_blocks(p) * p.num_heads_k * batch;
}

// The longest range of keys that a block walks, as far as the host knows.
int64_t longest_walk(const tw_problem& p) {
  const int64_t keys = p.seqlen_k + p.seqlen_new;
  const Mask mask = mask_of(p);
  if (mask.left < 0 || mask.left >= keys || mask.right < 0 || mask.right >= keys) return keys;
  return std::min(keys, mask.left + mask.right + p.seqlen_q);
}

// The number of splits with the least time by a small model, in nanoseconds, or the smallest within 1.5 % of it. The constants are
// an H200's (docs/kernels/decode_sm80.md).
int64_t choose_splits(const tw_problem& p, const DecodeConfig& config, const Target& target) {
  constexpr double kBytesPerNs = 4550, kLatencyNs = 950, kPagedLatencyNs = 1600;  // of a request
  constexpr double kBlockNs = 1500, kMergeNs = 1500, kMergePerRowNs = 3, kMergePerSplitNs = 10;
  const int64_t steps = std::max<int64_t>(ceil_div(longest_walk(p), config.block_n()), 1);
  if (const int64_t wanted = wanted_splits(p, target); wanted > 0) return std::min<int64_t>({wanted, int64_t{kMaxSplits}, steps});
  // A split count that follows the batch would change a sequence's rounding with its neighbours.
  if (p.batch_invariant) return 1;
  const int64_t items = num_items(p);
  const DeviceFacts& device = device_facts(target.device_index);
  const int64_t shared = device.shared_bytes_per_block + 1024;  // of a multiprocessor; each block takes 1 KiB more
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(2, shared / (config.shared_bytes() + 1024)));
  const int64_t multiprocessors = std::max(1, device.multiprocessors - std::max(p.sm_margin, 0)), slots = blocks * multiprocessors;
  // Blocks that run side by side: what they keep under way over the time of a request, up to the memory's bandwidth; between the
  // two a smooth corner, as requests take longer near the bandwidth.
  const double latency = p.k_layout == TW_PAGED ? kPagedLatencyNs : kLatencyNs;
  const double under_way = static_cast<double>(2 * config.ahead * config.unit_bytes() * config.num_warps);
  const double step_bytes = static_cast<double>(config.block_n() * (p.head_dim + p.head_dim_v) * dtype_size(p.dtype));
  const auto wave_ns = [&](int64_t running, int64_t share) {
    const double asked = static_cast<double>(running) * under_way / latency;
    const auto cube = [](double x) { return x * x * x; };
    double bytes_per_ns = 1 / std::cbrt(1 / cube(asked) + 1 / cube(kBytesPerNs));
    // Two blocks on some multiprocessors and one on others: these end early, and those cannot use all that they leave.
    if (running > multiprocessors) bytes_per_ns *= 1 - (1 - static_cast<double>(running) / static_cast<double>(slots)) / 3;
    return kBlockNs + static_cast<double>(running * share) * step_bytes / bytes_per_ns;
  };
  const double merge_ns = kMergeNs + kMergePerRowNs * static_cast<double>(query_rows(p) * p.num_heads_q);
  const auto time_ns = [&](int64_t n) {
    const int64_t share = ceil_div(steps, n), running = items * ceil_div(steps, share);  // splits with keys
    const int64_t waves = running / slots, rest = running % slots;
    return (n == 1 ? 0 : merge_ns + kMergePerSplitNs * static_cast<double>(n)) +
           (waves == 0 ? 0 : static_cast<double>(waves) * wave_ns(slots, share)) + (rest == 0 ? 0 : wave_ns(rest, share));
  };
  const int64_t most = std::min<int64_t>(kMaxSplits, steps);
  double least = time_ns(1);
  for (int64_t n = 2; n <= most; ++n) least = std::min(least, time_ns(n));
  int64_t n = 1;
  while (time_ns(n) > 1.015 * least) ++n;
  return n;
}

std::string refuse_decode_sm80(const tw_problem& p) {
  if (std::string reason = refuse_common(p); !reason.empty()) return reason;
  const int64_t rows = group_size(p) * p.seqlen_q;
  if (rows > kMaxRows) return concat("seqlen_q * group = ", rows, " query rows per key head, takes at most ", kMaxRows);
  if (p.batch_invariant && p.q_layout == TW_PACKED) return "batch_invariant with packed queries: their longest chooses the row";
  if (has(p, TW_HAS_BIAS)) return "bias";
  if (p.dropout_p != 0) return "dropout";
  if (query_rows(p) == 0 || p.num_heads_q == 0 || p.seqlen_k + p.seqlen_new == 0) return "no keys or no rows";
  if (find_kernels(p) == nullptr) return concat("no kernel for head dims ", p.head_dim, ", ", p.head_dim_v, " was built");
  return "";
}

Status plan_decode_sm80(const tw_problem& p, const Target& target, Plan* plan) {
  const DecodeConfig& config = find_kernels(p)->config;
  plan->config = concat("tile ", DecodeConfig::kRows, "x", config.block_n(), "x", config.head_dim, ", ", config.num_warps,
                        " warps with keys of their own, ", config.shared_bytes(), " bytes shared, ",
                        std::max<int64_t>(group_size(p), 1), " heads a tile");
  plan->block_m = DecodeConfig::kRows;
  plan->block_n = config.block_n();
  plan->num_splits = choose_splits(p, config, target);
  plan->num_tasks = num_items(p) * plan->num_splits;
  if (plan->num_tasks > 0x7fffffff) return unsupported("decode_sm80: ", plan->num_tasks, " blocks, at most 2^31 - 1");
  plan->workspace_bytes = forward_workspace_bytes(p, plan->num_splits);
  return Status();
}

Status run_decode_sm80(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());
  ForwardParams params = {};
  TW_RETURN_IF_ERROR(prepare_forward(p, t, std::max<int64_t>(group_size(p), 1), plan.num_splits, workspace, stream, &params));
  params.num_blocks = static_cast<int32_t>(num_blocks(p));
  const bool early = can_start_early(plan.target.device_index);
  if (const int error = find_kernels(p)->launch(params, plan.num_tasks, early, stream); error != 0)
    return device_error("decode_sm80", error);
  if (plan.num_splits > 1)
    if (const int error = launch_combine(params, element_of(p.dtype), early, stream); error != 0)
      return device_error("combine", error);
  return Status();
}

}  // namespace

KernelRow decode_sm80_row() {
  return {"decode_sm80", TW_BACKEND_CUDA, TW_FORWARD, "sm_80",
          "up to 32 query rows per key head (decoding): f16 and bf16, head dims up to 256, every option but bias and dropout, "
          "dense, packed and paged, split keys",
          [] { return any_device_from(80); }, refuse_decode_sm80, plan_decode_sm80, run_decode_sm80, "splits"};
}

}  // namespace tilewise::cuda
