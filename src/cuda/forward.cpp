#include "cuda/forward.h"

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/config_sm80.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/launch.h"

namespace tilewise::cuda {
namespace {

struct ForwardKernels {  // what one line of kernels.def compiles
  Element element;
  int head_dim;
  using Launch = int (*)(const ForwardParams&, int64_t, void*);
  Launch launch[4][3];  // by ForwardKind and Shape
  ForwardConfig config[4][3];
};

template <Element kElement, int kHeadDim, ForwardKind... kKinds>
constexpr ForwardKernels make_kernels() {
  return {kElement,
          kHeadDim,
          {{launch_forward<kElement, kKinds, kHeadDim, false>, launch_forward<kElement, kKinds, kHeadDim, true>,
            launch_forward_roomy<kElement, kKinds, kHeadDim>}...},
          {{forward_config(kElement, kKinds, kHeadDim, false), forward_config(kElement, kKinds, kHeadDim, true),
            roomy_config(kElement, kKinds, kHeadDim)}...}};
}

constexpr ForwardKernels kForwardKernels[] = {
#define TW_FORWARD_SM80(E, D) \
  make_kernels<Element::E, D, ForwardKind::kPlain, ForwardKind::kDropout, ForwardKind::kGeneral, ForwardKind::kFewRows>(),
#include "cuda/kernels.def"
};

const ForwardKernels* find_kernels(const tw_problem& p) {
  const Element element = element_of(p.dtype);
  for (const ForwardKernels& kernels : kForwardKernels)
    if (kernels.element == element && kernels.head_dim >= std::max(p.head_dim, p.head_dim_v)) return &kernels;
  return nullptr;
}

int shape_for(const ForwardKernels& kernels, ForwardKind kind, const Target& target) {
  const ForwardConfig(&shapes)[3] = kernels.config[static_cast<int>(kind)];
  return static_cast<int>(shape_for(shapes[0], shapes[1], shapes[2], device_facts(target.device_index).shared_bytes_per_block));
}

const ForwardConfig& config_for(const ForwardKernels& kernels, ForwardKind kind, const Target& target) {
  return kernels.config[static_cast<int>(kind)][shape_for(kernels, kind, target)];
}

constexpr int64_t kMaxLength = int64_t{1} << 30;  // positions are 32-bit inside a sequence, offsets 64-bit everywhere
constexpr int64_t kFewRows = 64;                  // block_m of the few-rows kernels

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What the plain kernel takes; with dropout, the one for it.
bool is_plain(const tw_problem& p) {
  return p.softcap == 0 && p.k_layout != TW_PAGED && softmax_scale_of(p) > 1e-30 &&
         (p.features & (TW_HAS_BIAS | TW_HAS_ALIBI | TW_HAS_SINK | TW_HAS_MAX_LOGIT)) == 0;
}

// How a problem is cut, from the problem alone (and the device's number of multiprocessors).
struct Cut {
  ForwardKind kind;
  int64_t pack, num_blocks, num_splits, tasks;
};

int64_t choose_splits(const tw_problem& p, int64_t wanted, int64_t tasks, int64_t block_n, int multiprocessors) {
  const int64_t key_tiles = ceil_div(p.seqlen_k + p.seqlen_new, block_n);
  if (wanted > 0) return std::min<int64_t>({wanted, int64_t{kMaxSplits}, std::max<int64_t>(key_tiles, 1)});
  // A split count that follows the batch would change a sequence's rounding with its neighbours.
  if (p.batch_invariant || tasks == 0) return 1;
  const int64_t slots = 2 * int64_t{multiprocessors};  // two blocks of 64 rows fit a multiprocessor
  if (tasks * 10 >= slots * 8 || key_tiles <= 4) return 1;
  // At least two tiles a split, so that the merge stays cheap beside the work.
  return std::clamp<int64_t>(slots / tasks, 1, std::min<int64_t>(kMaxSplits, key_tiles / 2));
}

Cut cut_forward(const tw_problem& p, const Target& target) {
  const ForwardKernels& kernels = *find_kernels(p);
  const int64_t group = std::max<int64_t>(group_size(p), 1);
  Cut cut{};
  // With packed rows seqlen_q is the longest of the batch: no ground to choose by, if its neighbours must not matter.
  const bool few = p.seqlen_q <= kFewRows && !(p.batch_invariant && p.q_layout == TW_PACKED);
  cut.kind = few ? ForwardKind::kFewRows : !is_plain(p) ? ForwardKind::kGeneral : p.dropout_p > 0 ? ForwardKind::kDropout : ForwardKind::kPlain;
  // Query heads that share a key head share a tile; dropout's draws belong to 16 rows of one head.
  cut.pack = few && p.dropout_p == 0 ? group : 1;
  const ForwardConfig& config = config_for(kernels, cut.kind, target);
  cut.num_blocks = std::max<int64_t>(ceil_div(p.seqlen_q * cut.pack, config.block_m), 1);
  const int64_t batch = p.batch + (p.q_layout == TW_PACKED);  // one more for the rows of no sequence
  const int64_t tasks = cut.num_blocks * (p.num_heads_q / cut.pack) * batch;
  const DeviceFacts& device = device_facts(target.device_index);
  const int64_t wanted = wanted_splits(p, target);
  const bool may_split = cut.kind == ForwardKind::kFewRows || wanted > 1;
  cut.num_splits = may_split ? choose_splits(p, wanted, tasks, config.block_n, std::max(device.multiprocessors, 1)) : 1;
  if (cut.num_splits > 1 && cut.kind != ForwardKind::kFewRows) {  // splits are an option of the general kernel
    cut.kind = ForwardKind::kGeneral;
    return cut.num_blocks = std::max<int64_t>(ceil_div(p.seqlen_q, config_for(kernels, cut.kind, target).block_m), 1),
           cut.tasks = cut.num_blocks * p.num_heads_q * batch * cut.num_splits, cut;
  }
  cut.tasks = tasks * cut.num_splits;
  return cut;
}

int64_t split_columns(const tw_problem& p) { return ceil_div(p.head_dim_v, 8) * 8; }

int64_t split_rows(const tw_problem& p) { return query_rows(p) * p.num_heads_q; }

int64_t rotated_bytes(const tw_problem& p) {  // the queries after rotation
  return p.rotary_dim > 0 ? ceil_div(query_rows(p) * p.num_heads_q * p.head_dim * dtype_size(p.dtype), 64) * 64 : 0;
}

// Writes the new keys into the cache and the rotated queries into the workspace, which becomes q.
int prepare_cache(const tw_problem& p, const tw_tensors& t, void* rotated, ForwardParams* params, void* stream) {
  AppendParams append = {};
  append.sequence = params->sequence;
  append.k = params->k;
  append.v = params->v;
  if (t.k_new) append.k_new = row_tensor(*t.k_new), append.v_new = row_tensor(*t.v_new);
  append.q = params->q;
  append.head_dim = params->head_dim;
  append.head_dim_v = params->head_dim_v;
  if (p.rotary_dim > 0) {
    const int64_t row = p.num_heads_q * p.head_dim;
    append.q_rotated = {rotated, p.seqlen_q * row, row, p.head_dim};
    append.cosines = t.rotary_cos->data;
    append.sines = t.rotary_sin->data;
    append.cos_position = t.rotary_cos->stride[0];
    append.cos_pair = t.rotary_cos->stride[1];
    append.sin_position = t.rotary_sin->stride[0];
    append.sin_pair = t.rotary_sin->stride[1];
    append.table_is_float = t.rotary_cos->dtype == TW_FLOAT32;
    if (t.rotary_seqlens)
      append.rotary_seqlens = {static_cast<const int32_t*>(t.rotary_seqlens->data), t.rotary_seqlens->stride[0]};
    append.rotary_dim = static_cast<int32_t>(p.rotary_dim);
    append.interleaved = p.rotary_interleaved != 0;
    const Mask mask = mask_of(p);
    append.queries_advance = mask.left >= 0 || mask.right >= 0;
    params->q = append.q_rotated;
    if (p.q_layout == TW_PACKED) params->q.batch = append.q_rotated.batch = 0;
  }
  return launch_append(append, element_of(p.dtype), stream);
}

}  // namespace

int64_t wanted_splits(const tw_problem& p, const Target& target) { return p.num_splits > 0 ? p.num_splits : target.choice.splits; }

std::string refuse_limits(const tw_problem& p) {
  if (p.dtype == TW_FLOAT64) return "dtype f64: takes f16, bf16 and f32";
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "head dims over 256";
  if (p.seqlen_q >= kMaxLength || p.seqlen_k + p.seqlen_new >= kMaxLength) return "sequences of 2^30 rows or more";
  if (p.batch >= kMaxLength || p.num_heads_q >= kMaxLength) return "2^30 batch entries or heads or more";
  if (has(p, TW_HAS_BIAS) && p.bias_dtype == TW_FLOAT64) return "bias in f64";
  return "";
}

std::string refuse_common(const tw_problem& p) {
  if (p.dtype != TW_FLOAT16 && p.dtype != TW_BFLOAT16) return concat("dtype ", dtype_name(p.dtype), ": takes f16 and bf16");
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "head dims must be multiples of 8";
  return refuse_limits(p);
}

std::string refuse_forward_sm80(const tw_problem& p) {
  if (std::string reason = refuse_limits(p); !reason.empty()) return reason;
  const ForwardKernels* kernels = find_kernels(p);
  if (kernels == nullptr) return concat("no kernel for head dims ", p.head_dim, ", ", p.head_dim_v, " was built");
  return "";
}

Status plan_forward_sm80(const tw_problem& p, const Target& target, Plan* plan) {
  const ForwardKernels& kernels = *find_kernels(p);
  const Cut cut = cut_forward(p, target);
  const ForwardConfig& config = config_for(kernels, cut.kind, target);
  constexpr const char* kKindNames[] = {"plain", "dropout", "general", "few rows"};
  plan->config = concat(kKindNames[static_cast<int>(cut.kind)], ", tile ", config.block_m, "x", config.block_n, "x", config.head_dim,
                        ", ", config.num_warps, " warps, ", config.shared_bytes(), " bytes shared",
                        cut.pack > 1 ? concat(", ", cut.pack, " heads a tile") : "", p.sm_margin > 0 ? ", sm_margin not used" : "");
  plan->block_m = config.block_m;
  plan->block_n = config.block_n;
  plan->num_splits = cut.num_splits;
  plan->num_tasks = cut.tasks;
  if (cut.tasks > 0x7fffffff) return unsupported("forward_sm80: ", cut.tasks, " blocks, at most 2^31 - 1");
  plan->workspace_bytes = forward_workspace_bytes(p, cut.num_splits);
  return Status();
}

int64_t forward_workspace_bytes(const tw_problem& p, int64_t num_splits) {
  return rotated_bytes(p) + (num_splits == 1 ? 0 : num_splits * split_rows(p) * (split_columns(p) + 1) * int64_t{4});
}

Status prepare_forward(const tw_problem& p, const tw_tensors& t, int64_t pack, int64_t num_splits, void* workspace, void* stream,
                       ForwardParams* params) {
  params->sequence = sequence_params(p, t);
  params->score = score_params(p, t);
  params->q = row_tensor(*t.q);
  params->k = row_tensor(*t.k);
  params->v = row_tensor(*t.v);
  params->o = row_tensor(*t.o);
  params->o_is_float = t.o->dtype == TW_FLOAT32 && p.dtype != TW_FLOAT32;
  params->aligned = (p.rotary_dim > 0 ? p.head_dim * dtype_size(p.dtype) % 16 == 0 : rows_aligned(*t.q)) && rows_aligned(*t.k) && rows_aligned(*t.v);
  params->o_aligned = !params->o_is_float && rows_aligned(*t.o);
  params->bias_in_tiles = bias_copies(params->score);
  params->head_dim = static_cast<int32_t>(p.head_dim);
  params->head_dim_v = static_cast<int32_t>(p.head_dim_v);
  params->lse = row_scalar(t.lse);
  params->pack = static_cast<int32_t>(pack);
  params->num_splits = static_cast<int32_t>(num_splits);
  if (num_splits > 1) {
    params->split_o = reinterpret_cast<float*>(static_cast<char*>(workspace) + rotated_bytes(p));
    params->split_columns = static_cast<int32_t>(split_columns(p));
    params->split_lse = params->split_o + num_splits * split_rows(p) * split_columns(p);
  }
  if (t.max_logit) {
    params->max_logit = static_cast<float*>(t.max_logit->data);
    params->max_logit_batch = t.max_logit->stride[0];
    params->max_logit_head = t.max_logit->stride[1];
    const int error = launch_fill(params->max_logit, p.batch, p.num_heads_q, params->max_logit_batch, params->max_logit_head,
                                  -__builtin_huge_valf(), stream);
    if (error != 0) return device_error("max_logit", error);
  }
  if (t.dropout_mask) {
    const tw_tensor& mask = *t.dropout_mask;
    const int error = launch_dropout_mask(params->sequence, params->score, static_cast<uint8_t*>(mask.data), mask.shape,
                                          mask.stride, stream);
    if (error != 0) return device_error("dropout_mask", error);
  }
  if (t.k_new || p.rotary_dim > 0)
    if (const int error = prepare_cache(p, t, workspace, params, stream); error != 0) return device_error("append", error);
  return Status();
}

Status run_forward_sm80(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  const ForwardKernels& kernels = *find_kernels(p);
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());

  const Cut cut = cut_forward(p, plan.target);
  ForwardParams params = {};
  TW_RETURN_IF_ERROR(prepare_forward(p, t, cut.pack, cut.num_splits, workspace, stream, &params));
  ForwardKind kind = cut.kind;
  int64_t num_blocks = cut.num_blocks, tasks = cut.tasks;
  if ((kind == ForwardKind::kPlain || kind == ForwardKind::kDropout) && !(params.aligned && params.o_aligned)) {  // only the pointers tell
    kind = ForwardKind::kGeneral;
    const int64_t per_block = tasks / num_blocks;
    num_blocks = std::max<int64_t>(ceil_div(p.seqlen_q, config_for(kernels, kind, plan.target).block_m), 1);
    tasks = per_block * num_blocks;
  }
  params.num_blocks = static_cast<int32_t>(num_blocks);
  // About four blocks for each that a GPU holds at once: the tail is short then, and several blocks of a head still read the same keys at about
  // the same time. float32: a block takes so long that the tail is all that counts.
  const int64_t heads = tasks / num_blocks;
  const double most = p.dtype == TW_FLOAT32 ? static_cast<double>(heads) : 1024.0 / static_cast<double>(num_blocks);
  params.section = params.score.window_right < 0 ? 1 : heads_together(heads, most);
  if (query_rows(p) == 0 || p.num_heads_q == 0) return Status();
  if (const int error = kernels.launch[static_cast<int>(kind)][shape_for(kernels, kind, plan.target)](params, tasks, stream); error != 0)
    return device_error("forward_sm80", error);
  if (cut.num_splits > 1)
    if (const int error = launch_combine(params, element_of(p.dtype), can_start_early(plan.target.device_index), stream); error != 0)
      return device_error("combine", error);
  return Status();
}

}  // namespace tilewise::cuda
