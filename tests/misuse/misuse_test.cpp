// One wrong call for each rule: the status, the words (argument, value, what is allowed), and nothing written.
#include <functional>

#include "support.h"

namespace tilewise {
namespace {

// ---- problems ----

struct WrongProblem {
  const char* name;
  const char* base;                       // right
  std::function<void(tw_problem&)> spoil;  // makes it wrong
  const char* words;                      // in the message
};

void PrintTo(const WrongProblem& one, std::ostream* out) { *out << one.name; }

const char* const kForward = "fwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16";
const char* const kBackward = "bwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16";
const char* const kPaged = "fwd f32 b=2 hq=4 hk=2 sq=8 sk=16 d=16 pages=4x8 seqused_k";
const char* const kPackedText = "fwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16 packed_q=10 packed_k=12";

const WrongProblem kWrongProblems[] = {
    {"struct_size", kForward, [](tw_problem& p) { p.struct_size = 8; }, "struct_size 8"},
    {"pass", kForward, [](tw_problem& p) { p.pass = 2; }, "pass 2: must be 0"},
    {"causal", kForward, [](tw_problem& p) { p.causal = 2; }, "causal 2: must be 0 or 1"},
    {"device", kForward, [](tw_problem& p) { p.device = 7; }, "device 7"},
    {"window_left", kForward, [](tw_problem& p) { p.window_left = -2; }, "window_left -2: must be >= -1"},
    {"window_right", kForward, [](tw_problem& p) { p.window_right = -3; }, "window_right -3: must be >= -1"},
    {"causal_window_right", kForward, [](tw_problem& p) { p.causal = 1, p.window_right = 5; }, "window_right 5: causal makes it 0"},
    {"scale", kForward, [](tw_problem& p) { p.softmax_scale = INFINITY; }, "softmax_scale inf: must be finite"},
    {"softcap_negative", kForward, [](tw_problem& p) { p.softcap = -1; }, "softcap -1: must be finite and >= 0"},
    {"softcap_nan", kForward, [](tw_problem& p) { p.softcap = NAN; }, "softcap nan"},
    {"dropout_one", kForward, [](tw_problem& p) { p.dropout_p = 1; }, "dropout_p 1: must be in [0, 1)"},
    {"dropout_negative", kForward, [](tw_problem& p) { p.dropout_p = -0.5; }, "dropout_p -0.5"},
    {"dropout_nan", kForward, [](tw_problem& p) { p.dropout_p = NAN; }, "dropout_p nan"},
    {"interleaved", kForward, [](tw_problem& p) { p.rotary_interleaved = 3; }, "rotary_interleaved 3"},
    {"deterministic", kForward, [](tw_problem& p) { p.deterministic = -1; }, "deterministic -1"},
    {"batch_invariant", kForward, [](tw_problem& p) { p.batch_invariant = 2; }, "batch_invariant 2"},
    {"splits_negative", kForward, [](tw_problem& p) { p.num_splits = -1; }, "num_splits -1: must be in [0, 256]"},
    {"splits_large", kForward, [](tw_problem& p) { p.num_splits = 257; }, "num_splits 257"},
    {"sm_margin", kForward, [](tw_problem& p) { p.sm_margin = -1; }, "sm_margin -1: must be >= 0"},
    {"dtype_int", kForward, [](tw_problem& p) { p.dtype = TW_INT32; }, "dtype i32 (4): must be f32, f16, bf16 or f64"},
    {"dtype_unknown", kForward, [](tw_problem& p) { p.dtype = 99; }, "dtype unknown (99)"},
    {"q_layout", kForward, [](tw_problem& p) { p.q_layout = TW_PAGED; }, "q_layout 2"},
    {"k_layout", kForward, [](tw_problem& p) { p.k_layout = 3; }, "k_layout 3"},
    {"batch", kForward, [](tw_problem& p) { p.batch = -1; }, "batch -1: must be >= 0"},
    {"seqlen_q", kForward, [](tw_problem& p) { p.seqlen_q = -4; }, "seqlen_q -4: must be >= 0"},
    {"seqlen_k", kForward, [](tw_problem& p) { p.seqlen_k = -4; }, "seqlen_k -4: must be >= 0"},
    {"heads_negative", kForward, [](tw_problem& p) { p.num_heads_q = -4; }, "num_heads_q -4: must be >= 0"},
    {"heads_divide", kForward, [](tw_problem& p) { p.num_heads_q = 9, p.num_heads_k = 7; }, "num_heads_q 9: must be a multiple of num_heads_k, which is 7"},
    {"heads_zero", kForward, [](tw_problem& p) { p.num_heads_k = 0; }, "num_heads_q 4: must be a multiple of num_heads_k, which is 0"},
    {"head_dim_zero", kForward, [](tw_problem& p) { p.head_dim = 0; }, "head_dim 0: must be in [1, 256]"},
    {"head_dim_large", kForward, [](tw_problem& p) { p.head_dim = 257; }, "head_dim 257"},
    {"head_dim_v", kForward, [](tw_problem& p) { p.head_dim_v = 512; }, "head_dim_v 512: must be in [1, 256]"},
    {"total_q_dense", kForward, [](tw_problem& p) { p.total_q = 5; }, "total_q 5: must be 0 for a dense q"},
    {"total_k_dense", kForward, [](tw_problem& p) { p.total_k = 5; }, "total_k 5: must be 0"},
    {"page_size_zero", kPaged, [](tw_problem& p) { p.page_size = 0; }, "page_size 0: must be > 0"},
    {"page_size_dense", kForward, [](tw_problem& p) { p.page_size = 16; }, "page_size 16: must be 0 unless k is paged"},
    {"num_pages_dense", kForward, [](tw_problem& p) { p.num_pages = 16; }, "num_pages 16: must be 0 unless k is paged"},
    {"cache_batch_packed", kPackedText, [](tw_problem& p) { p.cache_batch = 3; }, "cache_batch 3: must be 0 unless k is dense"},
    {"cache_batch_no_index", kForward, [](tw_problem& p) { p.cache_batch = 3; }, "cache_batch_idx is needed"},
    {"features_unknown", kForward, [](tw_problem& p) { p.features |= 1u << 30; }, "features"},
    {"forward_dq", kForward, [](tw_problem& p) { p.features |= TW_HAS_DQ; }, "dq: belongs to the backward pass"},
    {"forward_dlse", kForward, [](tw_problem& p) { p.features |= TW_HAS_DLSE; }, "dlse: belongs to the backward pass"},
    {"forward_dbias", kForward, [](tw_problem& p) { p.features |= TW_HAS_DBIAS; }, "dbias: belongs to the backward pass"},
    {"backward_lse", kBackward, [](tw_problem& p) { p.features |= TW_HAS_LSE; }, "TW_HAS_LSE: not in the backward pass"},
    {"backward_max_logit", kBackward, [](tw_problem& p) { p.features |= TW_HAS_MAX_LOGIT; }, "max_logit: not in the backward pass"},
    {"backward_dropout_mask", kBackward, [](tw_problem& p) { p.features |= TW_HAS_DROPOUT_MASK, p.dropout_p = 0.1; }, "dropout_mask: not in the backward pass"},
    {"backward_paged", kBackward, [](tw_problem& p) { p.k_layout = TW_PAGED, p.page_size = 8, p.num_pages = 4; }, "page_table: not in the backward pass"},
    {"backward_cache", kBackward, [](tw_problem& p) { p.features |= TW_HAS_CACHE_BATCH_IDX; }, "cache_batch_idx: not in the backward pass"},
    {"backward_leftpad", kBackward, [](tw_problem& p) { p.features |= TW_HAS_LEFTPAD_K; }, "leftpad_k: not in the backward pass"},
    {"backward_append", kBackward, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.seqlen_new = 1; }, "k_new: not in the backward pass"},
    {"backward_rotary", kBackward, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.rotary_dim = 8; }, "rotary_cos: not in the backward pass"},
    {"bias_dtype", kForward, [](tw_problem& p) { p.features |= TW_HAS_BIAS, p.bias_dtype = TW_INT32; }, "bias: dtype i32: must be"},
    {"bias_dims", kForward, [](tw_problem& p) { p.features |= TW_HAS_BIAS, p.bias_dims = 16; }, "bias_dims 16"},
    {"alibi_dims", kForward, [](tw_problem& p) { p.features |= TW_HAS_ALIBI, p.alibi_dims = TW_DIM_Q; }, "alibi_dims 4"},
    {"dbias_no_bias", kBackward, [](tw_problem& p) { p.features |= TW_HAS_DBIAS; }, "dbias: needs bias"},
    {"dbias_bool", kBackward, [](tw_problem& p) { p.features |= TW_HAS_DBIAS | TW_HAS_BIAS, p.bias_dtype = TW_BOOL; }, "dbias: bias is a bool mask"},
    {"dalibi_no_alibi", kBackward, [](tw_problem& p) { p.features |= TW_HAS_DALIBI; }, "dalibi: needs alibi_slopes"},
    {"dsink_no_sink", kBackward, [](tw_problem& p) { p.features |= TW_HAS_DSINK; }, "dsink: needs sink"},
    {"dropout_mask_no_dropout", kForward, [](tw_problem& p) { p.features |= TW_HAS_DROPOUT_MASK; }, "dropout_mask: needs dropout_p > 0"},
    {"packed_leftpad", kPackedText, [](tw_problem& p) { p.features |= TW_HAS_LEFTPAD_K; }, "leftpad_k: needs a dense or paged k"},
    {"packed_cache_idx", kPackedText, [](tw_problem& p) { p.features |= TW_HAS_CACHE_BATCH_IDX; }, "cache_batch_idx: needs a dense or paged k"},
    {"packed_append", kPackedText, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.seqlen_new = 1; }, "k_new: needs a dense or paged k"},
    {"packed_rotary", kPackedText, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.rotary_dim = 8; }, "rotary_cos: needs a dense or paged k"},
    {"paged_cache_idx", kPaged, [](tw_problem& p) { p.features |= TW_HAS_CACHE_BATCH_IDX; }, "cache_batch_idx: needs a dense k"},
    {"append_no_seqused", kForward, [](tw_problem& p) { p.seqlen_new = 1; }, "k_new: needs seqused_k"},
    {"append_too_many", kForward, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.seqlen_new = 10; }, "seqlen_new 10: must be <= the capacity of k, which is 9"},
    {"rotary_odd", kForward, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.rotary_dim = 7; }, "rotary_dim 7: must be even"},
    {"rotary_wide", kForward, [](tw_problem& p) { p.features |= TW_HAS_SEQUSED_K, p.rotary_dim = 18; }, "rotary_dim 18: must be even and <= head_dim, which is 16"},
    {"rotary_no_positions", kForward, [](tw_problem& p) { p.rotary_dim = 8; }, "rotary_cos: needs k_new, seqused_k or rotary_seqlens"},
    {"rotary_seqlens_alone", kForward, [](tw_problem& p) { p.features |= TW_HAS_ROTARY_SEQLENS; }, "rotary_seqlens: needs rotary_cos"},
    {"overflow_q", kForward, [](tw_problem& p) { p.batch = int64_t{1} << 40, p.seqlen_q = int64_t{1} << 20; }, "q: the product of its sizes overflows int64"},
    {"overflow_k", kForward, [](tw_problem& p) { p.seqlen_k = INT64_MAX; }, "k: the product of its sizes overflows int64"},
    {"overflow_mask", kForward, [](tw_problem& p) { p.seqlen_q = p.seqlen_k = int64_t{1} << 30, p.features |= TW_HAS_DROPOUT_MASK, p.dropout_p = 0.5, p.batch = 1024; }, "dropout_mask: the product"}};

class Problems : public testing::TestWithParam<WrongProblem> {};

TEST_P(Problems, IsRefusedWithItsWords) {
  const WrongProblem& wrong = GetParam();
  tw_problem problem = problem_of(wrong.base);
  tw_plan* plan = nullptr;
  ASSERT_EQ(tw_plan_create(&problem, nullptr, &plan), TW_OK) << "the base must be right: " << tw_last_error();
  tw_plan_destroy(plan);
  plan = nullptr;
  wrong.spoil(problem);
  EXPECT_EQ(tw_plan_create(&problem, nullptr, &plan), TW_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  EXPECT_NE(std::string(tw_last_error()).find(wrong.words), std::string::npos) << "said: " << tw_last_error() << "\nwanted: " << wrong.words;
}

INSTANTIATE_TEST_SUITE_P(All, Problems, testing::ValuesIn(kWrongProblems), [](const auto& info) { return std::string(info.param.name); });

// ---- tensors ----

// The call's tensors by value, so that each can be spoiled alone.
struct Call {
  std::unique_ptr<Inputs> inputs;
  tw_problem problem;
  tw_tensors t;
  tw_tensor own[40];
  int used = 0;

  explicit Call(const std::string& text) : inputs(make_inputs(text, {})), problem(inputs->problem()), t(inputs->tensors()) {}

  // A copy of the tensor behind `member`, to change.
  template <class Tensor>
  tw_tensor& change(Tensor& member) {
    own[used] = *member;
    member = &own[used];
    return own[used++];
  }
  template <class Tensor>
  tw_tensor& add(Tensor& member, void* data, tw_dtype dtype, int32_t ndim, int64_t n0, int64_t n1 = 0, int64_t n2 = 0, int64_t n3 = 0) {
    own[used] = tw_tensor_contiguous(data, dtype, ndim, n0, n1, n2, n3);
    member = &own[used];
    return own[used++];
  }
};

struct WrongCall {
  const char* name;
  const char* base;
  std::function<void(Call&)> spoil;
  const char* words;
};

void PrintTo(const WrongCall& one, std::ostream* out) { *out << one.name; }

float spare_floats[4096];
int32_t spare_ints[256];

const char* const kCache = "fwd f32 b=2 hq=4 hk=2 sq=3 sk=12 d=16 seqused_k new=2 rotary=8 causal";
const char* const kHoles = "fwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16 packed_q=10 packed_k=12 seqused_q seqused_k";
const char* const kIndexed = "fwd f32 b=2 hq=4 hk=2 sq=3 sk=12 d=16 cache_batch=4 cache_batch_idx seqused_k leftpad";
const char* const kOptions = "fwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16 bias=f32:bhqk alibi=h sink dropout=0.5 dropout_mask maxlogit rng_state";
const char* const kGradients = "bwd f32 b=2 hq=4 hk=2 sq=8 sk=9 d=16 bias=f32:bhqk alibi=h sink dbias dalibi dsink dlse";

const WrongCall kWrongCalls[] = {
    {"tensors_struct_size", kForward, [](Call& c) { c.t.struct_size = 16; }, "struct_size 16"},
    {"tensors_reserved", kForward, [](Call& c) { c.t.reserved = 1; }, "reserved 1: must be 0"},
    {"problem_struct_size", kForward, [](Call& c) { c.problem.struct_size = 0; }, "struct_size 0"},
    {"q_missing", kForward, [](Call& c) { c.t.q = nullptr; }, "q: is NULL"},
    {"k_missing", kForward, [](Call& c) { c.t.k = nullptr; }, "k: is NULL"},
    {"v_missing", kForward, [](Call& c) { c.t.v = nullptr; }, "v: is NULL"},
    {"o_missing", kForward, [](Call& c) { c.t.o = nullptr; }, "o: is NULL"},
    {"lse_missing", kBackward, [](Call& c) { c.t.lse = nullptr; }, "lse: is NULL"},
    {"dout_missing", kBackward, [](Call& c) { c.t.dout = nullptr; }, "dout: is NULL"},
    {"dout_in_forward", kForward, [](Call& c) { c.t.dout = c.t.o; }, "dout: belongs to the backward pass"},
    {"dq_in_forward", kForward, [](Call& c) { c.add(c.t.dq, spare_floats, TW_FLOAT32, 4, 2, 8, 4, 16); }, "dq: belongs to the backward pass"},
    {"max_logit_in_backward", kBackward, [](Call& c) { c.add(c.t.max_logit, spare_floats, TW_FLOAT32, 2, 2, 4); }, "max_logit: not in the backward pass"},
    {"page_table_in_backward", kBackward, [](Call& c) { c.add(c.t.page_table, spare_ints, TW_INT32, 2, 2, 4); }, "page_table: not in the backward pass"},
    {"k_new_in_backward", kBackward, [](Call& c) { c.add(c.t.k_new, spare_floats, TW_FLOAT32, 4, 2, 1, 2, 16); }, "k_new: not in the backward pass"},
    {"rotary_in_backward", kBackward, [](Call& c) { c.add(c.t.rotary_cos, spare_floats, TW_FLOAT32, 2, 9, 4); }, "rotary_cos: not in the backward pass"},
    {"leftpad_in_backward", kBackward, [](Call& c) { c.add(c.t.leftpad_k, spare_ints, TW_INT32, 1, 2); }, "leftpad_k: not in the backward pass"},
    {"cache_batch_idx_in_backward", kBackward, [](Call& c) { c.add(c.t.cache_batch_idx, spare_ints, TW_INT32, 1, 2); }, "cache_batch_idx: not in the backward pass"},
    {"packed_and_paged", kPackedText, [](Call& c) { c.add(c.t.page_table, spare_ints, TW_INT32, 2, 2, 4); }, "page_table: k is packed"},
    {"v_new_missing", kCache, [](Call& c) { c.t.v_new = nullptr; }, "v_new: is NULL"},
    {"k_new_missing", kCache, [](Call& c) { c.t.k_new = nullptr; }, "k_new: is NULL"},
    {"rotary_sin_missing", kCache, [](Call& c) { c.t.rotary_sin = nullptr; }, "rotary_sin: is NULL"},
    {"rotary_seqlens_alone", kForward, [](Call& c) { c.add(c.t.rotary_seqlens, spare_ints, TW_INT32, 1, 2); }, "rotary_seqlens: needs rotary_cos"},
    {"q_ndim", kForward, [](Call& c) { c.change(c.t.q).ndim = 3; }, "q: ndim 3: must be 4"},
    {"q_ndim_packed", kPackedText, [](Call& c) { c.change(c.t.q).ndim = 4; }, "q: ndim 4: must be 3"},
    {"q_dtype", kForward, [](Call& c) { c.change(c.t.q).dtype = TW_INT64; }, "q: dtype i64: must be f32, f16, bf16 or f64"},
    {"q_device", kForward, [](Call& c) { c.change(c.t.q).device = 9; }, "q: device 9"},
    {"k_dtype", kForward, [](Call& c) { c.change(c.t.k).dtype = TW_FLOAT16; }, "k: dtype f16: must be f32 like q"},
    {"v_dtype", kForward, [](Call& c) { c.change(c.t.v).dtype = TW_BFLOAT16; }, "v: dtype bf16: must be f32 like q"},
    {"o_dtype", kForward, [](Call& c) { c.change(c.t.o).dtype = TW_FLOAT16; }, "o: dtype f16: must be f32 like q, or f32"},
    {"k_device", kForward, [](Call& c) { c.change(c.t.k).device = TW_CUDA; }, "k: device 1:0: must be that of q, 0:0"},
    {"k_device_index", kForward, [](Call& c) { c.change(c.t.k).device_index = 1; }, "k: device 0:1"},
    {"batch_of_k", kForward, [](Call& c) { c.change(c.t.k).shape[0] = 3; }, "k: shape[0] 3: must be batch, which is 2"},
    {"head_dim_of_k", kForward, [](Call& c) { c.change(c.t.k).shape[3] = 8; }, "k: shape [2, 9, 2, 8]: must be [2, 9, 2, 16]"},
    {"length_of_v", kForward, [](Call& c) { c.change(c.t.v).shape[1] = 7; }, "v: shape [2, 7, 2, 16]: must be [2, 9, 2, 16]"},
    {"heads_of_v", kForward, [](Call& c) { c.change(c.t.v).shape[2] = 1; }, "v: shape [2, 9, 1, 16]"},
    {"heads_divide", "fwd f32 b=2 hq=4 hk=4 sq=8 sk=9 d=16", [](Call& c) { c.change(c.t.k).shape[2] = 3, c.change(c.t.v).shape[2] = 3; c.problem.num_heads_k = 0; }, "num_heads_q 4: must be a multiple of num_heads_k, which is 3"},
    {"o_shape", kForward, [](Call& c) { c.change(c.t.o).shape[1] = 7; }, "o: shape [2, 7, 4, 16]: must be [2, 8, 4, 16] ([batch, seqlen_q, num_heads_q, head_dim_v])"},
    {"lse_shape", kForward, [](Call& c) { c.change(c.t.lse).shape[2] = 9; }, "lse: shape [2, 4, 9]: must be [2, 4, 8]"},
    {"lse_dtype", kForward, [](Call& c) { c.change(c.t.lse).dtype = TW_FLOAT64; }, "lse: dtype f64: must be f32"},
    {"lse_ndim", kPackedText, [](Call& c) { c.change(c.t.lse).ndim = 3; }, "lse: ndim 3: must be 2"},
    {"q_null_data", kForward, [](Call& c) { c.change(c.t.q).data = nullptr; }, "q: data is NULL"},
    {"o_null_data", kForward, [](Call& c) { c.change(c.t.o).data = nullptr; }, "o: data is NULL"},
    {"q_misaligned", kForward, [](Call& c) { auto& q = c.change(c.t.q); q.data = static_cast<char*>(q.data) + 2; }, "q: data is not aligned to its element size of 4"},
    {"q_last_stride", kForward, [](Call& c) { c.change(c.t.q).stride[3] = 2; }, "q: stride[3] 2: must be 1"},
    {"o_last_stride", kForward, [](Call& c) { c.change(c.t.o).stride[3] = 2; }, "o: stride[3] 2: must be 1"},
    {"q_negative_stride", kForward, [](Call& c) { c.change(c.t.q).stride[1] = -64; }, "q: stride[1] -64: must be >= 0"},
    {"q_stride_overflow", kForward, [](Call& c) { c.change(c.t.q).stride[1] = INT64_MAX / 2; }, "overflows int64"},
    {"o_broadcast", kForward, [](Call& c) { c.change(c.t.o).stride[0] = 0; }, "o: stride[0] 0 in a dimension of size 2: an output must not be broadcast"},
    {"lse_broadcast", kForward, [](Call& c) { c.change(c.t.lse).stride[1] = 0; }, "lse: stride[1] 0"},
    {"o_overlap", kForward, [](Call& c) { c.change(c.t.o).stride[2] = 8; }, "elements of an output must not overlap"},
    {"cache_broadcast", kCache, [](Call& c) { c.change(c.t.k).stride[0] = 0; }, "k: stride[0] 0 in a dimension of size 2"},
    {"max_logit_shape", kOptions, [](Call& c) { c.change(c.t.max_logit).shape[1] = 3; }, "max_logit: shape [2, 3]: must be [2, 4]"},
    {"bias_shape", kOptions, [](Call& c) { c.change(c.t.bias).shape[3] = 7; }, "bias: shape [2, 4, 8, 7]: must be [2, 4, 8, 9] or 1 in each dimension"},
    {"bias_ndim", kOptions, [](Call& c) { c.change(c.t.bias).ndim = 3; }, "bias: ndim 3: must be 4"},
    {"bias_dtype", kOptions, [](Call& c) { c.change(c.t.bias).dtype = TW_INT32; }, "bias: dtype i32"},
    {"alibi_shape", kOptions, [](Call& c) { c.change(c.t.alibi_slopes).shape[0] = 5; }, "alibi_slopes: shape [5]: must be [4]"},
    {"alibi_ndim", kOptions, [](Call& c) { c.change(c.t.alibi_slopes).ndim = 3; }, "alibi_slopes: ndim 3"},
    {"alibi_dtype", kOptions, [](Call& c) { c.change(c.t.alibi_slopes).dtype = TW_FLOAT16; }, "alibi_slopes: dtype f16: must be f32"},
    {"sink_shape", kOptions, [](Call& c) { c.change(c.t.sink).shape[0] = 3; }, "sink: shape [3]: must be [4]"},
    {"sink_dtype", kOptions, [](Call& c) { c.change(c.t.sink).dtype = TW_FLOAT64; }, "sink: dtype f64: must be f32"},
    {"rng_state_dtype", kOptions, [](Call& c) { c.change(c.t.rng_state).dtype = TW_INT32; }, "rng_state: dtype i32: must be i64"},
    {"rng_state_shape", kOptions, [](Call& c) { c.change(c.t.rng_state).shape[0] = 1; }, "rng_state: shape [1]: must be [2]"},
    {"dropout_mask_dtype", kOptions, [](Call& c) { c.change(c.t.dropout_mask).dtype = TW_FLOAT32; }, "dropout_mask: dtype f32: must be bool"},
    {"dropout_mask_off", kOptions, [](Call& c) { c.problem.dropout_p = 0; }, "dropout_mask: needs dropout_p > 0"},
    {"options_disagree", kForward, [](Call& c) { c.problem.seqlen_k = 10; }, "seqlen_k 10: the tensors have 9"},
    {"options_dtype", kForward, [](Call& c) { c.problem.dtype = TW_FLOAT16; }, "dtype 1: the tensors have 0"},
    {"options_pages", kPaged, [](Call& c) { c.problem.seqlen_k = 8; }, "seqlen_k 8: the tensors have 16"},
    {"causal_window", kForward, [](Call& c) { c.problem.causal = 1, c.problem.window_right = 2; }, "window_right 2: causal makes it 0"},
    {"cu_dtype", kPackedText, [](Call& c) { c.change(c.t.cu_seqlens_q).dtype = TW_INT64; }, "cu_seqlens_q: dtype i64: must be i32"},
    {"cu_shape", kPackedText, [](Call& c) { c.change(c.t.cu_seqlens_k).shape[0] = 2; }, "cu_seqlens_k: shape [2]: must be [3]"},
    {"cu_start", kPackedText, [](Call& c) { c.inputs->cu_seqlens_q.set(0, 1); }, "cu_seqlens_q[0] 1: must be 0"},
    {"cu_decreasing", kPackedText, [](Call& c) { c.inputs->cu_seqlens_k.set(1, 5), c.inputs->cu_seqlens_k.set(2, 3); }, "cu_seqlens_k[2] 3: must not be less than the one before, 5"},
    {"cu_beyond", kPackedText, [](Call& c) { c.problem.seqlen_q = 100, c.inputs->cu_seqlens_q.set(2, 11); }, "cu_seqlens_q[2] 11: must be <= the rows of the packed tensor, 10"},
    {"cu_longer_than_max", kPackedText, [](Call& c) { c.problem.seqlen_q = 2; }, "must be <= seqlen_q, which is 2"},
    {"seqused_q_large", kHoles, [](Call& c) { c.inputs->seqused_q.set(1, 9); }, "seqused_q[1] 9: must be in [0,"},
    {"seqused_k_negative", kHoles, [](Call& c) { c.inputs->seqused_k.set(0, -1); }, "seqused_k[0] -1: must be in [0,"},
    {"seqused_dtype", kHoles, [](Call& c) { c.change(c.t.seqused_k).dtype = TW_INT64; }, "seqused_k: dtype i64: must be i32"},
    {"cache_full", kCache, [](Call& c) { c.inputs->seqused_k.set(1, 11); }, "seqused_k[1] 11: must be in [0, 10] (the capacity less the keys to append)"},
    {"append_unplaced", kCache, [](Call& c) { c.t.seqused_k = nullptr; }, "k_new: needs seqused_k"},
    {"k_new_dtype", kCache, [](Call& c) { c.change(c.t.k_new).dtype = TW_FLOAT16; }, "k_new: dtype f16: must be f32"},
    {"v_new_shape", kCache, [](Call& c) { c.change(c.t.v_new).shape[1] = 1; }, "v_new: shape [2, 1, 2, 16]: must be [2, 2, 2, 16]"},
    {"rotary_rows", kCache, [](Call& c) { c.change(c.t.rotary_cos).shape[0] = 2, c.change(c.t.rotary_sin).shape[0] = 2; }, "rotary_cos: 2 rows: must be >="},
    {"rotary_sin_shape", kCache, [](Call& c) { c.change(c.t.rotary_sin).shape[0] = 1; }, "rotary_sin: shape [1, 4]"},
    {"rotary_dtype", kCache, [](Call& c) { c.change(c.t.rotary_cos).dtype = TW_FLOAT16; }, "rotary_cos: dtype f16"},
    {"rotary_empty", kCache, [](Call& c) { c.change(c.t.rotary_cos).shape[1] = 0; }, "rotary_cos: shape[1] 0"},
    {"rotary_wide", kCache, [](Call& c) { c.change(c.t.rotary_cos).shape[1] = 9, c.change(c.t.rotary_sin).shape[1] = 9, c.problem.rotary_dim = 0; }, "rotary_dim 18: must be even and <= head_dim"},
    {"rotary_seqlens_negative", kCache, [](Call& c) { spare_ints[0] = -1, spare_ints[1] = 0; c.add(c.t.rotary_seqlens, spare_ints, TW_INT32, 1, 2); }, "rotary_seqlens[0] -1: must be in [0,"},
    {"cache_idx_large", kIndexed, [](Call& c) { c.inputs->cache_batch_idx.set(1, 4); }, "cache_batch_idx[1] 4: must be in [0, 3]"},
    {"cache_idx_negative", kIndexed, [](Call& c) { c.inputs->cache_batch_idx.set(0, -1); }, "cache_batch_idx[0] -1"},
    {"leftpad_negative", kIndexed, [](Call& c) { c.inputs->leftpad_k.set(0, -2); }, "leftpad_k[0] -2: must be in [0, 12]"},
    {"leftpad_large", kIndexed, [](Call& c) { c.inputs->leftpad_k.set(1, 13); }, "leftpad_k[1] 13"},
    {"page_negative", kPaged, [](Call& c) { c.inputs->seqused_k.set(0, 9), c.inputs->page_table.set(0, 1), c.inputs->page_table.set(1, -1); }, "page_table[0, 1] -1: must be in [0, 3]"},
    {"page_large", kPaged, [](Call& c) { c.inputs->seqused_k.set(0, 1), c.inputs->page_table.set(0, 4); }, "page_table[0, 0] 4: must be in [0, 3]"},
    {"page_table_dtype", kPaged, [](Call& c) { c.change(c.t.page_table).dtype = TW_INT64; }, "page_table: dtype i64: must be i32"},
    {"page_table_batch", kPaged, [](Call& c) { c.change(c.t.page_table).shape[0] = 1; }, "page_table: shape [1, 2]: must be [2, 2]"},
    {"seqused_beyond_pages", kPaged, [](Call& c) { c.inputs->seqused_k.set(0, 17); }, "seqused_k[0] 17: must be in [0, 16]"},
    {"dout_shape", kGradients, [](Call& c) { c.change(c.t.dout).shape[1] = 7; }, "dout: shape [2, 7, 4, 16]"},
    {"dout_dtype", kGradients, [](Call& c) { c.change(c.t.dout).dtype = TW_FLOAT16; }, "dout: dtype f16: must be f32 like o"},
    {"dout_last_stride", kGradients, [](Call& c) { c.change(c.t.dout).stride[3] = 0; }, "dout: stride[3] 0: must be 1"},
    {"dlse_shape", kGradients, [](Call& c) { c.change(c.t.dlse).shape[2] = 7; }, "dlse: shape [2, 4, 7]"},
    {"dq_dtype", kGradients, [](Call& c) { c.change(c.t.dq).dtype = TW_BFLOAT16; }, "dq: dtype bf16"},
    {"dk_shape", kGradients, [](Call& c) { c.change(c.t.dk).shape[2] = 4; }, "dk: shape [2, 9, 4, 16]"},
    {"dv_broadcast", kGradients, [](Call& c) { c.change(c.t.dv).stride[0] = 0; }, "dv: stride[0] 0"},
    {"dbias_no_bias", kGradients, [](Call& c) { c.t.bias = nullptr; }, "dbias: needs bias"},
    {"dbias_shape", kGradients, [](Call& c) { c.change(c.t.dbias).shape[0] = 1; }, "dbias: shape [1, 4, 8, 9]: must be [2, 4, 8, 9]"},
    {"dbias_broadcast", kGradients, [](Call& c) { c.change(c.t.dbias).stride[0] = 0; }, "dbias: stride[0] 0"},
    {"dalibi_no_alibi", kGradients, [](Call& c) { c.t.alibi_slopes = nullptr; }, "dalibi: needs alibi_slopes"},
    {"dsink_no_sink", kGradients, [](Call& c) { c.t.sink = nullptr; }, "dsink: needs sink"},
    {"dsink_shape", kGradients, [](Call& c) { c.change(c.t.dsink).shape[0] = 3; }, "dsink: shape [3]: must be [4]"}};

class Calls : public testing::TestWithParam<WrongCall> {};

TEST_P(Calls, IsRefusedWithItsWordsAndWritesNothing) {
  const WrongCall& wrong = GetParam();
  {
    Call right(wrong.base);
    const auto call = right.problem.pass == TW_FORWARD ? tw_forward : tw_backward;
    ASSERT_EQ(call(&right.problem, &right.t, nullptr, nullptr), TW_OK) << "the base must be right: " << tw_last_error();
  }
  Call c(wrong.base);
  const bool forward = c.problem.pass == TW_FORWARD;
  wrong.spoil(c);
  const Inputs before = *c.inputs;
  EXPECT_EQ((forward ? tw_forward : tw_backward)(&c.problem, &c.t, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tw_last_error()).find(wrong.words), std::string::npos) << "said: " << tw_last_error() << "\nwanted: " << wrong.words;
  for (const Inputs::Named& output : c.inputs->outputs()) EXPECT_TRUE(output.buffer->all_poisoned()) << output.name << " was written";
  Inputs unchanged = before;
  const auto want = unchanged.inputs(), got = c.inputs->inputs();
  for (size_t n = 0; n < want.size(); ++n) EXPECT_EQ(got[n].buffer->bytes(), want[n].buffer->bytes()) << got[n].name << " was written";
}

INSTANTIATE_TEST_SUITE_P(All, Calls, testing::ValuesIn(kWrongCalls), [](const auto& info) { return std::string(info.param.name); });

// ---- texts, plans, targets, handles ----

TEST(Texts, AreRefusedWithTheirWords) {
  const struct {
    const char* text;
    const char* words;
  } wrong[] = {{"", "must begin with fwd or bwd"}, {"fwd", "must begin with fwd or bwd"}, {"sideways f32 hq=1 sq=1 d=8", "must begin with fwd or bwd"},
               {"fwd i32 hq=1 sq=1 d=8", "dtype \"i32\""}, {"fwd f32 sq=1 d=8", "lacks hq="}, {"fwd f32 hq=1 d=8", "lacks sq="}, {"fwd f32 hq=1 sq=1", "lacks d="},
               {"fwd f32 hq=x sq=1 d=8", "hq takes an integer"}, {"fwd f32 hq=1 sq=1 d=8 colour=red", "colour is no key"}, {"fwd f32 hq=1 sq=1 d=8 shiny", "no flag"},
               {"fwd f32 hq=1 sq=1 d=8 window=3", "window takes LEFT,RIGHT"}, {"fwd f32 hq=1 sq=1 d=8 pages=3", "pages takes NUMBERxSIZE"},
               {"fwd f32 hq=1 sq=1 d=8 bias=f32", "bias takes"}, {"fwd f32 hq=1 sq=1 d=8 mask=z", "mask takes"}, {"fwd f32 hq=1 sq=1 d=300", "head_dim 300"},
               {"fwd f32 hq=1 sq=1 d=8 causal window=-1,4", "window_right 4"}};
  for (const auto& one : wrong) {
    tw_problem problem;
    EXPECT_EQ(tw_problem_parse(one.text, &problem), TW_INVALID_ARGUMENT) << one.text;
    EXPECT_NE(std::string(tw_last_error()).find(one.words), std::string::npos) << one.text << "\nsaid: " << tw_last_error();
  }
}

TEST(Handles, NullsAreRefusedByName) {
  tw_problem problem = problem_of(kForward);
  tw_tensors tensors{};
  tensors.struct_size = sizeof tensors;
  tw_plan* plan = nullptr;
  const auto says = [](const char* words) { return std::string(tw_last_error()).find(words) != std::string::npos; };
  EXPECT_EQ(tw_problem_parse(nullptr, &problem), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_problem_parse("x", nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_describe(nullptr, &tensors, &problem), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_describe(&problem, nullptr, &problem), TW_INVALID_ARGUMENT);
  EXPECT_TRUE(says("tensors")) << tw_last_error();
  EXPECT_EQ(tw_forward(&problem, nullptr, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_backward(&problem, nullptr, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_plan_create(nullptr, nullptr, &plan), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_plan_create(&problem, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_plan_get_info(nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_run(nullptr, &tensors, nullptr, 0, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_kernel_at(0, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_softmax(nullptr, nullptr, nullptr, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_merge_states(nullptr, nullptr, nullptr, nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_tensor_from_dlpack(nullptr, nullptr), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_problem_text(nullptr, nullptr, 0), 0u);
  EXPECT_EQ(tw_plan_text(nullptr, nullptr, 0), 0u);
  tw_problem_init(nullptr);
  tw_plan_destroy(nullptr);
  tw_accumulator_destroy(nullptr);
}

TEST(Handles, KernelTableEnds) {
  tw_kernel_info info{};
  info.struct_size = sizeof info;
  EXPECT_EQ(tw_kernel_at(tw_kernel_count(), &info), TW_INVALID_ARGUMENT);
  EXPECT_EQ(tw_kernel_at(-1, &info), TW_INVALID_ARGUMENT);
  ASSERT_EQ(tw_kernel_at(tw_kernel_count() - 1, &info), TW_OK);
  EXPECT_STREQ(info.name, "reference");
  info.struct_size = 4;
  EXPECT_EQ(tw_kernel_at(0, &info), TW_INVALID_ARGUMENT);
}

TEST(Targets, AreChecked) {
  const tw_problem problem = problem_of(kForward);
  tw_plan* plan = nullptr;
  const auto create = [&](const std::function<void(tw_target&)>& spoil) {
    tw_target target{};
    target.struct_size = sizeof target;
    spoil(target);
    return tw_plan_create(&problem, &target, &plan);
  };
  EXPECT_EQ(create([](tw_target& t) { t.struct_size = 3; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.backend = 9; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.num_threads = -1; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.device_index = -1; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.kernel = "forward_abacus"; }), TW_UNSUPPORTED);
  EXPECT_NE(std::string(tw_last_error()).find("forward_abacus"), std::string::npos) << tw_last_error();
  EXPECT_EQ(create([](tw_target& t) { t.config = "frob=3"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.config = "block_m=0"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.config = "block_m=7"; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(create([](tw_target& t) { t.config = "splits=300"; }), TW_INVALID_ARGUMENT);
  tw_executor executor{sizeof(tw_executor), 0, nullptr, nullptr};
  EXPECT_EQ(create([&](tw_target& t) { t.executor = &executor; }), TW_INVALID_ARGUMENT);
  executor.num_workers = 1;
  EXPECT_EQ(create([&](tw_target& t) { t.executor = &executor; }), TW_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
}

// A plan runs the problem it was made for, in the workspace it asked for, and nothing else.
TEST(Plans, RefuseOtherTensorsAndSmallWorkspaces) {
  for (const char* text : {kForward, kBackward}) {
    const auto inputs = make_inputs(std::string(text), {});
    tw_target target{};
    target.struct_size = sizeof target;
    target.kernel = "reference";  // needs a workspace
    tw_plan* plan = nullptr;
    ASSERT_EQ(tw_plan_create(&inputs->problem(), &target, &plan), TW_OK) << tw_last_error();
    tw_plan_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(tw_plan_get_info(plan, &info), TW_OK);
    ASSERT_GT(info.workspace_bytes, 0);
    const auto bytes = static_cast<size_t>(info.workspace_bytes);
    Bytes workspace(bytes + 64);
    tw_tensors t = inputs->tensors();
    const auto expect_refused = [&](const tw_tensors& tensors, void* memory, size_t size, const char* words) {
      EXPECT_EQ(tw_run(plan, &tensors, memory, size, nullptr), TW_INVALID_ARGUMENT) << words;
      EXPECT_NE(std::string(tw_last_error()).find(words), std::string::npos) << tw_last_error();
      for (const Inputs::Named& output : inputs->outputs()) EXPECT_TRUE(output.buffer->all_poisoned()) << output.name << " was written";
    };
    expect_refused(t, workspace.data(), bytes - 1, "workspace_bytes");
    expect_refused(t, nullptr, bytes, "workspace");
    expect_refused(t, workspace.data() + 8, bytes, "aligned");
    float slopes[4] = {1, 1, 1, 1};
    tw_tensor alibi = tw_tensor_contiguous(slopes, TW_FLOAT32, 1, 4, 0, 0, 0);
    tw_tensors more = t;
    more.alibi_slopes = &alibi;
    expect_refused(more, workspace.data(), bytes, "alibi");
    tw_tensor shorter = *t.k;
    shorter.shape[1] -= 1;
    tw_tensors other = t;
    other.k = &shorter;
    expect_refused(other, workspace.data(), bytes, "seqlen_k");
    EXPECT_EQ(tw_run(plan, &t, workspace.data(), bytes, nullptr), TW_OK) << tw_last_error();
    info.struct_size = 1;
    EXPECT_EQ(tw_plan_get_info(plan, &info), TW_INVALID_ARGUMENT);
    tw_plan_destroy(plan);
  }
}

// What is allowed although it looks odd.
TEST(Allowed, OddButRight) {
  const auto runs = [](Call& c) {
    const auto call = c.problem.pass == TW_FORWARD ? tw_forward : tw_backward;
    EXPECT_EQ(call(&c.problem, &c.t, nullptr, nullptr), TW_OK) << tw_last_error();
  };
  {
    Call c(kForward);  // a last dimension of size 1 may have any stride; so may any dimension of size 1
    Call one("fwd f32 b=1 hq=2 sq=3 sk=4 d=1");
    one.change(one.t.q).stride[3] = 77;
    one.own[0].stride[0] = -5;
    runs(one);
    c.t.lse = nullptr;  // without lse
    runs(c);
  }
  {
    Call c("fwd f32 b=2 hq=2 sq=0 sk=4 d=8");  // no elements: data may be NULL
    c.change(c.t.q).data = nullptr;
    c.change(c.t.o).data = nullptr;
    runs(c);
  }
  {
    Call c(kPaged);  // unused entries of the page table may be anything (make_inputs puts -1, 2^31 - 1, ... there)
    c.inputs->seqused_k.set(0, 0), c.inputs->seqused_k.set(1, 0);
    for (int64_t n = 0; n < c.inputs->page_table.size(); ++n) c.inputs->page_table.set(n, -7);
    runs(c);
  }
  {
    Call c(kForward);  // one length for the whole batch: stride 0
    spare_ints[0] = 4;
    c.add(c.t.seqused_k, spare_ints, TW_INT32, 1, 2).stride[0] = 0;
    runs(c);
  }
  {
    Call c(kBackward);  // no gradient asked for
    c.t.dq = c.t.dk = c.t.dv = nullptr;
    c.problem.features = 0;
    runs(c);
  }
}

}  // namespace
}  // namespace tilewise
