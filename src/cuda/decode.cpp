#include "cuda/decode.h"

#include <algorithm>
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
    if (kernels.config.element == element_of(p.dtype) && kernels.config.head_dim >= std::max(p.head_dim, p.head_dim_v)) return &kernels;
  return nullptr;
}

// Two blocks of 16 rows read the same keys at the same time, the second from L2; with more, a tile of 64 rows reads less.
constexpr int64_t kMaxRows = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a problem is cut, from the problem alone (and the device's multiprocessors).
struct Cut {
  int64_t num_blocks, items, num_splits;  // items: blocks before the keys are split
};

// The longest range of keys that a block walks, as far as the host knows.
int64_t longest_walk(const tw_problem& p) {
  const int64_t keys = p.seqlen_k + p.seqlen_new;
  const Mask mask = mask_of(p);
  if (mask.left < 0 || mask.left >= keys || mask.right < 0 || mask.right >= keys) return keys;
  return std::min(keys, mask.left + mask.right + p.seqlen_q);
}

// The number of splits with the least time by a small model, in nanoseconds. A block's step (its warps' K and V) takes its
// share of the memory's bandwidth, or, if few blocks run, what one block can do. Starting and ending a block, and merging, cost
// about what they were measured to on an H200; half or twice of each gives nearly the same cuts.
int64_t choose_splits(const tw_problem& p, const DecodeConfig& config, int64_t items, const Target& target) {
  constexpr double kBytesPerNs = 4200, kBlockNs = 1500, kMergeNs = 2500, kMergePerSplitNs = 20, kBlockBytesPerNs = 50;
  const int64_t steps = std::max<int64_t>(ceil_div(longest_walk(p), config.block_n()), 1);
  if (p.num_splits > 0) return std::min<int64_t>({p.num_splits, int64_t{kMaxSplits}, steps});
  // A split count that follows the batch would change a sequence's rounding with its neighbours.
  if (p.batch_invariant || items == 0) return 1;
  const DeviceFacts& device = device_facts(target.device_index);
  const int64_t shared = device.shared_bytes_per_block + 1024;  // of a multiprocessor; each block takes 1 KiB more
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(2, shared / (config.shared_bytes() + 1024)));
  const int64_t slots = blocks * std::max(1, device.multiprocessors - std::max(p.sm_margin, 0));
  const double bytes = static_cast<double>(config.block_n() * (p.head_dim + p.head_dim_v) * dtype_size(p.dtype));
  const auto step_ns = [&](int64_t running) { return bytes * std::max(1 / kBlockBytesPerNs, static_cast<double>(running) / kBytesPerNs); };
  int64_t best = 1;
  double least = 0;
  for (int64_t n = 1; n <= std::min<int64_t>(kMaxSplits, steps); ++n) {
    const int64_t share = ceil_div(steps, n), running = items * ceil_div(steps, share);  // splits with keys
    const int64_t waves = running / slots, rest = running % slots;
    double time = n == 1 ? 0 : kMergeNs + kMergePerSplitNs * static_cast<double>(n);
    time += static_cast<double>(waves) * (kBlockNs + static_cast<double>(share) * step_ns(slots));
    if (rest > 0) time += kBlockNs + static_cast<double>(share) * step_ns(rest);
    if (n == 1 || time < least) best = n, least = time;
  }
  return best;
}

Cut cut_decode(const tw_problem& p, const Target& target) {
  Cut cut{};
  const int64_t group = std::max<int64_t>(group_size(p), 1);
  cut.num_blocks = std::max<int64_t>(ceil_div(p.seqlen_q * group, DecodeConfig::kRows), 1);
  const int64_t batch = p.batch + (p.q_layout == TW_PACKED);  // one more for the rows of no sequence
  cut.items = cut.num_blocks * (p.num_heads_q / group) * batch;
  cut.num_splits = choose_splits(p, find_kernels(p)->config, cut.items, target);
  return cut;
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
  const Cut cut = cut_decode(p, target);
  plan->config = concat("tile ", DecodeConfig::kRows, "x", config.block_n(), "x", config.head_dim, ", ", config.num_warps,
                        " warps with keys of their own, ", config.shared_bytes(), " bytes shared, ", std::max<int64_t>(group_size(p), 1),
                        " heads a tile");
  plan->block_m = DecodeConfig::kRows;
  plan->block_n = config.block_n();
  plan->num_splits = cut.num_splits;
  plan->num_tasks = cut.items * cut.num_splits;
  if (plan->num_tasks > 0x7fffffff) return unsupported("decode_sm80: ", plan->num_tasks, " blocks, at most 2^31 - 1");
  plan->workspace_bytes = forward_workspace_bytes(p, cut.num_splits);
  return Status();
}

Status run_decode_sm80(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());
  const Cut cut = cut_decode(p, plan.target);
  ForwardParams params = {};
  TW_RETURN_IF_ERROR(prepare_forward(p, t, std::max<int64_t>(group_size(p), 1), cut.num_splits, workspace, stream, &params));
  params.num_blocks = static_cast<int32_t>(cut.num_blocks);
  const bool early = can_start_early(plan.target.device_index);
  if (const int error = find_kernels(p)->launch(params, cut.items * cut.num_splits, early, stream); error != 0)
    return device_error("decode_sm80", error);
  if (cut.num_splits > 1)
    if (const int error = launch_combine(params, element_of(p.dtype), early, stream); error != 0) return device_error("combine", error);
  return Status();
}

}  // namespace

KernelRow decode_sm80_row() {
  return {"decode_sm80", TW_BACKEND_CUDA, TW_FORWARD, "sm_80",
          "up to 32 query rows per key head (decoding): f16 and bf16, head dims up to 256, every option but bias and dropout, "
          "dense, packed and paged, split keys",
          [] { return any_device_from(80); }, refuse_decode_sm80, plan_decode_sm80, run_decode_sm80};
}

}  // namespace tilewise::cuda
