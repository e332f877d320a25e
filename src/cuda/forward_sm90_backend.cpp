#include "cuda/forward_sm90_backend.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/device.h"
#include "cuda/fill_params.h"
#include "cuda/forward.h"
#include "cuda/launch.h"
#include "cuda/params_sm90.h"
#include "cuda/tensor_map.h"

namespace tilewise::cuda {
namespace {

struct Sm90Kernels {  // what one line of kernels.def compiles
  Element element;
  int head_dim;
  int (*launch)(const ForwardSm90Config&, const ForwardSm90Params&, int, void*);
  int (*launch_bias)(const ForwardSm90Config&, const ForwardSm90Params&, int, void*);
};

constexpr Sm90Kernels kKernels[] = {
#define TW_FORWARD_SM90(E, D) {Element::E, D, launch_forward_sm90<Element::E, D>, launch_forward_sm90_bias<Element::E, D>},
#include "cuda/kernels.def"
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
Element element_of(const tw_problem& p) { return p.dtype == TW_FLOAT16 ? Element::kFloat16 : Element::kBfloat16; }

// Of packed rows, the longest sequence's length is known here: no ground to choose by, if its neighbours must not matter.
bool lengths_decide(const tw_problem& p) { return !(p.batch_invariant && (p.q_layout == TW_PACKED || p.k_layout == TW_PACKED)); }

// Do rows end at different keys?
bool ends_differ(const tw_problem& p) {
  const int64_t right = mask_of(p).right;
  return right >= 0 && (right < p.seqlen_q || !lengths_decide(p));
}

Sm90Shape choose_shape(const tw_problem& p) {
  const int64_t d = std::max(p.head_dim, p.head_dim_v);
  if (d > 128) return Sm90Shape::kD256;
  if (d > 64) {
    const bool masks_much = ends_differ(p) && p.seqlen_q > 128 && p.seqlen_k <= 2048;
    return masks_much && lengths_decide(p) ? Sm90Shape::kD128Short : Sm90Shape::kD128;
  }
  if (ends_differ(p)) return Sm90Shape::kD64Causal;
  return p.seqlen_k >= 8192 && lengths_decide(p) ? Sm90Shape::kD64 : Sm90Shape::kD64Short;
}

// Are sums by a column of ones faster? At d 64 the ones are an eighth of all products: 1 to 2 % at up to 2k keys, -2 % from 4k on.
// In float16, where P's growth must be seen besides, 3 % at 512 keys, 1 % at 1k, -1 % from 4k on.
bool ones_pay(const tw_problem& p) {
  const bool d64 = std::max(p.head_dim, p.head_dim_v) <= 64, f16 = p.dtype == TW_FLOAT16;
  if (!lengths_decide(p)) return !f16;
  return p.seqlen_k < (f16 ? 2048 : d64 ? 4096 : INT64_MAX);
}

ForwardSm90Config choose_default(const tw_problem& p) {
  const int64_t d = std::max(p.head_dim, p.head_dim_v);
  const bool negative = softmax_scale_of(p) < 0;  // the largest logit would be the smallest product
  if (p.softcap != 0 || negative || p.dropout_p != 0 || p.k_layout == TW_PAGED || has(p, TW_HAS_ALIBI) ||
      has(p, TW_HAS_MAX_LOGIT) || has(p, TW_HAS_BIAS)) {
    const Sm90Shape shape = d > 128 ? Sm90Shape::kD256 : d > 64 ? Sm90Shape::kD128Short : Sm90Shape::kD64General;
    return forward_sm90_config(element_of(p), shape, RowSum::kFloat32,
                               has(p, TW_HAS_BIAS) ? ScoreKind::kBias : ScoreKind::kGeneral);
  }
  const ForwardSm90Config ones = forward_sm90_config(element_of(p), choose_shape(p), RowSum::kOnesColumn, ScoreKind::kPlain);
  if (ones.exists() && ones_pay(p) && !has(p, TW_HAS_LSE) && !has(p, TW_HAS_SINK)) return ones;
  return forward_sm90_config(element_of(p), choose_shape(p), RowSum::kFloat32, ScoreKind::kPlain);
}

// The compiled shape with the blocks that a measurement wants, if there is one; it differs from the default in these alone.
// Two shapes of head dim 64 have the same blocks, and the mask tells which of them is meant.
const ForwardSm90Config* find_shape(const tw_problem& p, const Choice& wanted, ForwardSm90Config* found) {
  const ForwardSm90Config usual = choose_default(p);
  const auto fits = [&](const ForwardSm90Config& c) {
    return (wanted.block_m == 0 || wanted.block_m == c.block_m()) && (wanted.block_n == 0 || wanted.block_n == c.block_n);
  };
  *found = usual;
  if (fits(usual)) return found;
  if (usual.general()) return nullptr;
  for (const Sm90Shape shape : {Sm90Shape::kD64, ends_differ(p) ? Sm90Shape::kD64Causal : Sm90Shape::kD64Short, Sm90Shape::kD128, Sm90Shape::kD128Short}) {
    *found = forward_sm90_config(usual.element, shape, usual.row_sum, usual.score);
    if (found->head_dim == usual.head_dim && found->exists() && fits(*found)) return found;
  }
  return nullptr;
}

ForwardSm90Config choose(const tw_problem& p, const Choice& wanted = {}) {
  ForwardSm90Config found;
  return find_shape(p, wanted, &found) ? found : choose_default(p);
}

// The kernel for problems without edges, if this is one and its tiles have one block each.
ForwardSm90Config simplest(const tw_problem& p, const ForwardSm90Config& config, int64_t sharing_blocks) {
  const int64_t left = mask_of(p).left;
  const uint32_t edges = TW_HAS_SEQUSED_Q | TW_HAS_SEQUSED_K | TW_HAS_LEFTPAD_K | TW_HAS_CACHE_BATCH_IDX | TW_HAS_SINK;
  const bool whole = config.score == ScoreKind::kPlain && sharing_blocks == 0 && (p.features & edges) == 0 &&
                     p.q_layout == TW_DENSE && p.k_layout == TW_DENSE && !ends_differ(p) && (left < 0 || left >= p.seqlen_k) &&
                     p.seqlen_q % config.block_m() == 0 && p.seqlen_k % config.block_n == 0;
  const ForwardSm90Config simple = forward_sm90_config(config.element, config.shape, config.row_sum, ScoreKind::kWhole);
  return whole && simple.exists() ? simple : config;
}

const Sm90Kernels* find_kernels(const tw_problem& p) {
  for (const Sm90Kernels& kernels : kKernels)
    if (kernels.element == element_of(p) && kernels.head_dim == choose(p).head_dim) return &kernels;
  return nullptr;
}

// Query heads that share a tile: so many that there are at least 5 % fewer tiles.
int64_t choose_heads(const tw_problem& p, const ForwardSm90Config& config) {
  // Where blocks cannot share tiles, those that are left would have too few blocks.
  if (!config.shares_tiles() || !lengths_decide(p) || p.num_heads_k == 0) return 1;
  const auto tiles = [&](int64_t heads) { return ceil_div(p.seqlen_q, config.block_m() / heads) * (p.num_heads_q / heads); };
  int64_t best = 1;
  for (int64_t heads = 2; group_size(p) % heads == 0 && config.block_m() / heads >= 16; heads *= 2)
    if (20 * tiles(heads) <= 19 * tiles(best)) best = heads;
  return best;
}

// Key tiles of a tile that begins with a row: tile/work_sm90.cuh's key_tiles(), where all sequences have one length and no window
// begins.
int64_t count_key_tiles(const tw_problem& p, const ForwardSm90Config& config, int64_t first_row, int64_t tile_rows) {
  if (!ends_differ(p)) return ceil_div(p.seqlen_k, config.block_n);
  int64_t top = first_row + tile_rows + p.seqlen_k - p.seqlen_q + mask_of(p).right;
  top -= std::max<int64_t>(0, top - p.seqlen_k) / config.block_n * config.block_n;
  return std::max<int64_t>(1, ceil_div(top, config.block_n));
}

struct Cut {
  int64_t tile_heads, tile_rows;
  bool even;
  int64_t num_blocks, num_tiles, again_stride, again_bytes;
  int64_t grid;  // thread blocks
  int64_t whole_tiles, key_tiles, sharing_blocks;  // of TileOrder
  int64_t part_bytes, flag_bytes;                  // 0: nothing is handed over
};

constexpr int64_t kCounterBytes = 64;

Cut cut_forward(const tw_problem& p, const ForwardSm90Config& config, int multiprocessors) {
  Cut cut = {};
  cut.tile_heads = choose_heads(p, config);
  cut.tile_rows = config.block_m() / cut.tile_heads;
  cut.num_blocks = ceil_div(p.seqlen_q, cut.tile_rows);
  cut.num_tiles = cut.num_blocks * p.batch * (p.num_heads_q / cut.tile_heads);
  cut.again_stride = cut.num_blocks * cut.tile_rows / 16;
  // Tiles of one length, almost, need no counter. Those of packed sequences and of many rows under a mask differ.
  const int64_t left = mask_of(p).left;
  cut.key_tiles = count_key_tiles(p, config, (cut.num_blocks - 1) * cut.tile_rows, cut.tile_rows);
  cut.even = (left < 0 || left >= p.seqlen_k) && p.q_layout == TW_DENSE && p.k_layout != TW_PACKED &&
             (p.features & (TW_HAS_SEQUSED_K | TW_HAS_SEQUSED_Q | TW_HAS_LEFTPAD_K)) == 0 &&
             cut.key_tiles - count_key_tiles(p, config, 0, cut.tile_rows) <= 1;
  cut.again_bytes = cut.again_stride * p.batch * p.num_heads_q * 4;
  const int64_t most = std::max<int64_t>(1, multiprocessors - std::max<int64_t>(p.sm_margin, 0));
  cut.grid = std::min(most, cut.num_tiles);
  // With rows that end at different keys, a consumer must not have key tiles to skip.
  if (!cut.even || (ends_differ(p) && config.skips() && cut.tile_rows > 64)) return cut;
  // The tiles of the last round, in which not every block would have one.
  const int64_t rest = cut.num_tiles % most;
  cut.whole_tiles = cut.num_tiles - rest;
  if (rest == 0 || !config.shares_tiles() || p.batch_invariant || rest * cut.key_tiles >= int64_t{1} << 30) return cut;
  // To hand a part over and to take it over costs each about as much as a key tile, and beginning and ending a tile twice
  // as two more: parts of at least the square root of all, so that nobody has too many to take over.
  int64_t fewest = 4;
  while (fewest * fewest < cut.key_tiles) ++fewest;
  const int64_t blocks = std::min(most, rest * cut.key_tiles / fewest);
  if (blocks <= rest || ceil_div(rest * cut.key_tiles, blocks) + 4 >= cut.key_tiles) return cut;
  cut.sharing_blocks = blocks;
  cut.grid = std::max(cut.grid, blocks);
  cut.part_bytes = blocks * config.part_floats() * 4;
  cut.flag_bytes = blocks * config.part_flags() * 8;
  return cut;
}

Status bias_params(const tw_problem& p, const tw_tensor& bias, BiasParams* to) {
  const bool mask = bias.dtype == TW_BOOL, f32 = bias.dtype == TW_FLOAT32;
  const bool rows = bias.shape[2] > 1 && bias.stride[2] != 0;
  to->kind = mask ? BiasKind::kMask : f32 ? BiasKind::kFloat32 : BiasKind::k16;
  to->boxes = f32 ? 2 : 1;
  to->box_keys = f32 ? 32 : 64;
  to->box_bytes = (rows ? 64 : 1) * (mask ? 64 : 128);
  to->row_mask = rows ? 63 : 0;
  to->stage_bits = f32 ? 0 : 1;
  to->alone = p.softcap == 0 && p.dropout_p == 0 && !has(p, TW_HAS_ALIBI) && !has(p, TW_HAS_MAX_LOGIT) && (!mask || softmax_scale_of(p) >= 0);
  to->scale = p.softcap != 0 ? 1.f : static_cast<float>(softmax_scale_of(p));
  return bias_map(p, {&bias, rows ? 64 : 1, to->box_keys}, &to->map);
}

// Heads whose tiles are in flight together under a causal mask. Their K and V should stay in the L2 cache (60 MB), and
// there should be enough tiles of every length to fill the gaps at the end. Measured best: 33 MB from 2k keys on, 16 at
// 1k and 8 at 512, at d 256 twice as much there, but never under 8 key heads.
int64_t section_heads(const tw_problem& p, const ForwardSm90Config& config) {
  const int64_t keys = std::max<int64_t>(p.seqlen_k, 1), width = config.head_dim > 128 ? 2 : 1;
  const int64_t bytes = std::clamp<int64_t>(width * (keys << 14), width * (int64_t{8} << 20), int64_t{33} << 20);
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
  if (p.k_layout == TW_PAGED && (p.page_size < 8 || (64 % p.page_size != 0 && p.page_size % 64 != 0)))
    return concat("page_size ", p.page_size, ": takes 8, 16, 32 and multiples of 64");
  if (p.seqlen_new > 0) return "keys to append";
  if (p.rotary_dim > 0) return "rotary positions";
  // A draw belongs to 32 keys, a box to a page: tiles cannot start at multiples of both if keys start inside a page.
  if (p.dropout_p != 0 && p.k_layout == TW_PAGED && has(p, TW_HAS_LEFTPAD_K)) return "dropout with left padding in pages";
  if (has(p, TW_HAS_BIAS) && p.bias_dtype != p.dtype && p.bias_dtype != TW_FLOAT32 && p.bias_dtype != TW_BOOL)
    return concat("bias in ", dtype_name(p.bias_dtype), " with q in ", dtype_name(p.dtype), ": takes q's type, f32 and masks");
  // Boxes of a bias start at multiples of 16 bytes in a row, those of pages at pages: not both if keys start inside a page.
  if (has(p, TW_HAS_BIAS) && p.k_layout == TW_PAGED && has(p, TW_HAS_LEFTPAD_K)) return "a bias with left padding in pages";
  if (has(p, TW_HAS_BIAS) && (p.bias_dims & TW_DIM_K) == 0) return "bias that does not differ from key to key";
  if (has(p, TW_HAS_BIAS) && p.dropout_p != 0 && std::max(p.head_dim, p.head_dim_v) > 128) return "dropout with a bias at head dims above 128";
  if (p.num_splits > 1) return "num_splits over 1";
  if (p.batch == 0 || p.num_heads_q == 0 || p.seqlen_q == 0 || p.seqlen_k == 0) return "no keys or no rows";
  if (std::max(p.total_q, p.total_k) >= int64_t{1} << 31) return "2^31 packed rows or more";
  const ForwardSm90Config config = choose(p);
  if (find_kernels(p) == nullptr) return concat("no kernel for head dims ", p.head_dim, ", ", p.head_dim_v, " was built");
  const Cut cut = cut_forward(p, config, 1);
  if (const int64_t rows = p.seqlen_q * cut.tile_heads; rows <= 64 && lengths_decide(p))
    return concat("seqlen_q ", p.seqlen_q, ", ", cut.tile_heads, " heads a tile: 64 rows a warpgroup would be mostly empty");
  if (const int64_t tiles = cut.num_tiles; tiles >= 1 << 24) return concat(tiles, " tiles: at most 2^24 - 1");
  return "";
}

Status plan_forward_sm90(const tw_problem& p, const Target& target, Plan* plan) {
  const DeviceFacts& device = device_facts(target.device_index);
  if (device.capability != 0 && device.capability != 90)  // 0: planned where there is no GPU
    return unsupported("forward_sm90: device ", target.device_index, " is not of compute capability 9.0");
  ForwardSm90Config config;
  if (find_shape(p, target.choice, &config) == nullptr)
    return invalid("config: \"", format(target.choice), "\": forward_sm90 has no such blocks for \"", format(p), "\"");
  const Cut cut = cut_forward(p, config, device.multiprocessors);
  if (cut.num_tiles >= 1 << 24) return unsupported("forward_sm90: ", cut.num_tiles, " tiles: at most 2^24 - 1");
  plan->config = concat("tile ", config.block_m(), "x", config.block_n, "x", config.head_dim, ", ", config.consumers,
                        " consumer warpgroups, ", config.stages, " stages, ", config.shared_bytes(), " bytes shared, sums ",
                        config.ones() ? "by a column of ones" : "in float32");
  if (cut.tile_heads > 1) plan->config += concat(", ", cut.tile_heads, " heads a tile");
  if (cut.part_bytes > 0)
    plan->config += concat(", the last ", cut.num_tiles - cut.whole_tiles, " tiles by ", cut.sharing_blocks, " blocks");
  plan->block_m = config.block_m();
  plan->block_n = config.block_n;
  plan->num_splits = 1;
  plan->num_tasks = cut.num_tiles;
  plan->workspace_bytes = kCounterBytes + cut.again_bytes + cut.part_bytes + cut.flag_bytes;
  return Status();
}

Status run_forward_sm90(const Plan& plan, const tw_tensors& t, void* workspace, void* stream) {
  const tw_problem& p = plan.problem;
  // Only the pointers tell. The general kernel takes anything; with its keys in one part, since the plan has no room for more.
  if (t.o->dtype != t.q->dtype || !tensor_map_possible(*t.q) || !tensor_map_possible(*t.k) || !tensor_map_possible(*t.v) ||
      !tensor_map_possible(*t.o) || (t.bias && !bias_map_possible(p, *t.bias))) {
    Plan general = plan;
    general.problem.num_splits = 1;
    return run_forward_sm80(general, t, workspace, stream);
  }
  const ForwardSm90Config chosen = choose(p, plan.target.choice);
  const Cut cut = cut_forward(p, chosen, device_facts(plan.target.device_index).multiprocessors);
  const ForwardSm90Config config = simplest(p, chosen, cut.sharing_blocks);
  const DeviceGuard guard(plan.target.device_index);
  TW_RETURN_IF_ERROR(guard.status());

  ForwardSm90Params params = {};
  const bool whole = p.head_dim % 64 == 0 && p.head_dim_v % 64 == 0;
  params.loads_per_tile = whole ? 1 : config.panels();
  const int panels = whole ? config.panels() : 1;
  const auto box = [&](int rows, int* heads) {  // of so many rows of a tile
    const int in_head = std::min(rows, static_cast<int>(cut.tile_rows));
    *heads = cut.tile_heads > 1 ? rows / in_head : 0;
    return in_head;
  };
  int q_heads, o_heads;
  const int q_rows = box(config.q_rows, &q_heads), o_rows = box(64, &o_heads);
  TW_RETURN_IF_ERROR(tensor_map({t.q, p.head_dim, q_rows, panels, q_heads}, &params.q));
  params.key_loads = params.loads_per_tile;
  int key_rows = config.block_n, key_panels = panels;
  if (p.k_layout == TW_PAGED) {
    params.page_rows = key_rows = static_cast<int>(std::min<int64_t>(p.page_size, config.block_n));
    params.key_loads = config.panels(), key_panels = 1;  // a box of several panels and fewer rows would not lie like a tile
  }
  params.key_align = std::max({p.dropout_p != 0 ? 32 : 1, params.page_rows, t.bias ? 16 / static_cast<int>(dtype_size(t.bias->dtype)) : 1});
  TW_RETURN_IF_ERROR(tensor_map({t.k, p.head_dim, key_rows, key_panels}, &params.k));
  TW_RETURN_IF_ERROR(tensor_map({t.v, p.head_dim_v, key_rows, key_panels}, &params.v));
  TW_RETURN_IF_ERROR(tensor_map({t.o, p.head_dim_v, o_rows, panels, o_heads}, &params.o));

  if (t.bias) TW_RETURN_IF_ERROR(bias_params(p, *t.bias, &params.bias));

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
  if (t.dropout_mask) {
    const tw_tensor& mask = *t.dropout_mask;
    const int error = launch_dropout_mask(forward.sequence, forward.score, static_cast<uint8_t*>(mask.data), mask.shape,
                                          mask.stride, stream);
    if (error != 0) return device_error("dropout_mask", error);
  }
  if (t.max_logit) {
    forward.max_logit = static_cast<float*>(t.max_logit->data);
    forward.max_logit_batch = t.max_logit->stride[0];
    forward.max_logit_head = t.max_logit->stride[1];
    const int error = launch_fill(forward.max_logit, p.batch, p.num_heads_q, forward.max_logit_batch, forward.max_logit_head,
                                  -__builtin_huge_valf(), stream);
    if (error != 0) return device_error("max_logit", error);
  }

  TileOrder& order = params.order;
  order.num_tiles = static_cast<int32_t>(cut.num_tiles);
  order.num_blocks = static_cast<int32_t>(cut.num_blocks);
  order.tile_rows = static_cast<int32_t>(cut.tile_rows);
  order.tile_heads = static_cast<int32_t>(cut.tile_heads);
  order.row_bits = 31;
  if (cut.tile_heads > 1) order.row_bits = std::countr_zero(static_cast<uint32_t>(cut.tile_rows));
  order.num_heads = static_cast<int32_t>(p.batch * (p.num_heads_q / cut.tile_heads));
  params.window_left = forward.score.window_left;
  params.window_right = forward.score.window_right;
  if (ends_differ(p)) params.window_right = static_cast<int32_t>(std::min<int64_t>(mask_of(p).right, 1 << 29));
  if (cut.sharing_blocks > 0) {
    const int64_t shared = (cut.num_tiles - cut.whole_tiles) * cut.key_tiles;
    order.sharing_blocks = static_cast<int32_t>(cut.sharing_blocks);
    order.whole_tiles = static_cast<int32_t>(cut.whole_tiles);
    order.key_tiles = static_cast<int32_t>(cut.key_tiles);
    order.shared_each = static_cast<int32_t>(shared / cut.sharing_blocks);
    order.shared_rest = static_cast<int32_t>(shared % cut.sharing_blocks);
  }
  if (!cut.even) {
    order.counter = static_cast<unsigned long long*>(workspace);
    order.section_heads = static_cast<int32_t>(std::max<int64_t>(1, section_heads(p, config) / cut.tile_heads));
  }
  // Numbers spread over 40 bits: the workspace may hold what an earlier launch or another program left there.
  static std::atomic<uint64_t> launches{0};
  const uint64_t number = (launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15ull;
  order.launch = std::max<uint64_t>(1, number >> 24);
  order.lead = 2;  // 1 to 4 are equal from 1k keys on; 9 loses 2 % at 512
  const float scale = forward.score.scale_log2;
  const bool adds_bias = t.bias && t.bias->dtype != TW_BOOL;  // and multiplies by the scale
  params.natural = config.general() && !adds_bias && (p.softcap != 0 || has(p, TW_HAS_ALIBI) || has(p, TW_HAS_MAX_LOGIT) || scale < 0);
  params.bias.unit = params.natural || adds_bias ? 1.f : forward.score.scale;
  if (params.natural || adds_bias) {
    params.scale_log2 = 0x1.715476p+0f;  // log2(e)
  } else {
    // A zero scale gives every visible key the same weight; the smallest normal number does, too, and -inf stays -inf.
    params.scale_log2 = std::max(scale, 0x1p-126f);
  }
  params.check = config.biased() || !cut.even || ends_differ(p) || p.seqlen_k % config.block_n != 0;
  params.always = 1;
  char* const behind_counter = static_cast<char*>(workspace) + kCounterBytes;
  params.again = reinterpret_cast<int32_t*>(behind_counter);
  params.parts = reinterpret_cast<float*>(behind_counter + cut.again_bytes);
  params.part_ready = reinterpret_cast<unsigned long long*>(behind_counter + cut.again_bytes + cut.part_bytes);
  params.again_stride = static_cast<int32_t>(cut.again_stride);
  params.by_blocks = Divisor::of(order.num_blocks);
  params.by_section_heads = Divisor::of(std::max(1, order.section_heads));
  params.by_section_tiles = Divisor::of(std::max(1, order.section_heads) * int64_t{order.num_blocks});
  params.by_heads_q = Divisor::of(p.num_heads_q);
  params.by_group = Divisor::of(group_size(p));

  const Sm90Kernels& kernels = *find_kernels(p);
  const auto launch = config.biased() ? kernels.launch_bias : kernels.launch;
  if (const int error = launch(config, params, static_cast<int>(cut.grid), stream); error != 0) return device_error("forward_sm90", error);
  return Status();
}

KernelRow forward_sm90_row() {
  return {"forward_sm90", TW_BACKEND_CUDA, TW_FORWARD, "sm_90a",
          "f16 and bf16, head dims up to 256, windows, softcap, ALiBi, bias and masks, sinks, dropout, dense, packed and paged", forward_sm90_available,
          refuse_forward_sm90, plan_forward_sm90, run_forward_sm90, "block_m block_n"};
}

}  // namespace tilewise::cuda
