#include "core/memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "core/dtype.h"
#include "core/validate.h"

namespace tilewise {
namespace {

constexpr int64_t kMost = int64_t{1} << 58;  // sums of thirty stay inside int64; no machine has as much

int64_t times(std::initializer_list<int64_t> factors) {  // at most kMost
  int64_t product = 1;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(product, factor, &product) || product > kMost) return kMost;
  return product;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tensors of a problem, in bytes.
struct Sizes {
  const tw_problem& p;
  int64_t e;

  explicit Sizes(const tw_problem& problem) : p(problem), e(dtype_size(problem.dtype)) {}

  int64_t k_rows() const {  // stored ones, per head
    if (p.k_layout == TW_PAGED) return times({p.num_pages, p.page_size});
    if (p.k_layout == TW_PACKED) return p.total_k;
    return times({p.cache_batch > 0 ? p.cache_batch : p.batch, p.seqlen_k});
  }
  int64_t q() const { return times({query_rows(p), p.num_heads_q, p.head_dim, e}); }
  int64_t k() const { return times({k_rows(), p.num_heads_k, p.head_dim, e}); }
  int64_t v() const { return times({k_rows(), p.num_heads_k, p.head_dim_v, e}); }
  int64_t o() const { return times({query_rows(p), p.num_heads_q, p.head_dim_v, e}); }
  int64_t lse() const { return times({query_rows(p), p.num_heads_q, 4}); }
  int64_t bias_elements() const {
    return times({p.bias_dims & TW_DIM_B ? p.batch : 1, p.bias_dims & TW_DIM_H ? p.num_heads_q : 1,
                  p.bias_dims & TW_DIM_Q ? p.seqlen_q : 1, p.bias_dims & TW_DIM_K ? p.seqlen_k : 1});
  }
  int64_t bias() const { return has(p, TW_HAS_BIAS) ? times({bias_elements(), dtype_size(p.bias_dtype)}) : 0; }
  // k and v of one layer; a window (> 0) leaves its keys of each sequence, in whole pages, of which one more may be begun.
  int64_t cache(int64_t window) const {
    int64_t rows = k_rows();
    if (window > 0) {
      const int64_t page = p.k_layout == TW_PAGED ? std::max<int64_t>(p.page_size, 1) : 1;
      const int64_t keys = page > 1 ? (divide_up(window, page) + 1) * page : window;
      rows = std::min(rows, times({p.cache_batch > 0 ? p.cache_batch : p.batch, keys}));
    }
    return times({rows, p.num_heads_k, p.head_dim + p.head_dim_v, e});
  }
  int64_t new_keys() const { return times({p.batch, p.seqlen_new, p.num_heads_k, p.head_dim + p.head_dim_v, e}); }
  int64_t gradients() const {  // dout and what the problem asks for
    int64_t bytes = o();
    if (has(p, TW_HAS_DQ)) bytes += q();
    if (has(p, TW_HAS_DK)) bytes += k();
    if (has(p, TW_HAS_DV)) bytes += v();
    if (has(p, TW_HAS_DBIAS)) bytes += bias();
    return bytes;
  }
};

// A ledger whose sizes are products: the formula is the product with the numbers in it.
struct Book {
  Ledger& ledger;

  void take(const char* name, std::initializer_list<int64_t> factors) {
    std::string formula;
    for (int64_t factor : factors) formula += concat(formula.empty() ? "" : " x ", factor);
    ledger.take(name, formula, times(factors));
  }
  void give(const char* name) { ledger.give(name); }
};

bool hides_keys(const tw_problem& p) {  // whether a framework would build a mask of sq x sk
  constexpr uint32_t kLengths = TW_HAS_SEQUSED_Q | TW_HAS_SEQUSED_K | TW_HAS_LEFTPAD_K;
  return p.causal || p.window_left >= 0 || p.window_right >= 0 || (p.features & kLengths) || p.k_layout != TW_DENSE;
}

constexpr const char* kSoftmax = "P of the softmax, float32";  // float64 with float64 inputs
constexpr const char* kRounded = "P in the dtype";
constexpr const char* kDropped = "P after dropout";

// Names of what the product with v reads, and whether P has to be rounded for it.
struct Standard {
  const tw_problem& p;
  int64_t e = dtype_size(p.dtype), wide = std::max<int64_t>(e, 4);
  bool narrow = e<4, dropout = p.dropout_p> 0;
  int64_t b = p.batch, hq = p.num_heads_q, sq = p.seqlen_q, sk = p.seqlen_k, d = p.head_dim, dv = p.head_dim_v;

  const char* multiplied() const { return dropout ? kDropped : narrow ? kRounded : kSoftmax; }

  void forward(Book book, bool training) const {
    // Products of matrices want heads outside, and as many key heads as query heads.
    book.take("q by heads", {e, b, hq, sq, d});
    book.take("k by query heads", {e, b, hq, sk, d});
    book.take("v by query heads", {e, b, hq, sk, dv});
    const bool ragged = has(p, TW_HAS_SEQUSED_K) || has(p, TW_HAS_LEFTPAD_K) || p.k_layout != TW_DENSE;
    if (hides_keys(p)) book.take("mask", {1, ragged ? b : 1, sq, sk});
    book.take("S, scores", {e, b, hq, sq, sk});
    if (p.softcap > 0) {
      book.take("tanh of the scores", {e, b, hq, sq, sk});
      book.give("S, scores");
      book.take("S, scores", {e, b, hq, sq, sk});
      if (!training) book.give("tanh of the scores");
    }
    if (has(p, TW_HAS_ALIBI)) {
      book.take("slopes times distances", {e, p.alibi_dims & TW_DIM_B ? b : 1, hq, sq, sk});
      book.give("slopes times distances");
    }
    if (narrow) book.take("S in float32", {4, b, hq, sq, sk});
    book.take(kSoftmax, {wide, b, hq, sq, sk});
    if (narrow) {
      book.give("S in float32");
      book.take(kRounded, {e, b, hq, sq, sk});
      if (!training) book.give(kSoftmax);
    }
    book.give("S, scores");
    if (dropout) {
      book.take("dropout's mask", {1, b, hq, sq, sk});
      book.take(kDropped, {e, b, hq, sq, sk});
      if (narrow) book.give(kRounded);
      if (!training) book.give("dropout's mask"), book.give(kSoftmax);
    }
    book.take("o by heads", {e, b, hq, sq, dv});
    book.take("o", {e, b, sq, hq, dv});
    book.give("o by heads");
  }

  void backward(Book book) const {
    book.take("dout", {e, b, sq, hq, dv});
    book.take("dP in the dtype", {e, b, hq, sq, sk});
    book.take("dv by query heads", {e, b, hq, sk, dv});
    book.give("v by query heads");
    if (dropout || narrow) book.give(multiplied());
    if (dropout) {
      book.take("dP before dropout", {e, b, hq, sq, sk});
      book.give("dP in the dtype");
      book.give("dropout's mask");
    }
    if (narrow) {
      book.take("dP in float32", {4, b, hq, sq, sk});
      book.give(dropout ? "dP before dropout" : "dP in the dtype");
    }
    // dS = P * dP - P * rowsum(P * dP), the products in one tensor
    book.take("P * dP", {wide, b, hq, sq, sk});
    book.take("dS, unrounded", {wide, b, hq, sq, sk});
    book.give("P * dP");
    book.give(kSoftmax);
    for (const char* name : {"dP in float32", "dP before dropout", "dP in the dtype"}) book.give(name);
    if (narrow) {
      book.take("dS in the dtype", {e, b, hq, sq, sk});
      book.give("dS, unrounded");
    }
    if (p.softcap > 0) {
      book.take("dS before the cap", {e, b, hq, sq, sk});
      book.give("tanh of the scores");
      for (const char* name : {"dS, unrounded", "dS in the dtype"}) book.give(name);
    }
    if (has(p, TW_HAS_DBIAS)) book.take("dbias", {Sizes(p).bias_elements(), dtype_size(p.bias_dtype)});
    book.take("dq by heads", {e, b, hq, sq, d});
    book.take("dk by query heads", {e, b, hq, sk, d});
    for (const char* name :
         {"dS, unrounded", "dS in the dtype", "dS before the cap", "mask", "q by heads", "k by query heads"})
      book.give(name);
    book.take("dq", {e, b, sq, hq, d});
    book.give("dq by heads");
    book.take("dk", {e, b, sk, p.num_heads_k, d});
    book.give("dk by query heads");
    book.take("dv", {e, b, sk, p.num_heads_k, dv});
    book.give("dv by query heads");
  }

  // Matrices of sq x sk written and read: S and P in the dtype and around the softmax; backward P, dP, dS and the
  // softmax's own.
  double matrix_bytes(bool training) const {
    const auto element = static_cast<double>(e), softmax = static_cast<double>(wide);
    double bytes = narrow ? 4 * element + 4 * softmax : 4 * element;
    if (dropout) bytes += 2 * element + 2;
    if (p.softcap > 0) bytes += 4 * element;
    if (training) bytes += narrow ? 7 * element + 9 * softmax : 10 * element;
    return bytes * static_cast<double>(b) * static_cast<double>(hq) * static_cast<double>(sq) * static_cast<double>(sk);
  }
};

// Workspace of the CUDA kernels where no plan can be made, because there is no GPU or no CUDA in this build. Forward:
// nothing of size. Backward: two numbers a query row, and dQ in float32 with rows and columns rounded up.
Status cuda_workspace(const tw_problem& p, int64_t* forward, int64_t* backward) {
  if (p.dtype == TW_FLOAT64) return unsupported("dtype f64: the CUDA kernels take f16, bf16 and f32");
  *forward = p.num_splits > 1 ? times({p.num_splits, query_rows(p), p.num_heads_q, p.head_dim_v + 1, 4}) : 0;
  if (p.rotary_dim > 0) *forward += Sizes(p).q();
  int64_t columns = 0;
  for (int64_t built : {32, 64, 96, 128, 192, 256})
    if (columns == 0 && built >= std::max(p.head_dim, p.head_dim_v)) columns = built;
  constexpr int64_t kRows = 128;
  const int64_t rows = p.q_layout == TW_PACKED ? (p.total_q / kRows + p.batch + 1) * kRows
                                               : times({p.batch, divide_up(p.seqlen_q, kRows), kRows});
  *backward = times({rows, p.num_heads_q, 4, 2 + (has(p, TW_HAS_DQ) ? columns : 0)});
  if (has(p, TW_HAS_DBIAS)) *backward += times({Sizes(p).bias_elements(), 8});  // sums in integers, whose order does not matter
  return Status();
}

Status workspaces(const tw_problem& p, const Target& target, std::span<const KernelRow> rows, int64_t* forward,
                  int64_t* backward, bool* planned) {
  Plan plan;
  Target where = target;
  *forward = *backward = 0;
  *planned = true;
  const auto passes = {forward_problem(p), p};
  for (const tw_problem& pass : passes) {
    Status status = make_plan(pass, where, rows, &plan);
    if (status.code() == TW_UNSUPPORTED && p.device == TW_CUDA) {
      *planned = false;
      return cuda_workspace(p, forward, backward);
    }
    if (!status.ok()) return status;
    (pass.pass == TW_FORWARD ? *forward : *backward) = plan.workspace_bytes;
  }
  return Status();
}

Status check_options(const tw_memory_options& o) {
  if (o.layers < 1) return invalid("layers ", o.layers, ": must be >= 1");
  if (o.hidden_size < 0) return invalid("hidden_size ", o.hidden_size, ": must be >= 0 (0 = num_heads_q * head_dim)");
  if (o.tensor_parallel < 1) return invalid("tensor_parallel ", o.tensor_parallel, ": must be >= 1");
  if (o.context_parallel < 1) return invalid("context_parallel ", o.context_parallel, ": must be >= 1");
  if (o.checkpointing != 0 && o.checkpointing != 1)
    return invalid("checkpointing ", o.checkpointing, ": must be 0 or 1");
  if (o.window_layers < 0 || o.window_layers > o.layers)
    return invalid("window_layers ", o.window_layers, ": must be in [0, layers ", o.layers, "]");
  if (o.window < (o.window_layers > 0 ? 1 : 0)) return invalid("window ", o.window, ": must be >= 1 with window_layers");
  return Status();
}

// Inputs and all layers at the worst moment. `kept`: what a layer holds from its forward to its backward pass.
int64_t total_of(const tw_problem& p, const tw_memory_options& o, const tw_memory_info& info, const tw_memory_use& use,
                 int64_t kept) {
  const int64_t peak = std::max(use.peak_forward, use.peak_backward), others = o.layers - 1;
  if (p.pass == TW_FORWARD) {  // k and v of each layer stay: the KV cache. A layer that sees everything is at work, if there is one
    const int64_t cp = o.context_parallel, windowed = std::min(o.window_layers, others);
    return info.inputs + peak + times({others - windowed, divide_up(Sizes(p).cache(0), cp)}) +
           times({windowed, divide_up(Sizes(p).cache(o.window), cp)});
  }
  if (o.checkpointing) return info.inputs + peak + times({o.layers, info.layer_input});
  return info.inputs + peak + times({others, info.inputs + kept});
}

}  // namespace

void Ledger::take(const std::string& name, const std::string& formula, int64_t bytes) {
  entries_.push_back({name, formula, bytes});
  live_ = std::min(live_ + bytes, kMost);
  if (live_ > peak_) peak_ = live_, at_peak_ = entries_;
}

void Ledger::give(const std::string& name) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.name == name; });
  if (entry == entries_.end()) return;
  live_ -= entry->bytes;
  entries_.erase(entry);
}

tw_problem forward_problem(const tw_problem& problem) {
  constexpr uint32_t kGradients =
      TW_HAS_DLSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV | TW_HAS_DBIAS | TW_HAS_DALIBI | TW_HAS_DSINK;
  tw_problem forward = problem;
  if (problem.pass == TW_FORWARD) return forward;
  forward.pass = TW_FORWARD;
  forward.features = (problem.features & ~kGradients) | TW_HAS_LSE;
  return forward;
}

StandardMemory standard_memory(const tw_problem& p, bool training) {
  const Standard standard{p};
  StandardMemory memory;
  standard.forward(Book{memory.forward}, training);
  memory.bytes_moved = bytes_moved(training ? p : forward_problem(p)) + standard.matrix_bytes(training);
  if (!training) return memory;
  memory.saved = memory.forward.live() - Sizes(p).o();
  memory.backward = memory.forward;
  memory.backward.restart_peak();
  standard.backward(Book{memory.backward});
  return memory;
}

tw_memory_options default_memory_options() { return {sizeof(tw_memory_options), 0, 1, 0, 1, 1, 0, 0}; }

Status device_share(const tw_problem& problem, const tw_memory_options& options, tw_problem* share) {
  TW_RETURN_IF_ERROR(check_options(options));
  *share = problem;
  const int64_t tp = options.tensor_parallel, cp = options.context_parallel, hk = problem.num_heads_k;
  if (problem.num_heads_q % tp != 0)
    return invalid("tensor_parallel ", tp, ": must divide num_heads_q ", problem.num_heads_q);
  if (hk % tp != 0 && tp % std::max<int64_t>(hk, 1) != 0)
    return invalid("tensor_parallel ", tp, ": must divide num_heads_k ", hk, " or be a multiple of it");
  share->num_heads_q /= tp;
  share->num_heads_k = std::max<int64_t>(hk / tp, std::min<int64_t>(hk, 1));
  if (cp == 1) return Status();
  if (problem.q_layout != TW_DENSE || problem.k_layout != TW_DENSE)
    return invalid("context_parallel ", cp, ": takes dense q, k and v; must be 1 with packed or paged ones");
  share->seqlen_q = divide_up(problem.seqlen_q, cp);
  return Status();
}

Status memory_of(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                 std::span<const KernelRow> rows, tw_memory_info* out) {
  TW_RETURN_IF_ERROR(validate_problem(problem));
  tw_problem p;
  TW_RETURN_IF_ERROR(device_share(problem, options, &p));
  const bool training = p.pass == TW_BACKWARD;
  const Sizes sizes(p);
  const int64_t cp = options.context_parallel, cache = divide_up(sizes.cache(0), cp);
  // With context parallelism the layer at work has gathered all keys, and in the end all of their gradients.
  const int64_t gathered = cp > 1 ? sizes.k() + sizes.v() : 0;
  int64_t forward = 0, backward = 0;
  bool planned = true;
  TW_RETURN_IF_ERROR(workspaces(p, target, rows, &forward, &backward, &planned));

  const uint32_t struct_size = out->struct_size;
  std::memset(out, 0, sizeof *out);
  out->struct_size = struct_size;
  out->planned = planned;
  out->inputs = sizes.q() + cache + sizes.bias() + sizes.new_keys();
  const int64_t hidden = options.hidden_size > 0 ? options.hidden_size : problem.num_heads_q * problem.head_dim;
  out->layer_input = times({query_rows(p), hidden, sizes.e});
  out->flops = flops(forward_problem(p)) * (training ? 3.5 : 1);
  out->tiled_bytes_moved = bytes_moved(forward_problem(p)) + (training ? bytes_moved(p) : 0);

  tw_memory_use& tiled = out->tiled;
  const bool lse = training || has(p, TW_HAS_LSE);
  tiled.outputs = sizes.o() + (lse ? sizes.lse() : 0);
  tiled.workspace_forward = forward + gathered;
  tiled.peak_forward = tiled.outputs + tiled.workspace_forward;
  if (training) {
    tiled.saved = tiled.outputs;
    tiled.gradients = sizes.gradients();
    tiled.workspace_backward = backward + 2 * gathered;
    tiled.peak_backward = tiled.outputs + tiled.gradients + tiled.workspace_backward;
  }
  tiled.total = total_of(p, options, *out, tiled, tiled.saved);

  tw_memory_use& standard = out->standard;
  const StandardMemory memory = standard_memory(p, training);
  standard.outputs = sizes.o();
  standard.saved = memory.saved;
  standard.peak_forward = memory.forward.peak() + gathered;
  standard.workspace_forward = standard.peak_forward - standard.outputs - standard.saved;
  if (training) {
    standard.gradients = sizes.gradients();
    standard.peak_backward = memory.backward.peak() + gathered;
    standard.workspace_backward =
        std::max<int64_t>(standard.peak_backward - standard.outputs - standard.saved - standard.gradients, 0);
  }
  out->standard_bytes_moved = memory.bytes_moved;
  standard.total = total_of(p, options, *out, standard, standard.saved + standard.outputs);
  return Status();
}

int64_t standard_bytes(const tw_problem& p) {
  const StandardMemory memory = standard_memory(p, p.pass == TW_BACKWARD);
  const int64_t o = Sizes(p).o();
  return p.pass == TW_FORWARD ? memory.forward.peak() - o : std::max<int64_t>(memory.backward.peak() - 2 * o, 0);
}

Status largest_that_fits(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                         std::span<const KernelRow> rows, int64_t budget, std::string_view key, bool standard,
                         int64_t* out) {
  if (budget < 1) return invalid("budget ", budget, ": must be >= 1 byte");
  if (key != "sq" && key != "b" && key != "hq") return invalid("key \"", key, "\": must be sq, b or hq");
  if (problem.q_layout != TW_DENSE || problem.k_layout == TW_PACKED || (problem.k_layout == TW_PAGED && key == "hq"))
    return unsupported("key \"", key, "\": the solver takes dense tensors");
  const int64_t group = std::max<int64_t>(group_size(problem), 1), tp = options.tensor_parallel;
  // Values count in steps that keep the problem valid: whole groups of heads on every device.
  const int64_t step = key == "hq" ? group * tp : key == "sq" && problem.seqlen_q != 1 ? options.context_parallel : 1;
  const auto at = [&](int64_t steps) {
    tw_problem p = problem;
    const int64_t value = steps * step;
    if (key == "b") {
      p.batch = value;
    } else if (key == "hq") {
      p.num_heads_q = value, p.num_heads_k = value / group;
    } else {
      if (problem.seqlen_q != 1) p.seqlen_q = value;
      if (problem.seqlen_q == problem.seqlen_k || problem.seqlen_q == 1) p.seqlen_k = value;
    }
    if (p.k_layout == TW_PAGED)
      p.num_pages = times({p.batch, divide_up(p.seqlen_k, std::max<int64_t>(p.page_size, 1))});
    return p;
  };
  Status failure;
  const auto fits = [&](int64_t steps) {
    tw_memory_info info{};
    Status status = memory_of(at(steps), options, target, rows, &info);
    if (!status.ok()) failure = status;
    return status.ok() && (standard ? info.standard.total : info.tiled.total) <= budget;
  };
  int64_t low = 0, high = 1;
  while (high < (int64_t{1} << 40) && fits(high)) low = high, high *= 2;
  if (low == 0) TW_RETURN_IF_ERROR(failure);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  *out = low * step;
  return Status();
}

}  // namespace tilewise
