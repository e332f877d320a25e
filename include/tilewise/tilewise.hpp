// Tilewise for C++20: exact attention, tile by tile, in linear memory.
//
// A header-only skin over the C ABI of tilewise.h (which documents every field): views, values and RAII. It exports
// nothing, so a program and the library need not agree on a compiler or a standard library. In the order of need:
//
//   1. Errors           tilewise::Error, with the library's sentence and a tw_status
//   2. Tensors          TensorView: pointer + shape; the dtype follows from the element type
//   3. The problem      Problem: options (and shapes), as a value with a text form
//   4. One call         forward(), backward()
//   5. Plan, then run   Plan, Workspace
//   6. Softmax          softmax(), Accumulator, merge_states()
//   7. Introspection    explain(), kernels(), machine(), version()
//
//   std::vector<float> q(b * sq * hq * d), k(b * sk * hk * d), v(b * sk * hk * dv), o(b * sq * hq * dv);
//   tilewise::forward(tilewise::Problem().causal(),
//                     {.q = {q.data(), {b, sq, hq, d}}, .k = {k.data(), {b, sk, hk, d}},
//                      .v = {v.data(), {b, sk, hk, dv}}, .o = {o.data(), {b, sq, hq, dv}}});
//
// Units: strides and shapes count elements; scale multiplies q.k before the softmax; lse is a natural logarithm;
// workspaces count bytes. Views own nothing. Every function is thread-safe; one Accumulator or Workspace belongs to one
// thread at a time. Whatever fails throws Error, and nothing is written then.
#ifndef TILEWISE_HPP
#define TILEWISE_HPP

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tilewise/tilewise.h"

// The inline namespace keeps these names apart, at link time, from the library's own and from other versions.
namespace tilewise::inline v0 {

// ---- 1. Errors ----------------------------------------------------------------------------------------------------

// what(): the argument's name, the value got and what is allowed. status(): never TW_OK.
class Error : public std::runtime_error {
 public:
  Error(tw_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  tw_status status() const noexcept { return status_; }

 private:
  tw_status status_;
};

namespace detail {

inline void require(tw_status status) {
  if (status != TW_OK) throw Error(status, tw_last_error());
}

template <class Write>  // size_t write(char* buffer, size_t capacity): the length without the final 0
std::string text(Write&& write) {
  std::string result(write(nullptr, 0), '\0');
  write(result.data(), result.size() + 1);
  return result;
}

}  // namespace detail

// ---- 2. Tensors ---------------------------------------------------------------------------------------------------

// 16-bit floats as storage: they convert from float (rounding to nearest, ties to even) and to float (exactly).
struct bfloat16 {
  uint16_t bits = 0;
  bfloat16() = default;
  explicit bfloat16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    bits = static_cast<uint16_t>(std::isnan(value) ? (word >> 16) | 0x40 : (word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

struct float16 {
  uint16_t bits = 0;
  float16() = default;
  explicit float16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value), magnitude = word & 0x7fffffff;
    uint32_t half = 0x7e00;      // NaN
    if (magnitude < 0x38800000)  // below 2^-14: units of 2^-24
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    else if (magnitude < 0x477ff000)  // below 65520
      half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    else if (magnitude <= 0x7f800000)
      half = 0x7c00;  // inf
    bits = static_cast<uint16_t>((word >> 16 & 0x8000) | half);
  }
  operator float() const {
    const uint32_t magnitude = bits & 0x7fff, sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    if (magnitude < 0x400) return std::copysign(static_cast<float>(magnitude) * 0x1p-24f, sign ? -1.f : 1.f);
    return std::bit_cast<float>(sign | ((magnitude + (magnitude >= 0x7c00 ? 0x38000 : 0x1c000)) << 13));
  }
};

// The dtype of an element type. Specialise it for a 16-bit float of your own:
//   template <> inline constexpr tw_dtype tilewise::dtype_of<my::half> = TW_FLOAT16;
template <class T>
inline constexpr tw_dtype dtype_of = [] {
  static_assert(sizeof(T) == 0, "no tw_dtype for this element type: specialise tilewise::dtype_of");
  return TW_FLOAT32;
}();
template <> inline constexpr tw_dtype dtype_of<float> = TW_FLOAT32;
template <> inline constexpr tw_dtype dtype_of<double> = TW_FLOAT64;
template <> inline constexpr tw_dtype dtype_of<float16> = TW_FLOAT16;
template <> inline constexpr tw_dtype dtype_of<bfloat16> = TW_BFLOAT16;
template <> inline constexpr tw_dtype dtype_of<int32_t> = TW_INT32;
template <> inline constexpr tw_dtype dtype_of<int64_t> = TW_INT64;
template <> inline constexpr tw_dtype dtype_of<bool> = TW_BOOL;

// A view of memory that you own, to be read. Default-constructed: absent.
class ConstTensorView {
 public:
  ConstTensorView() = default;
  ConstTensorView(const tw_tensor& tensor) : tensor_(tensor) {}

  // 1 to 4 dimensions, contiguous, or with strides in elements (0 repeats: an expanded dimension).
  template <class T>
  ConstTensorView(const T* data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides = {})
      : ConstTensorView(data, dtype_of<T>, {shape.begin(), shape.size()}, {strides.begin(), strides.size()}) {}

  // The same with the dtype said at run time, on any device.
  ConstTensorView(const void* data, tw_dtype dtype, std::span<const int64_t> shape,
                  std::span<const int64_t> strides = {}, tw_device device = TW_CPU, int device_index = 0) {
    if (shape.empty() || shape.size() > TW_MAX_DIMS || (!strides.empty() && strides.size() != shape.size()))
      throw Error(TW_INVALID_ARGUMENT, "tensor: " + std::to_string(shape.size()) + " sizes and " +
                                           std::to_string(strides.size()) +
                                           " strides: must be 1 to 4 sizes, and as many strides or none");
    tensor_.data = const_cast<void*>(data);
    tensor_.dtype = dtype;
    tensor_.device = device;
    tensor_.device_index = device_index;
    tensor_.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t n = shape.size(); n-- > 0; stride *= shape[n]) {
      tensor_.shape[n] = shape[n];
      tensor_.stride[n] = strides.empty() ? stride : strides[n];
    }
  }

  static ConstTensorView from_dlpack(const void* dl_tensor) {  // a DLTensor*
    tw_tensor tensor{};
    detail::require(tw_tensor_from_dlpack(dl_tensor, &tensor));
    return tensor;
  }

  explicit operator bool() const { return tensor_.ndim != 0; }
  const tw_tensor* c() const { return tensor_.ndim != 0 ? &tensor_ : nullptr; }

 protected:
  tw_tensor tensor_{};
};

// A view of memory that you own, to be written.
class TensorView : public ConstTensorView {
 public:
  TensorView() = default;
  TensorView(const tw_tensor& tensor) : ConstTensorView(tensor) {}
  template <class T>
    requires(!std::is_const_v<T>)
  TensorView(T* data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides = {})
      : ConstTensorView(data, shape, strides) {}
  TensorView(void* data, tw_dtype dtype, std::span<const int64_t> shape, std::span<const int64_t> strides = {},
             tw_device device = TW_CPU, int device_index = 0)
      : ConstTensorView(data, dtype, shape, strides, device, device_index) {}
  static TensorView from_dlpack(const void* dl_tensor) { return *ConstTensorView::from_dlpack(dl_tensor).c(); }

  using ConstTensorView::c;
  tw_tensor* c() { return tensor_.ndim != 0 ? &tensor_ : nullptr; }
};

// Every tensor of a call; what is not named is absent. Shapes as in tw_tensors:
//   dense   q [b, sq, hq, d]   k [b, sk, hk, d]   v [b, sk, hk, dv]   o [b, sq, hq, dv]   lse [b, hq, sq]
//   packed  q [total_q, hq, d] with cu_seqlens_q (o, lse [hq, total_q] alike); k [total_k, hk, d] with cu_seqlens_k
//   paged   k [num_pages, page_size, hk, d] with page_table
struct Tensors {
  ConstTensorView q{}, k{}, v{};  // k and v are written where k_new and v_new are appended: then they must be writable
  TensorView o{}, lse{}, max_logit{};
  ConstTensorView bias{}, alibi_slopes{}, sink{}, rng_state{};
  TensorView dropout_mask{};
  ConstTensorView cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{};
  ConstTensorView page_table{}, cache_batch_idx{}, leftpad_k{}, k_new{}, v_new{}, rotary_cos{}, rotary_sin{},
      rotary_seqlens{};
  ConstTensorView dout{}, dlse{};
  TensorView dq{}, dk{}, dv{}, dbias{}, dalibi{}, dsink{};

  // The C struct; it points into this one.
  tw_tensors c() const {
    const auto out = [](const ConstTensorView& view) { return const_cast<tw_tensor*>(view.c()); };
    tw_tensors t{};
    t.struct_size = sizeof t;
    t.q = q.c(), t.k = out(k), t.v = out(v), t.o = out(o), t.lse = out(lse), t.max_logit = out(max_logit);
    t.bias = bias.c(), t.alibi_slopes = alibi_slopes.c(), t.sink = sink.c(), t.rng_state = rng_state.c();
    t.dropout_mask = out(dropout_mask);
    t.cu_seqlens_q = cu_seqlens_q.c(), t.cu_seqlens_k = cu_seqlens_k.c();
    t.seqused_q = seqused_q.c(), t.seqused_k = seqused_k.c();
    t.page_table = page_table.c(), t.cache_batch_idx = cache_batch_idx.c(), t.leftpad_k = leftpad_k.c();
    t.k_new = k_new.c(), t.v_new = v_new.c();
    t.rotary_cos = rotary_cos.c(), t.rotary_sin = rotary_sin.c(), t.rotary_seqlens = rotary_seqlens.c();
    t.dout = dout.c(), t.dlse = dlse.c(), t.dq = out(dq), t.dk = out(dk), t.dv = out(dv);
    t.dbias = out(dbias), t.dalibi = out(dalibi), t.dsink = out(dsink);
    return t;
  }
};

// ---- 3. The problem -----------------------------------------------------------------------------------------------

// Options, and shapes once they are known (from describe() or parse()). A value: copy it, compare it, print it.
class Problem {
 public:
  Problem() { tw_problem_init(&problem_); }
  Problem(const tw_problem& problem) : problem_(problem) {}

  // "fwd bf16 b=2 hq=32 hk=8 sq=1024 sk=1024 d=128 causal"
  static Problem parse(const std::string& text) {
    Problem problem;
    detail::require(tw_problem_parse(text.c_str(), &problem.problem_));
    return problem;
  }
  std::string text() const {
    return detail::text([&](char* buffer, size_t capacity) { return tw_problem_text(&problem_, buffer, capacity); });
  }

  Problem& causal(bool on = true) { return problem_.causal = on, *this; }  // bottom-right aligned
  Problem& window(int64_t left, int64_t right) {                           // keys to either side, inclusive; -1 = all
    return problem_.window_left = left, problem_.window_right = right, *this;
  }
  Problem& softmax_scale(double scale) { return problem_.softmax_scale = scale, *this; }  // default 1 / sqrt(head_dim)
  Problem& softcap(double cap) { return problem_.softcap = cap, *this; }                  // 0 = off
  Problem& dropout(double p, uint64_t seed, uint64_t offset = 0) {                        // 0 <= p < 1
    return problem_.dropout_p = p, problem_.dropout_seed = seed, problem_.dropout_offset = offset, *this;
  }
  Problem& rotary_interleaved(bool on = true) { return problem_.rotary_interleaved = on, *this; }
  Problem& deterministic(bool on = true) { return problem_.deterministic = on, *this; }
  Problem& batch_invariant(bool on = true) { return problem_.batch_invariant = on, *this; }
  Problem& num_splits(int splits) { return problem_.num_splits = splits, *this; }  // 0 = the plan decides
  Problem& backward(bool on = true) { return problem_.pass = on ? TW_BACKWARD : TW_FORWARD, *this; }

  const tw_problem& c() const { return problem_; }
  tw_problem& c() { return problem_; }
  bool operator==(const Problem& other) const { return text() == other.text(); }

 private:
  tw_problem problem_;
};

// Checks options and tensors against each other; returns the problem with its shapes.
inline Problem describe(const Problem& options, const Tensors& tensors) {
  const tw_tensors t = tensors.c();
  Problem problem;
  detail::require(tw_describe(&options.c(), &t, &problem.c()));
  return problem;
}

// ---- 4. One call --------------------------------------------------------------------------------------------------

// Where to run. Default: the backend of the tensors' device, its best kernel, the library's own threads.
struct Target {
  tw_backend backend = TW_BACKEND_AUTO;
  int num_threads = 0;   // CPU; 0 = TILEWISE_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may use
  std::string kernel{};  // a name out of kernels(); refused by name if it cannot take the problem
  int device_index = 0;
  const tw_executor* executor = nullptr;
  std::string config{};  // how its row cuts: "block_m=48 block_n=128 splits=2"

  tw_target c() const {
    return {sizeof(tw_target), backend,  device_index,
            num_threads,       kernel.empty() ? nullptr : kernel.c_str(), executor,
            config.empty() ? nullptr : config.c_str()};
  }
};

// o (and lse, max_logit) from q, k, v.
inline void forward(const Problem& options, const Tensors& tensors, const Target& target = {}, void* stream = nullptr) {
  const tw_tensors t = tensors.c();
  const tw_target where = target.c();
  detail::require(tw_forward(&options.c(), &t, &where, stream));
}

// dq, dk, dv, ... (those that are present) from q, k, v, o, lse, dout.
inline void backward(const Problem& options, const Tensors& tensors, const Target& target = {},
                     void* stream = nullptr) {
  const tw_tensors t = tensors.c();
  const tw_target where = target.c();
  detail::require(tw_backward(&options.c(), &t, &where, stream));
}

// ---- 5. Plan once, run often --------------------------------------------------------------------------------------

// Host memory, 64-byte aligned, for Plan::run.
class Workspace {
 public:
  explicit Workspace(size_t bytes = 0) : bytes_(bytes), data_(bytes ? ::operator new(bytes, kAlign) : nullptr) {}
  void* data() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Delete {
    void operator()(void* data) const { ::operator delete(data, kAlign); }
  };
  size_t bytes_;
  std::unique_ptr<void, Delete> data_;
};

// Which kernel runs, how it cuts the work, what it needs: a pure function of problem and target. Movable, immutable,
// and shared by any number of threads that bring a workspace each.
class Plan {
 public:
  explicit Plan(const Problem& problem, const Target& target = {}) {
    const tw_target where = target.c();
    tw_plan* plan = nullptr;
    detail::require(tw_plan_create(&problem.c(), &where, &plan));
    plan_.reset(plan);
  }

  tw_plan_info info() const {
    tw_plan_info info{};
    info.struct_size = sizeof info;
    detail::require(tw_plan_get_info(plan_.get(), &info));
    return info;
  }
  std::string text() const {
    return detail::text([&](char* buffer, size_t capacity) { return tw_plan_text(plan_.get(), buffer, capacity); });
  }
  Workspace make_workspace() const { return Workspace(static_cast<size_t>(info().workspace_bytes)); }

  // Allocates nothing. `workspace` lies on the plan's device, 64-byte aligned, of at least info().workspace_bytes.
  void run(const Tensors& tensors, void* workspace, size_t workspace_bytes, void* stream = nullptr) const {
    const tw_tensors t = tensors.c();
    detail::require(tw_run(plan_.get(), &t, workspace, workspace_bytes, stream));
  }
  void run(const Tensors& tensors, const Workspace& workspace) const {
    run(tensors, workspace.data(), workspace.size());
  }

  const tw_plan* c() const { return plan_.get(); }

 private:
  struct Destroy {
    void operator()(tw_plan* plan) const { tw_plan_destroy(plan); }
  };
  std::unique_ptr<tw_plan, Destroy> plan_;
};

// ---- 6. Softmax on its own, and merging partial results -----------------------------------------------------------

// y = softmax(x) over the last dimension; x and y may be the same memory. lse: x's shape without its last dimension.
inline void softmax(const ConstTensorView& x, TensorView y, TensorView lse = {}, const Target& target = {}) {
  const tw_target where = target.c();
  detail::require(tw_softmax(x.c(), y.c(), lse.c(), &where, nullptr));
}

// The online softmax as an object: push scores as they come, read the result at any time, merge two of them.
class Accumulator {
 public:
  explicit Accumulator(int64_t num_rows, int64_t value_dim = 0) {
    tw_accumulator* accumulator = nullptr;
    detail::require(tw_accumulator_create(num_rows, value_dim, &accumulator));
    accumulator_.reset(accumulator);
  }
  // scores [num_rows, n]; values [n, value_dim] or [num_rows, n, value_dim], absent iff value_dim = 0
  void push(const ConstTensorView& scores, const ConstTensorView& values = {}) {
    detail::require(tw_accumulator_push(accumulator_.get(), scores.c(), values.c()));
  }
  void merge(const Accumulator& from) {
    detail::require(tw_accumulator_merge(accumulator_.get(), from.accumulator_.get()));
  }
  // [num_rows]
  void lse(TensorView out) const { detail::require(tw_accumulator_lse(accumulator_.get(), out.c())); }
  // [num_rows, value_dim]
  void result(TensorView out) const { detail::require(tw_accumulator_result(accumulator_.get(), out.c())); }
  // exp(scores - lse) for a chunk pushed before: the second pass of a softmax over a stream
  void probabilities(const ConstTensorView& scores, TensorView out) const {
    detail::require(tw_accumulator_probabilities(accumulator_.get(), scores.c(), out.c()));
  }

 private:
  struct Destroy {
    void operator()(tw_accumulator* accumulator) const { tw_accumulator_destroy(accumulator); }
  };
  std::unique_ptr<tw_accumulator, Destroy> accumulator_;
};

// Merges the attention over other keys into (o, lse): split-KV, ring attention.
inline void merge_states(TensorView o, TensorView lse, const ConstTensorView& o_other,
                         const ConstTensorView& lse_other) {
  detail::require(tw_merge_states(o.c(), lse.c(), o_other.c(), lse_other.c(), nullptr));
}

// ---- 7. Introspection ---------------------------------------------------------------------------------------------

// Every kernel's refusal in words, then the plan.
inline std::string explain(const Problem& problem, const Target& target = {}) {
  const tw_target where = target.c();
  return detail::text(
      [&](char* buffer, size_t capacity) { return tw_explain(&problem.c(), &where, buffer, capacity); });
}

// The table of kernels, best first.
inline std::vector<tw_kernel_info> kernels() {
  std::vector<tw_kernel_info> table(static_cast<size_t>(tw_kernel_count()));
  for (size_t n = 0; n < table.size(); ++n) {
    table[n].struct_size = sizeof(tw_kernel_info);
    detail::require(tw_kernel_at(static_cast<int32_t>(n), &table[n]));
  }
  return table;
}

// The machine as the library sees it: instruction sets, caches, threads, GPUs.
inline std::string machine() {
  return detail::text([](char* buffer, size_t capacity) { return tw_machine_text(buffer, capacity); });
}

// ---- 8. Memory ----------------------------------------------------------------------------------------------------

inline tw_memory_options memory_options() {
  tw_memory_options options;
  tw_memory_options_init(&options);
  return options;
}

// What a problem takes in memory, by standard attention and by Tilewise, without running it.
inline tw_memory_info memory(const Problem& problem, const tw_memory_options& options, const Target& target = {}) {
  tw_memory_info info{};
  info.struct_size = sizeof info;
  const tw_target where = target.c();
  detail::require(tw_memory(&problem.c(), &options, &where, &info));
  return info;
}
inline tw_memory_info memory(const Problem& problem, const Target& target = {}) {
  return memory(problem, memory_options(), target);
}

// The formulas with the numbers in them; `gpu`: the name of one of tw_gpu_at, "" = none.
inline std::string explain_memory(const Problem& problem, const tw_memory_options& options, const Target& target = {},
                                  const std::string& gpu = "") {
  const tw_target where = target.c();
  return detail::text([&](char* buffer, size_t capacity) {
    return tw_memory_explain(&problem.c(), &options, &where, gpu.empty() ? nullptr : gpu.c_str(), buffer, capacity);
  });
}

inline std::string version() { return tw_version(); }

}  // namespace tilewise::inline v0

#endif  // TILEWISE_HPP
