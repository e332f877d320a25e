// Every tensor of a problem, from the problem alone: values, ragged lengths, page tables, and NaN wherever a value must
// not matter (cache tails, page tails, unreferenced pages, holes, packed tails, masked bias) and in all outputs.
//
// Values depend on (kind, seed, element), not on layout or order, so that any two layouts hold the same problem; only
// kExpanded, which shares memory between batch entries, makes another one.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "harness/buffer.h"

namespace tilewise::harness {

class GpuTensors;

enum class InputKind {
  kGaussian,  // N(0, 1)
  kPeaked,    // q, k from N(0, 9): one key dominates
  kLowrank,   // q, k of rank 2 plus noise, v and dout of one sign: biased rounding shows
  kConstant,  // one value per tensor: o = v exactly
  kOnehot,    // q, k one-hot: many equal maxima
  kGrowing,   // logits rise along the keys: every block of keys has a new maximum
  kNegative,  // logits about -200: padding with 0 instead of -inf would overflow
};
inline constexpr int kNumInputKinds = 7;
const char* input_kind_name(InputKind kind);
bool input_kind_from_name(std::string_view name, InputKind* out);

// What lies where values must not matter.
enum class Dead { kNan, kInfinity, kZero };

struct InputOptions {
  InputKind kind = InputKind::kGaussian;
  uint64_t seed = 1;
  Layout layout = Layout::kContiguous;
  Dead dead = Dead::kNan;        // kZero makes the twin that the others must equal bit for bit
  bool nan_rows = false;         // NaN or inf in a few whole rows, which some queries see and others need not
  bool float32_outputs = false;  // o of the forward pass and the gradients in float32, whatever q is
  bool float32_o = false;        // o and dout of the backward pass in float32
};

// One batch entry.
struct Lengths {
  int64_t q_begin = 0;      // packed: its first row of q
  int64_t seqlen_q = 0;     // rows in use
  int64_t k_begin = 0;      // packed: its first row of k
  int64_t used_k = 0;       // keys in use before the append, left padding included
  int64_t leftpad = 0;
  int64_t cache_row = 0;    // dense: its row of k
  int64_t rotary_base = 0;  // position of the first query and of the first new key
  int64_t seqlen_k = 0;     // keys that take part: after the append, left padding excluded
};

class Inputs {
 public:
  // TW_OK, or what the problem lacks to be built (text in *error).
  static tw_status make(const tw_problem& problem, const InputOptions& options, std::unique_ptr<Inputs>* out,
                        std::string* error);

  const tw_problem& problem() const { return problem_; }
  const InputOptions& options() const { return options_; }
  tw_tensors tensors();  // pointers into this object

  struct Named {
    const char* name;
    Buffer* buffer;
  };
  std::vector<Named> inputs();   // those that exist; k and v too, even if appended to
  std::vector<Named> outputs();  // those that exist; k and v not among them
  bool appends() const { return k_new.exists() && k_new.size() + v_new.size() > 0; }
  void poison_outputs();
  void add_to(GpuTensors* there);  // copies of everything, with the guards

  // The backward pass takes o and lse of this forward problem.
  tw_problem forward_problem() const;
  void set_forward(const std::vector<double>& o_values, const std::vector<double>& lse_values);  // NaN into dead rows

  // Row numbers (a tensor's elements / row_size), derived here and not from the library's headers.
  const std::vector<Lengths>& lengths() const { return lengths_; }
  int64_t q_row(int64_t b, int64_t i, int64_t h) const;           // in q, o, dout, dq
  int64_t lse_index(int64_t b, int64_t i, int64_t h) const;       // in lse, dlse
  int64_t k_row(int64_t b, int64_t position, int64_t h) const;    // in k, v, dk, dv; position = j + leftpad
  int64_t bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const;
  bool in_mask(int64_t b, int64_t i, int64_t j) const;            // causal and window
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const;  // and the boolean bias

  Buffer q, k, v, o, lse, max_logit, bias, alibi_slopes, sink, rng_state, dropout_mask;
  Buffer cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Buffer page_table, cache_batch_idx, leftpad_k, k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens;
  Buffer dout, dlse, dq, dk, dv, dbias, dalibi, dsink;

 private:
  friend class InputMaker;
  tw_problem problem_{};
  InputOptions options_;
  std::vector<Lengths> lengths_;
  std::vector<int64_t> query_index_;  // per row of q ([b * sq] or [total_q]): its i, or -1 if it is no one's
  std::vector<int64_t> key_index_;    // per row of k storage: its j, or -1 if no one reads it before the append
};

tw_tensors without_gradients(tw_tensors tensors);  // those of the forward pass

}  // namespace tilewise::harness
