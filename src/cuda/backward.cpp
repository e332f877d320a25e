#include "cuda/backward.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/config_sm80.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/forward.h"
#include "cuda/launch.h"

namespace tilewise::cuda {
namespace {

struct BackwardKernels {  // what one line of kernels.def compiles
  Element element;
  int head_dim;
  using Launch = int (*)(const BackwardParams&, int64_t, void*);
  Launch launch[4][3];  // by BackwardKind and Shape
  Launch launch_again;  // general, behind params.again
  BackwardConfig config[4][3];
};

template <Element kElement, int kHeadDim, BackwardKind... kKinds>
constexpr BackwardKernels make_kernels() {
  return {kElement,
          kHeadDim,
          {{launch_backward<kElement, kKinds, kHeadDim, false>, launch_backward<kElement, kKinds, kHeadDim, true>,
            launch_backward_roomy<kElement, kKinds, kHeadDim>}...},
          launch_backward_again<kElement, kHeadDim>,
          {{backward_config(kElement, kKinds, kHeadDim, false), backward_config(kElement, kKinds, kHeadDim, true),
            roomy_config(kElement, kKinds, kHeadDim)}...}};
}

constexpr BackwardKernels kBackwardKernels[] = {
#define TW_BACKWARD_SM80(E, D) \
  make_kernels<Element::E, D, BackwardKind::kPlain, BackwardKind::kDropout, BackwardKind::kGeneral, BackwardKind::kOrdered>(),
#include "cuda/kernels.def"
};

const BackwardKernels* find_kernels(const tw_problem& p) {
  const Element element = element_of(p.dtype);
  for (const BackwardKernels& kernels : kBackwardKernels)
    if (kernels.element == element && kernels.head_dim >= std::max(p.head_dim, p.head_dim_v)) return &kernels;
  return nullptr;
}

int shape_for(const BackwardKernels& kernels, BackwardKind kind, const Target& target) {
  const BackwardConfig(&shapes)[3] = kernels.config[static_cast<int>(kind)];
  return static_cast<int>(shape_for(shapes[0], shapes[1], shapes[2], device_facts(target.device_index).shared_bytes_per_block));
}

const BackwardConfig& config_for(const BackwardKernels& kernels, BackwardKind kind, const Target& target) {
  return kernels.config[static_cast<int>(kind)][shape_for(kernels, kind, target)];
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tensors that are not aligned take the general kernel.
BackwardKind kind_for(const tw_problem& p) {
  const BackwardKind kind = backward_kind(p);
  return kind == BackwardKind::kPlain && p.deterministic ? BackwardKind::kOrdered : kind;
}

int64_t bias_size(const tw_problem& p) {
  return (p.bias_dims & TW_DIM_B ? p.batch : 1) * (p.bias_dims & TW_DIM_H ? p.num_heads_q : 1) *
         (p.bias_dims & TW_DIM_Q ? p.seqlen_q : 1) * (p.bias_dims & TW_DIM_K ? p.seqlen_k : 1);
}

int64_t dbias_sum_bytes(const tw_problem& p) { return ceil_div(bias_size(p) * 8, 64) * 64; }

// The workspace, cut into arrays of 64-byte multiples.
struct Workspace {
  int64_t lse_log2, delta, dq_sum, ticket, turn, dalibi_parts, dbias, total;

  Workspace(const tw_problem& p, const BackwardConfig& config) {
    const int64_t key_blocks = std::max<int64_t>(ceil_div(p.seqlen_k, config.block_n()), 1);  // one without keys writes its zero, too
    const int64_t rows = p.num_heads_q * backward_padded_rows(p);
    total = 0;
    const auto take = [&](bool needed, int64_t elements) {
      const int64_t at = total;
      if (needed) total += ceil_div(elements * 4, 64) * 64;
      return at;
    };
    lse_log2 = take(true, rows);
    delta = take(true, rows);
    dq_sum = take(has(p, TW_HAS_DQ), rows * config.head_dim);
    ticket = take(p.deterministic, 2);
    turn = take(p.deterministic, p.num_heads_q * p.batch * ceil_div(p.seqlen_q, config.turn_rows()));
    dalibi_parts = take(has(p, TW_HAS_DALIBI), p.batch * p.num_heads_q * key_blocks);
    dbias = take(has(p, TW_HAS_DBIAS), dbias_bytes(p) / 4);
  }
};

}  // namespace

int64_t backward_padded_rows(const tw_problem& p) {
  return p.q_layout == TW_PACKED ? (p.total_q / kRowPadding + p.batch + 1) * kRowPadding
                                 : p.batch * ceil_div(p.seqlen_q, kRowPadding) * kRowPadding;
}

BackwardKind backward_kind(const tw_problem& p) {  // the sink is in lse already
  if (p.softcap != 0 || (p.features & (TW_HAS_BIAS | TW_HAS_ALIBI)) != 0) return BackwardKind::kGeneral;
  return p.dropout_p > 0 ? BackwardKind::kDropout : BackwardKind::kPlain;
}

BackwardParams backward_params(const tw_problem& p, const tw_tensors& t) {
  const bool float32 = p.dtype == TW_FLOAT32;
  BackwardParams params = {};
  params.sequence = sequence_params(p, t);
  params.score = score_params(p, t);
  params.q = row_tensor(*t.q);
  params.k = row_tensor(*t.k);
  params.v = row_tensor(*t.v);
  params.o = row_tensor(*t.o);
  params.dout = row_tensor(*t.dout);
  if (t.dq) params.dq = row_tensor(*t.dq), params.dq_is_float = t.dq->dtype == TW_FLOAT32 && !float32;
  params.dq_aligned = t.dq && !params.dq_is_float && rows_aligned(*t.dq);
  if (t.dk) params.dk = row_tensor(*t.dk), params.dk_is_float = t.dk->dtype == TW_FLOAT32 && !float32;
  if (t.dv) params.dv = row_tensor(*t.dv), params.dv_is_float = t.dv->dtype == TW_FLOAT32 && !float32;
  params.o_is_float = t.o->dtype == TW_FLOAT32 && !float32;
  params.aligned = rows_aligned(*t.q) && rows_aligned(*t.k) && rows_aligned(*t.v) && rows_aligned(*t.dout);
  params.o_aligned = !params.o_is_float && rows_aligned(*t.o);
  params.head_dim = static_cast<int32_t>(p.head_dim);
  params.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  params.lse = row_scalar(t.lse);
  params.dlse = row_scalar(t.dlse);
  params.padded_rows = backward_padded_rows(p);
  params.delta_scale = 1;
  params.gradient_scale = params.score.scale;
  return params;
}

int64_t dbias_bytes(const tw_problem& p) { return dbias_sum_bytes(p) + (ceil_div(bias_size(p), 32) + 3) * 4; }

Status begin_dbias(BackwardParams* params, const tw_problem& p, const tw_tensors& t, void* memory, bool stored, void* stream) {
  const tw_tensor& bias = *t.dbias;
  DbiasSum& sum = params->dbias;
  sum.sum = static_cast<int64_t*>(memory);
  sum.not_finite = reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + dbias_sum_bytes(p));
  sum.largest = sum.not_finite + ceil_div(bias_size(p), 32);
  const int64_t sizes[4] = {bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]};
  sum.key = sizes[3] == 1 ? 0 : 1;
  sum.row = sizes[2] == 1 ? 0 : sizes[3];
  sum.head = sizes[1] == 1 ? 0 : sizes[2] * sizes[3];
  sum.batch = sizes[0] == 1 ? 0 : sizes[1] * sizes[2] * sizes[3];
  // Rows of queries that add to one element; over the keys of a row P sums to 1, so a row is one term.
  const double bias_rows = static_cast<double>(bias_size(p)) / static_cast<double>(p.bias_dims & TW_DIM_K ? std::max<int64_t>(p.seqlen_k, 1) : 1);
  const double rows = static_cast<double>(p.batch) * p.num_heads_q * p.seqlen_q;
  sum.log2_terms = bias_rows > 0 ? std::ilogb(std::max(1.0, rows / bias_rows)) + 1 : 0;
  sum.dropout_scale = params->score.dropout.scale;
  const int error = stored ? launch_fill(reinterpret_cast<float*>(sum.largest), 1, 3, 0, 1, 0.f, stream)
                           : launch_fill(static_cast<float*>(memory), 1, dbias_bytes(p) / 4, 0, 1, 0.f, stream);
  if (error != 0) return device_error("dbias", error);
  return Status();
}

Status finish_option_gradients(const BackwardParams& params, const tw_tensors& t, bool dbias_stored, void* stream) {
  if (t.dalibi) {
    const tw_tensor& x = *t.dalibi;
    if (const int error = launch_dalibi(params, static_cast<float*>(x.data), x.ndim == 1 ? 0 : x.stride[0],
                                        x.stride[x.ndim - 1], x.ndim == 1, stream);
        error != 0)
      return device_error("dalibi", error);
  }
  if (t.dbias)
    if (const int error = launch_dbias(params, t.dbias->data, t.dbias->dtype, t.dbias->shape, t.dbias->stride, dbias_stored, stream); error != 0)
      return device_error("dbias", error);
  return Status();
}

std::string refuse_backward_sm80(const tw_problem& p) {
  if (std::string reason = refuse_limits(p); !reason.empty()) return reason;
  if (p.k_layout == TW_PAGED) return "paged keys: no backward pass";
  if (has(p, TW_HAS_LEFTPAD_K) || has(p, TW_HAS_CACHE_BATCH_IDX)) return "leftpad_k and cache_batch_idx: no backward pass";
  if (find_kernels(p) == nullptr) return concat("no kernel for head dims ", p.head_dim, ", ", p.head_dim_v, " was built");
  return "";
}

Status plan_backward_sm80(const tw_problem& p, const Target& target, Plan* plan) {
  const BackwardKernels& kernels = *find_kernels(p);
  const BackwardKind kind = kind_for(p);
  const BackwardConfig& config = config_for(kernels, kind, target);
  const int limit = device_facts(target.device_index).shared_bytes_per_block;
  if (limit != 0 && config.shared_bytes() > limit)
    return unsupported("backward_sm80: ", dtype_name(p.dtype), " with head dims ", p.head_dim, ", ", p.head_dim_v, " needs ",
                       config.shared_bytes(), " bytes of shared memory a block, this GPU has ", limit);
  constexpr const char* kKindNames[] = {"plain", "dropout", "general", "plain"};
  plan->config = concat(kKindNames[static_cast<int>(kind)], ", tile ", config.block_m, "x", config.block_n(),
                        "x", config.head_dim, ", ", config.num_warps, " warps, ", config.shared_bytes(), " bytes shared",
                        p.deterministic ? ", ordered sums" : "", p.sm_margin > 0 ? ", sm_margin not used" : "");
  plan->block_m = config.block_m;
  plan->block_n = config.block_n();
  plan->num_splits = 1;
  const int64_t key_blocks = ceil_div(p.seqlen_k, config.block_n());
  plan->num_tasks = key_blocks * p.num_heads_k * (p.batch + (p.k_layout == TW_PACKED));
  if (plan->num_tasks > 0x7fffffff) return unsupported("backward_sm80: ", plan->num_tasks, " blocks, at most 2^31 - 1");
  // Unaligned tensors run on the general kernel: room for either.
  int64_t bytes = 0;
  for (const BackwardKind either : {kind, BackwardKind::kGeneral})
    bytes = std::max(bytes, Workspace(p, config_for(kernels, either, target)).total);
  plan->workspace_bytes = bytes;
  return Status();
}

Status check_dout(const tw_problem& p, const tw_tensors& t) {
  if (t.dout->dtype == p.dtype) return Status();
  return unsupported("dout: is ", dtype_name(t.dout->dtype), ", and on CUDA the backward pass of ", dtype_name(p.dtype),
                     " takes it as ", dtype_name(p.dtype), "; float32 o and dout are for the CPU");
}

Status run_backward_again(const BackwardParams& before, const Plan& plan, void* stream) {
  const Element element = element_of(plan.problem.dtype);
  for (const BackwardKernels& kernels : kBackwardKernels) {
    if (kernels.element != element || kernels.head_dim != before.head_dim_rounded) continue;
    const BackwardConfig& config = kernels.config[static_cast<int>(BackwardKind::kGeneral)][0];
    BackwardParams params = before;
    params.num_key_blocks = static_cast<int32_t>(ceil_div(plan.problem.seqlen_k, config.block_n()));
    params.num_query_blocks = static_cast<int32_t>(ceil_div(plan.problem.seqlen_q, config.block_m));
    params.block_m = config.block_m;
    params.turns_per_block = 1;
    params.section = 1;
    params.first_stores = false;
    const int64_t tasks = plan.problem.num_heads_k * (plan.problem.batch + (plan.problem.k_layout == TW_PACKED)) * params.num_key_blocks;
    const int64_t few = device_facts(plan.target.device_index).multiprocessors;
    if (const int error = kernels.launch_again(params, std::min(tasks, few), stream); error != 0)
      return device_error("backward_sm80", error);
    return Status();
  }
  return unsupported("backward_sm80: no kernel for head dim ", before.head_dim_rounded, " was built");
}

Status run_backward_sm80(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  TW_RETURN_IF_ERROR(check_dout(p, t));
  const BackwardKernels& kernels = *find_kernels(p);
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());

  BackwardParams params = backward_params(p, t);
  params.head_dim_rounded = kernels.head_dim;
  params.deterministic = p.deterministic != 0 && t.dq != nullptr && p.seqlen_q > 0 && query_rows(p) > 0;
  BackwardKind kind = params.aligned ? kind_for(p) : BackwardKind::kGeneral;
  if (kind == BackwardKind::kOrdered && !params.deterministic) kind = BackwardKind::kPlain;
  if (kind == BackwardKind::kDropout) {
    params.delta_scale /= params.score.dropout.scale;
    params.gradient_scale *= params.score.dropout.scale;
  }
  const int shape = shape_for(kernels, kind, plan.target);
  const BackwardConfig& config = kernels.config[static_cast<int>(kind)][shape];
  const int64_t key_blocks = ceil_div(p.seqlen_k, config.block_n());
  const Workspace layout(p, config);
  auto* base = static_cast<char*>(workspace);
  const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(base + at); };
  params.lse_log2 = floats(layout.lse_log2);
  params.delta = floats(layout.delta);
  if (t.dq) params.dq_sum = floats(layout.dq_sum);
  params.num_key_blocks = static_cast<int32_t>(std::max<int64_t>(key_blocks, 1));
  params.num_query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, config.turn_rows()));
  const double bytes = static_cast<double>(kernels.head_dim) * dtype_size(p.dtype) * 2 *
                       (static_cast<double>(p.seqlen_k) + 2.0 * static_cast<double>(p.seqlen_q) * std::max<int64_t>(group_size(p), 1));
  // As many heads as fit the second-level cache, where their sums of dQ are.
  const int64_t key_heads = p.num_heads_k * (p.batch + (p.k_layout == TW_PACKED));
  params.section = params.score.window_right >= 0 ? heads_together(key_heads, 32e6 / std::max(bytes, 1.0)) : 1;
  if (params.deterministic) {
    // Heads take turns, with twice as many blocks as are under way on an H200 (whatever GPU it is: `descending` changes the order of the
    // sums, which must not hang on it). Of a head all at once, with fewer, the last wait for all before them; with more, what blocks of a
    // head read one after the other is no longer in the cache.
    const int64_t under_way = kernels.head_dim <= 64 ? 264 : 132;
    params.section = static_cast<int32_t>(std::max<int64_t>(2 * under_way / params.num_key_blocks, 2));
    if (config.knows_order() && params.score.window_right >= 0 && !p.batch_invariant)  // which heads are the last is the batch's doing
      params.descending = static_cast<int32_t>(std::min<int64_t>(params.section, key_heads / 2));
    params.ticket = reinterpret_cast<int32_t*>(base + layout.ticket);
    params.turn = reinterpret_cast<int32_t*>(base + layout.turn);
    params.turns_per_block = 1;
    params.block_m = config.turn_rows();
  }
  if (t.dalibi) params.dalibi_parts = floats(layout.dalibi_parts), params.dalibi_split = 1;
  if (t.dbias) TW_RETURN_IF_ERROR(begin_dbias(&params, p, t, base + layout.dbias, false, stream));
  const Element element = element_of(p.dtype);
  const bool has_queries = query_rows(p) > 0 && p.num_heads_q > 0;
  if (has_queries)
    if (const int error = launch_backward_pre(params, element, false, stream); error != 0)
      return device_error("backward_pre", error);
  if (t.dbias && has_queries)
    if (const int error = launch_largest_value(params, element, stream); error != 0) return device_error("largest value", error);
  const bool has_keys = key_rows(p) > 0 && p.num_heads_k > 0;
  const int64_t blocks = params.num_key_blocks * p.num_heads_k * (p.batch + (p.k_layout == TW_PACKED));
  if (has_keys || (t.dalibi && p.num_heads_q > 0)) {
    if (const int error = kernels.launch[static_cast<int>(kind)][shape](params, blocks, stream); error != 0)
      return device_error("backward_sm80", error);
  }
  if (t.dq && has_queries)
    if (const int error = launch_backward_post(params, element, false, stream); error != 0)
      return device_error("backward_post", error);
  if (t.dsink)
    if (const int error = launch_dsink(params, static_cast<float*>(t.dsink->data), t.dsink->stride[0], false, stream); error != 0)
      return device_error("dsink", error);
  return finish_option_gradients(params, t, false, stream);
}

}  // namespace tilewise::cuda
