#include "cuda/backward_sm90_backend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/backward.h"
#include "cuda/config_backward_sm90_query.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/forward.h"
#include "cuda/forward_sm90_backend.h"
#include "cuda/launch.h"
#include "cuda/launch_backward_sm90.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda {
namespace {

struct Sm90Kernels {  // what one line of kernels.def compiles
  Element element;
  int head_dim;
  int (*launch)(const BackwardSm90Params&, int, void*);
  int (*launch_options)(const BackwardSm90Params&, int, void*);

  BackwardSm90Config config(const tw_problem& p, BackwardKind kind) const {  // kFirst has that of kAny
    return backward_sm90_config(element, head_dim, kind, p.deterministic && has(p, TW_HAS_DQ) ? DqSums::kOrdered : DqSums::kAny);
  }
  // Without softcap and dropout a bias is copied ahead if the tensor allows it, which only the call knows; else the general kernel runs, whose
  // shape is the same and whose workspace is no larger.
  BackwardSm90Config config(const tw_problem& p) const {
    return config(p, has(p, TW_HAS_BIAS) && p.softcap == 0 && p.dropout_p == 0 ? BackwardKind::kBias : backward_kind(p));
  }
};

constexpr Sm90Kernels kKernels[] = {
#define TW_BACKWARD_SM90(E, D) {Element::E, D, launch_backward_sm90<Element::E, D>, launch_backward_sm90_options<Element::E, D>},
#include "cuda/kernels.def"
};

// What runs again behind these kernels has as many parts of dalibi: see run_backward_again().
#define TW_BACKWARD_SM90(E, D)                                                                                    \
  static_assert(backward_sm90_config(Element::E, D, BackwardKind::kPlain, DqSums::kFirst).turns_per_block() ==    \
                backward_sm90_config(Element::E, D, BackwardKind::kPlain, DqSums::kAny).turns_per_block());       \
  static_assert(conditional_config(Element::E, D).block_n() == backward_sm90_config(Element::E, D, BackwardKind::kGeneral, DqSums::kAny).block_n());
#include "cuda/kernels.def"

const Sm90Kernels* find_kernels(const tw_problem& p) {
  const Element element = p.dtype == TW_FLOAT16 ? Element::kFloat16 : Element::kBfloat16;
  for (const Sm90Kernels& kernels : kKernels)
    if (kernels.element == element && kernels.head_dim >= std::max(p.head_dim, p.head_dim_v)) return &kernels;
  return nullptr;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Is there a pair that does not see each other by window or length, or a row that belongs to nobody?
bool hides_pairs(const tw_problem& p) {
  const Mask mask = mask_of(p);
  return mask.left >= 0 || mask.right >= 0 || p.q_layout == TW_PACKED || p.k_layout == TW_PACKED || has(p, TW_HAS_SEQUSED_Q) ||
         has(p, TW_HAS_SEQUSED_K);
}

// Can a tile hold one?
bool masks(const tw_problem& p) { return hides_pairs(p) || has(p, TW_HAS_BIAS); }

// Does who adds first to a tile of dq store? Always where sums are ordered; else, without options, if few key blocks see a tile.
bool first_stores(const tw_problem& p, const BackwardSm90Config& config) {
  const int64_t blocks = ceil_div(p.seqlen_k, config.block_n()), see = mask_of(p).right >= 0 ? (blocks + 1) / 2 : blocks;
  return has(p, TW_HAS_DQ) && !config.two_passes() && (p.deterministic || (config.plain() && see <= config.few_key_blocks()));
}

struct QueryPass {
  int64_t blocks, tasks;  // of a head, of all; with packed rows one more entry, for those of no sequence
};
QueryPass query_pass(const tw_problem& p, const BackwardSm90Config& config) {
  const int64_t blocks = ceil_div(p.seqlen_q, BackwardQuerySm90Config{config.element, config.head_dim}.block_m());
  return {blocks, blocks * p.num_heads_q * (p.batch + (p.q_layout == TW_PACKED))};
}

// In two passes sums are ordered only where everything is computed again.
bool orders_again(const tw_problem& p, const BackwardSm90Config& config) {
  return config.two_passes() && p.deterministic && has(p, TW_HAS_DQ) && masks(p);
}

int64_t num_dalibi_parts(const tw_problem& p, const BackwardSm90Config& config) {
  return p.batch * p.num_heads_q * ceil_div(p.seqlen_k, config.block_n()) * config.kDalibiParts;
}

// Can dbias be stored, 16 bytes at a time? Each element belongs to one pair, and rows are contiguous.
bool stores_dbias(const tw_problem& p, const tw_tensors& t) {
  if (!has(p, TW_HAS_DBIAS) || p.seqlen_k % 8 != 0 || reinterpret_cast<uintptr_t>(t.dbias->data) % 16 != 0) return false;
  const int64_t shape[4] = {p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k};
  int64_t stride = 1;
  for (int n = 3; n >= 0; stride *= shape[n--])
    if (t.dbias->shape[n] != shape[n] || (shape[n] > 1 && t.dbias->stride[n] != stride)) return false;
  return true;
}

// The workspace, cut into arrays of 128-byte multiples.
struct Workspace {
  int64_t lse_log2, delta, row_columns, dq_sum, ticket, turn, again, done, dalibi_parts, dbias, total;

  Workspace(const tw_problem& p, const BackwardSm90Config& config) {
    const int64_t rows = p.num_heads_q * backward_padded_rows(p);
    total = 0;
    const auto take = [&](bool needed, int64_t bytes) {
      const int64_t at = total;
      if (needed) total += ceil_div(bytes, 128) * 128;
      return at;
    };
    lse_log2 = take(true, rows * 4);
    delta = take(true, rows * 4);
    row_columns = take(config.lse_is_column() || config.copies_bias(), rows * (config.lse_is_column() ? 32 : 4));
    dq_sum = take(has(p, TW_HAS_DQ), rows * config.head_dim * 4);  // in two passes only what computes again, or backward_sm80, needs it
    ticket = take(true, 8);
    // Four a tile also where one would do: what computes again takes turns of 32 rows or more.
    turn = take(first_stores(p, config) || orders_again(p, config), p.num_heads_q * p.batch * ceil_div(p.seqlen_q, config.block_m) * 4 * 4);
    again = take(true, sizeof(RunAgain));
    done = take(has(p, TW_HAS_DQ) && !config.two_passes(), p.num_heads_k * p.batch * 4);
    dalibi_parts = take(has(p, TW_HAS_DALIBI), num_dalibi_parts(p, config) * 4);
    dbias = take(has(p, TW_HAS_DBIAS), dbias_bytes(p));
  }
};

// How many multiprocessors the main kernel leaves to post, which reads and writes memory, and on all of them would wait for it: so
// many that both end together. A row of dq takes one of them as long as all of them take for 3,750 pairs of a query and a key. Not if
// some are to stay free: post would take those, too.
int left_to_post(const Plan& plan, int processors) {
  const tw_problem& p = plan.problem;
  const Mask mask = mask_of(p);
  const int64_t keys = mask.left >= 0 && mask.right >= 0 ? std::min(mask.left + mask.right + 1, p.seqlen_k)
                       : mask.left >= 0 || mask.right >= 0 ? (p.seqlen_k + 1) / 2 : p.seqlen_k;
  const int64_t wanted = std::min<int64_t>((3750 + keys / 2) / keys, 8);
  return plan.num_tasks > processors && p.sm_margin <= 0 && processors >= 4 * wanted ? static_cast<int>(wanted) : 0;
}

std::string describe(const tw_problem& p, const BackwardSm90Config& c) {
  constexpr const char* kKindNames[] = {"", "dropout, ", "general, ", "", "bias, "};
  const std::string tile = concat("tile ", c.block_m, "x", c.block_n(), "x", c.head_dim, c.split ? ", dK and dV apart, " : ", ", c.stages,
                                  " stages, ", c.shared_bytes(), " bytes shared");
  if (!c.two_passes()) return concat(kKindNames[static_cast<int>(c.kind)], tile, p.deterministic ? ", ordered sums" : "");
  const BackwardQuerySm90Config q{c.element, c.head_dim};
  return concat("two passes, dq: tile ", q.block_m(), "x", q.block_n, "x", q.head_dim, ", ", q.shared_bytes(), " bytes shared; dk and dv: ", tile);
}

// How many heads take turns where sums are ordered; 0: one head after the other.
int heads_in_turns(const BackwardParams& p, const BackwardSm90Config& config, int blocks) {
  const bool apart = config.block_n() >= 2 * config.block_m, ends = p.score.window_right >= 0;
  // So many that each block under way has two tiles of its head for itself. Key blocks that are two tiles long are so far apart anyway.
  if (!config.helpers || !apart) return apart && ends ? 0 : std::max(2 * blocks / p.num_query_blocks, 1);
  // With helpers, d 128: four key blocks of a head at a time, or fewer where its rows are few, 1 to 5 % faster than twice as many (two: 5 %
  // slower). Causal two rounds of tickets from 2k on, 1 % faster than none, as the longest key blocks are a section's last.
  if (!ends) return std::max({blocks / 4, 2 * blocks / p.num_query_blocks, 1});
  return p.num_key_blocks < 16 ? 0 : std::max(2 * blocks / p.num_key_blocks, 1);
}

}  // namespace

std::string refuse_backward_sm90(const tw_problem& p) {
  if (std::string reason = refuse_common(p); !reason.empty()) return reason;
  if (std::string reason = refuse_backward_sm80(p); !reason.empty()) return reason;
  if ((p.features & (TW_HAS_DBIAS | TW_HAS_DALIBI)) != 0 && std::max(p.head_dim, p.head_dim_v) > 128)
    return "gradient of bias or alibi_slopes with head dims above 128";
  if (p.softcap != 0 && (p.features & (TW_HAS_DBIAS | TW_HAS_DALIBI)) != 0) return "softcap with the gradient of bias or alibi_slopes";
  if (p.batch == 0 || p.num_heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0) return "no keys or no rows";
  if (std::max(p.total_q, p.total_k) >= int64_t{1} << 31) return "2^31 packed rows or more";
  if (find_kernels(p) == nullptr) return concat("no kernel for head dims ", p.head_dim, ", ", p.head_dim_v, " was built");
  return "";
}

Status plan_backward_sm90(const tw_problem& p, const Target& target, Plan* plan) {
  const int capability = device_facts(target.device_index).capability;
  if (capability != 0 && capability != 90)  // 0: planned where there is no GPU
    return unsupported("backward_sm90: device ", target.device_index, " is not of compute capability 9.0");
  TW_RETURN_IF_ERROR(plan_backward_sm80(p, target, plan));
  const BackwardSm90Config config = find_kernels(p)->config(p);
  plan->config = describe(p, config);
  plan->block_m = config.block_m;
  plan->block_n = config.block_n();
  plan->num_splits = 1;
  plan->num_tasks = ceil_div(p.seqlen_k, config.block_n()) * p.num_heads_k * (p.batch + (p.k_layout == TW_PACKED));
  if (plan->num_tasks >= 0x7fff0000) return unsupported("backward_sm90: ", plan->num_tasks, " key blocks, fewer than ", 0x7fff0000);
  if (const int64_t blocks = config.two_passes() ? query_pass(p, config).tasks : 0; blocks >= 0x7fff0000)
    return unsupported("backward_sm90: ", blocks, " query blocks, fewer than ", 0x7fff0000);
  plan->workspace_bytes = std::max(plan->workspace_bytes, Workspace(p, config).total);  // whichever runs
  return Status();
}

Status run_backward_sm90(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  TW_RETURN_IF_ERROR(check_dout(p, t));
  // Only the pointers tell. The general kernels take anything.
  if (!tensor_map_possible(*t.q) || !tensor_map_possible(*t.k) || !tensor_map_possible(*t.v) || !tensor_map_possible(*t.dout))
    return run_backward_sm80(plan, t, workspace, stream);
  const Sm90Kernels& kernels = *find_kernels(p);
  BackwardSm90Config config = kernels.config(p);
  if (config.copies_bias() && !bias_map_possible(p, *t.bias)) config = kernels.config(p, BackwardKind::kGeneral);
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());

  BackwardSm90Params params = {};
  params.kind = config.kind;
  const auto panels = [&](int64_t columns) { return columns % 64 == 0 ? config.panels() : 1; };
  params.qk_loads = config.panels() / panels(p.head_dim);
  params.v_loads = config.panels() / panels(p.head_dim_v);
  TW_RETURN_IF_ERROR(tensor_map({t.q, p.head_dim, config.block_m, panels(p.head_dim)}, &params.q));
  TW_RETURN_IF_ERROR(tensor_map({t.k, p.head_dim, config.block_n(), panels(p.head_dim)}, &params.k));
  TW_RETURN_IF_ERROR(tensor_map({t.v, p.head_dim_v, config.block_n(), panels(p.head_dim_v)}, &params.v));
  TW_RETURN_IF_ERROR(tensor_map({t.dout, p.head_dim_v, config.block_m, panels(p.head_dim_v)}, &params.dout));
  if (config.copies_bias()) {
    const bool rows_differ = score_params(p, t).bias_row != 0;
    params.bias.bytes = static_cast<int32_t>(dtype_size(t.bias->dtype));
    params.bias.box_rows = rows_differ ? config.bias_box(params.bias.bytes) : 16;
    TW_RETURN_IF_ERROR(bias_map(p, {t.bias, params.bias.box_rows, 16}, &params.bias.map));
    params.bias.part_rows = rows_differ ? 16 * config.bias_slots(params.bias.bytes) : 16;
    params.bias.chunk_bytes = rows_differ ? 256 * params.bias.bytes : 0;
  }
  if (t.dk) params.dk_aligned = t.dk->dtype != TW_FLOAT32 && rows_aligned(*t.dk);
  if (t.dv) params.dv_aligned = t.dv->dtype != TW_FLOAT32 && rows_aligned(*t.dv);

  BackwardParams& backward = params.backward;
  backward = backward_params(p, t);
  backward.head_dim_rounded = config.head_dim;
  // A zero scale gives every visible key the same weight; so does a tiny one, by which lse can be divided.
  constexpr float kTiny = 0x1p-60f;
  const float scale = std::fabs(backward.score.scale) < kTiny ? std::copysign(kTiny, backward.score.scale) : backward.score.scale;
  params.scale_log2 = scale * 1.4426950408889634f;
  backward.inverse_scale = 1.f / scale;

  const Workspace layout(p, config);
  auto* base = static_cast<char*>(workspace);
  backward.lse_log2 = reinterpret_cast<float*>(base + layout.lse_log2);
  backward.delta = reinterpret_cast<float*>(base + layout.delta);
  if (config.lse_is_column() || config.copies_bias()) backward.row_columns = reinterpret_cast<uint8_t*>(base + layout.row_columns);
  backward.columns_are_lse = config.copies_bias();
  if (t.dq) backward.dq_sum = reinterpret_cast<float*>(base + layout.dq_sum);
  backward.num_key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, config.block_n()));
  backward.num_query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, config.block_m));
  backward.deterministic = p.deterministic != 0 && t.dq != nullptr && !config.two_passes();
  backward.block_m = config.block_m;
  backward.ticket = reinterpret_cast<int32_t*>(base + layout.ticket);
  backward.first_stores = t.dq && first_stores(p, config);
  if (backward.first_stores) {
    backward.turn = reinterpret_cast<int32_t*>(base + layout.turn);
    backward.turns_per_block = config.turns_per_block();
  }
  if (masks(p)) backward.again = reinterpret_cast<RunAgain*>(base + layout.again);

  const Element element = element_of(p.dtype);
  params.num_tasks = static_cast<int32_t>(plan.num_tasks);
  const int processors = std::max(1, device_facts(plan.target.device_index).multiprocessors - std::max(p.sm_margin, 0));
  const int beside = t.dq && !config.two_passes() ? left_to_post(plan, processors) : 0;
  const int blocks = static_cast<int>(std::min<int64_t>(plan.num_tasks, processors - beside));
  if (beside > 0) backward.done = reinterpret_cast<int32_t*>(base + layout.done);
  // See find_key_block(). Causal: a round and a half of tickets. Ordered sums: see heads_in_turns().
  if (backward.deterministic)
    params.section = std::min(heads_in_turns(backward, config, blocks), params.num_tasks / backward.num_key_blocks);
  else if (backward.score.window_right >= 0 && backward.score.window_left < 0)
    params.section = static_cast<int32_t>(ceil_div(3 * blocks, 2 * backward.num_key_blocks));
  // Batch entries that share a bias take turns, see find_key_block().
  if (config.copies_bias() && backward.score.bias_batch == 0 && !backward.sequence.packed_k)
    params.section = static_cast<int32_t>(ceil_div(std::max(params.section, 1), p.batch) * p.batch);

  if (config.two_passes()) {
    const QueryPass query = query_pass(p, config);
    params.num_query_tasks = static_cast<int32_t>(query.tasks);
    if (backward.score.window_right >= 0 && backward.score.window_left < 0)
      params.query_section = static_cast<int32_t>(ceil_div(3 * processors, 2 * query.blocks));
    // A key block of several heads' tiles is the longer task: where these are few, dq is to fill the multiprocessors that they leave.
    params.keys_first = p.num_heads_q > p.num_heads_k && plan.num_tasks <= 2 * processors;
    params.passes_overlap = p.sm_margin <= 0;  // or the second would take the multiprocessors that are to stay free
  }

  if (t.dalibi) {
    backward.dalibi_parts = reinterpret_cast<float*>(base + layout.dalibi_parts);
    backward.dalibi_split = static_cast<uint8_t>(config.kDalibiParts);
    if (const int error = launch_fill(backward.dalibi_parts, 1, num_dalibi_parts(p, config), 0, 1, 0.f, stream); error != 0)
      return device_error("dalibi", error);
  }
  const bool dbias_stored = config.copies_bias() && stores_dbias(p, t);
  if (dbias_stored) {
    params.dbias = {t.dbias->data, t.dbias->dtype, static_cast<int32_t>(p.seqlen_k), p.num_heads_q * p.seqlen_q * p.seqlen_k, p.seqlen_q * p.seqlen_k};
    const int64_t bytes = p.batch * params.dbias.batch * (t.dbias->dtype == TW_FLOAT32 ? 4 : 2);
    if (hides_pairs(p))
      if (const int error = launch_fill(static_cast<float*>(t.dbias->data), 1, bytes / 4, 0, 1, 0.f, stream); error != 0)
        return device_error("dbias", error);
  }
  if (t.dbias) TW_RETURN_IF_ERROR(begin_dbias(&backward, p, t, base + layout.dbias, dbias_stored, stream));
  BackwardParams before = backward;
  if (config.two_passes()) before.dq_sum = nullptr;  // no zeros: what computes again writes its own
  if (const int error = launch_backward_pre(before, element, true, stream); error != 0) return device_error("backward_pre", error);
  if (t.dbias)
    if (const int error = launch_largest_value(backward, element, stream); error != 0) return device_error("largest value", error);
  const auto launch = config.plain() ? kernels.launch : kernels.launch_options;
  if (const int error = launch(params, config.two_passes() ? processors : blocks, stream); error != 0) return device_error("backward_sm90", error);
  const auto post = [&](const BackwardParams& x) {
    const int error = t.dq ? launch_backward_post(x, element, true, stream) : 0;
    return error != 0 ? device_error("backward_post", error) : Status();
  };
  if (beside > 0) TW_RETURN_IF_ERROR(post(backward));
  if (orders_again(p, config)) backward.deterministic = true, backward.turn = reinterpret_cast<int32_t*>(base + layout.turn);
  if (masks(p)) TW_RETURN_IF_ERROR(run_backward_again(backward, plan, stream));
  if (config.two_passes() ? masks(p) : beside == 0 || masks(p)) {
    BackwardParams behind = backward;
    behind.done = nullptr, behind.only_again = config.two_passes() || beside > 0;
    TW_RETURN_IF_ERROR(post(behind));
  }
  if (t.dsink)
    if (const int error = launch_dsink(backward, static_cast<float*>(t.dsink->data), t.dsink->stride[0], true, stream); error != 0)
      return device_error("dsink", error);
  return finish_option_gradients(backward, t, dbias_stored, stream);
}

KernelRow backward_sm90_row() {
  return {"backward_sm90", TW_BACKEND_CUDA, TW_BACKWARD, "sm_90a",
          "f16 and bf16, head dims up to 256, every mask and option, dense and packed, deterministic on request",
          forward_sm90_available,
          refuse_backward_sm90, plan_backward_sm90, run_backward_sm90};
}

}  // namespace tilewise::cuda
