#include "cuda/forward_sm90_backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/forward.h"
#include "cuda/launch_sm90.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda {
namespace {

struct Sm90Kernels {
  Element element;
  Sm90Shape shape;
  RowSum row_sum;
  ForwardSm90Config config;
  int (*launch)(const ForwardSm90Params&, int, void*);
};

constexpr Sm90Kernels kKernels[] = {
#define TW_ROW(E, S, R)                                                                     \
  {Element::E, Sm90Shape::S, RowSum::R, forward_sm90_config(Element::E, Sm90Shape::S, RowSum::R), \
   launch_forward_sm90<Element::E, Sm90Shape::S, RowSum::R>},
    TW_FORWARD_SM90_ROWS(TW_ROW)
#undef TW_ROW
};

int launch_redo(const ForwardSm90Config& config, const ForwardSm90Params& params, int num_blocks, void* stream) {
  const auto launch = [&]<Element E>() {
    switch (config.head_dim) {
      case 64: return launch_forward_sm90_redo<E, 64>(params, num_blocks, stream);
      case 128: return launch_forward_sm90_redo<E, 128>(params, num_blocks, stream);
      default: return launch_forward_sm90_redo<E, 256>(params, num_blocks, stream);
    }
  };
  return config.element == Element::kFloat16 ? launch.operator()<Element::kFloat16>()
                                             : launch.operator()<Element::kBfloat16>();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_causal(const tw_problem& p) { return mask_of(p).right == 0; }

Sm90Shape choose_shape(const tw_problem& p) {
  const int64_t d = std::max(p.head_dim, p.head_dim_v);
  if (d > 128) return Sm90Shape::kD256;
  if (d > 64) return is_causal(p) && p.seqlen_k <= 2048 ? Sm90Shape::kD128Short : Sm90Shape::kD128;
  if (is_causal(p)) return Sm90Shape::kD64Causal;
  return p.seqlen_k >= 8192 ? Sm90Shape::kD64 : Sm90Shape::kD64Short;
}

const Sm90Kernels& find_kernels(const tw_problem& p) {
  const Element element = p.dtype == TW_FLOAT16 ? Element::kFloat16 : Element::kBfloat16;
  const Sm90Shape shape = choose_shape(p);
  // A float16 P that overflows is seen in time only by a float32 sum.
  const bool ones = element == Element::kBfloat16 && shape != Sm90Shape::kD256 && !has(p, TW_HAS_LSE);
  for (const Sm90Kernels& kernels : kKernels)
    if (kernels.element == element && kernels.shape == shape && (kernels.row_sum == RowSum::kOnesColumn) == ones)
      return kernels;
  return kKernels[0];  // unreachable
}

struct Cut {
  int64_t num_blocks, num_tiles, redo_stride, redo_bytes;
};

constexpr int64_t kCounterBytes = 64;

Cut cut_forward(const tw_problem& p, const ForwardSm90Config& config) {
  Cut cut;
  cut.num_blocks = ceil_div(p.seqlen_q, config.block_m());
  cut.num_tiles = cut.num_blocks * p.batch * p.num_heads_q;
  cut.redo_stride = ceil_div(cut.num_blocks * config.block_m(), 128) * 8;
  cut.redo_bytes = ceil_div(cut.redo_stride * p.batch * p.num_heads_q, 16) * 16;
  return cut;
}

// Heads whose tiles are in flight together under a causal mask. Their K and V should stay in the L2 cache (60 MB), and
// there should be enough tiles of every length to fill the gaps at the end. Measured best: 33 MB from 2k keys on, 16 at
// 1k and 8 at 512, but never under 8 key heads.
int64_t section_heads(const tw_problem& p, const ForwardSm90Config& config) {
  const int64_t keys = std::max<int64_t>(p.seqlen_k, 1);
  const int64_t bytes = std::clamp<int64_t>(keys << 14, int64_t{8} << 20, int64_t{33} << 20);
  const int64_t heads = std::max<int64_t>(8, bytes / (keys * config.head_dim * 4));
  return std::min(heads * group_size(p), p.batch * p.num_heads_q);
}

}  // namespace

bool forward_sm90_available() {
  for (int n = 0; n < device_count(); ++n)
    if (device_facts(n).capability == 90) return true;
  return false;
}

std::string refuse_forward_sm90(const tw_problem& p) {
  if (std::string reason = refuse_common(p); !reason.empty()) return reason;
  if (p.k_layout == TW_PAGED) return "paged keys";
  if (has(p, TW_HAS_CACHE_BATCH_IDX)) return "cache_batch_idx";
  if (has(p, TW_HAS_LEFTPAD_K)) return "leftpad_k";
  if (p.softcap != 0) return "softcap";
  if (p.dropout_p != 0) return "dropout";
  if (has(p, TW_HAS_DROPOUT_MASK)) return "dropout_mask";
  if (has(p, TW_HAS_BIAS)) return "bias";
  if (has(p, TW_HAS_ALIBI)) return "alibi_slopes";
  if (has(p, TW_HAS_SINK)) return "sink";
  if (has(p, TW_HAS_MAX_LOGIT)) return "max_logit";
  const Mask mask = mask_of(p);
  if (mask.right > 0 && mask.right < p.seqlen_q) return "a window to the right: takes causal or none";
  if (p.num_splits > 1) return "num_splits over 1";
  if (p.seqlen_q <= 64) return concat("seqlen_q ", p.seqlen_q, ": 64 rows a warpgroup would be mostly empty");
  if (p.batch == 0 || p.num_heads_q == 0 || p.seqlen_k == 0) return "no keys or no rows";
  if (std::max(p.total_q, p.total_k) >= int64_t{1} << 31) return "2^31 packed rows or more";
  if (softmax_scale_of(p) < 0 && !find_kernels(p).config.q_in_registers) return "a negative softmax_scale with this head_dim";
  const int64_t tiles = cut_forward(p, find_kernels(p).config).num_tiles;
  if (tiles >= 1 << 24) return concat(tiles, " tiles: at most 2^24 - 1");
  return "";
}

Status plan_forward_sm90(const tw_problem& p, const Target& target, Plan* plan) {
  const DeviceFacts& device = device_facts(target.device_index);
  if (device.capability != 90) return unsupported("forward_sm90: device ", target.device_index, " is not of compute capability 9.0");
  const ForwardSm90Config& config = find_kernels(p).config;
  const Cut cut = cut_forward(p, config);
  plan->config = concat("tile ", config.block_m(), "x", config.block_n, "x", config.head_dim, ", ", config.consumers,
                        " consumer warpgroups, ", config.stages, " stages, ", config.shared_bytes(), " bytes shared, sums ",
                        config.ones() ? "by a column of ones" : "in float32");
  plan->block_m = config.block_m();
  plan->block_n = config.block_n;
  plan->num_splits = 1;
  plan->num_tasks = cut.num_tiles;
  plan->workspace_bytes = kCounterBytes + cut.redo_bytes;
  return Status();
}

Status run_forward_sm90(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  // Only the pointers tell. The general kernel takes anything, and needs no workspace for more than 64 rows.
  if (t.o->dtype != t.q->dtype || !tensor_map_possible(*t.q) || !tensor_map_possible(*t.k) || !tensor_map_possible(*t.v) ||
      !tensor_map_possible(*t.o))
    return run_forward_sm80(plan, t, workspace, stream);
  const Sm90Kernels& kernels = find_kernels(p);
  const ForwardSm90Config& config = kernels.config;
  const Cut cut = cut_forward(p, config);
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());

  ForwardSm90Params params = {};
  const bool whole = p.head_dim % 64 == 0 && p.head_dim_v % 64 == 0;
  params.loads_per_tile = whole ? 1 : config.panels();
  const int panels = whole ? config.panels() : 1;
  const int o_panels = whole ? config.o_columns / 64 : 1;
  TW_RETURN_IF_ERROR(tensor_map({t.q, p.head_dim, config.block_m(), panels}, &params.q));
  TW_RETURN_IF_ERROR(tensor_map({t.k, p.head_dim, config.block_n, panels}, &params.k));
  TW_RETURN_IF_ERROR(tensor_map({t.v, p.head_dim_v, config.block_n, panels}, &params.v));
  TW_RETURN_IF_ERROR(tensor_map({t.o, p.head_dim_v, 64, o_panels}, &params.o));

  ForwardParams& forward = params.forward;
  forward.sequence = sequence_params(p, t);
  forward.score = score_params(p, t);
  forward.q = row_tensor(*t.q);
  forward.k = row_tensor(*t.k);
  forward.v = row_tensor(*t.v);
  forward.o = row_tensor(*t.o);
  forward.aligned = forward.o_aligned = true;
  forward.head_dim = static_cast<int32_t>(p.head_dim);
  forward.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  forward.lse = row_scalar(t.lse);
  forward.pack = forward.num_splits = 1;
  forward.num_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, 128));

  const int multiprocessors =
      std::max(1, device_facts(plan.target.device_index).multiprocessors - std::max(p.sm_margin, 0));
  TileOrder& order = params.order;
  order.num_tiles = static_cast<int32_t>(cut.num_tiles);
  order.num_blocks = static_cast<int32_t>(cut.num_blocks);
  order.num_heads = static_cast<int32_t>(p.batch * p.num_heads_q);
  // Tiles of one length need no counter; those of packed sequences and under a mask differ.
  const bool even = !is_causal(p) && p.window_left < 0 && p.q_layout == TW_DENSE && p.k_layout == TW_DENSE &&
                    !has(p, TW_HAS_SEQUSED_K) && !has(p, TW_HAS_SEQUSED_Q);
  if (!even) {
    static std::atomic<uint64_t> launches{0};
    order.counter = static_cast<unsigned long long*>(workspace);
    order.section_heads = static_cast<int32_t>(section_heads(p, config));
    // Numbers spread over 40 bits: the workspace may hold what an earlier launch or another program left there.
    uint64_t number = (launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15ull;
    order.launch = std::max<uint64_t>(1, number >> 24);
  }
  order.lead = 2;  // 1 to 4 are equal from 1k keys on; 9 loses 2 % at 512
  // A zero scale gives every visible key the same weight; the smallest normal number does, too, and -inf stays -inf.
  params.scale_log2 = std::max(std::fabs(forward.score.scale_log2), 0x1p-126f);
  params.sign_flip = forward.score.scale_log2 < 0 ? 0x80008000u : 0;
  params.causal = is_causal(p);
  params.window_left = forward.score.window_left;
  params.check = !even || p.seqlen_k % config.block_n != 0;
  params.always = 1;
  params.redo = static_cast<uint8_t*>(workspace) + kCounterBytes;
  params.redo_stride = static_cast<int32_t>(cut.redo_stride);

  const int blocks = static_cast<int>(std::min<int64_t>(multiprocessors, cut.num_tiles));
  if (const int error = kernels.launch(params, blocks, stream); error != 0) return device_error("forward_sm90", error);
  if (const int error = launch_redo(config, params, multiprocessors, stream); error != 0)
    return device_error("forward_sm90_redo", error);
  return Status();
}

KernelRow forward_sm90_row() {
  return {"forward_sm90", TW_BACKEND_CUDA, TW_FORWARD, "sm_90a",
          "f16 and bf16, head dims up to 256, full and causal, left window, dense and packed", forward_sm90_available,
          refuse_forward_sm90, plan_forward_sm90, run_forward_sm90};
}

}  // namespace tilewise::cuda
