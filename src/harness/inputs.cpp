#include "harness/inputs.h"

#include <cmath>

#include "harness/gpu.h"

namespace tilewise::harness {
namespace {

constexpr const char* kKindNames[kNumInputKinds] = {"gaussian", "peaked", "lowrank", "constant", "onehot", "growing", "negative"};

}  // namespace

const char* input_kind_name(InputKind kind) { return kKindNames[static_cast<int>(kind)]; }

bool input_kind_from_name(std::string_view name, InputKind* out) {
  for (int n = 0; n < kNumInputKinds; ++n)
    if (name == kKindNames[n]) return *out = static_cast<InputKind>(n), true;
  return false;
}

tw_tensors Inputs::tensors() {
  tw_tensors t{};
  t.struct_size = sizeof t;
  t.q = q.tensor(), t.k = k.tensor(), t.v = v.tensor(), t.o = o.tensor(), t.lse = lse.tensor();
  t.max_logit = max_logit.tensor();
  t.bias = bias.tensor(), t.alibi_slopes = alibi_slopes.tensor(), t.sink = sink.tensor();
  t.rng_state = rng_state.tensor(), t.dropout_mask = dropout_mask.tensor();
  t.cu_seqlens_q = cu_seqlens_q.tensor(), t.cu_seqlens_k = cu_seqlens_k.tensor();
  t.seqused_q = seqused_q.tensor(), t.seqused_k = seqused_k.tensor();
  t.page_table = page_table.tensor(), t.cache_batch_idx = cache_batch_idx.tensor(), t.leftpad_k = leftpad_k.tensor();
  t.k_new = k_new.tensor(), t.v_new = v_new.tensor();
  t.rotary_cos = rotary_cos.tensor(), t.rotary_sin = rotary_sin.tensor(), t.rotary_seqlens = rotary_seqlens.tensor();
  t.dout = dout.tensor(), t.dlse = dlse.tensor();
  t.dq = dq.tensor(), t.dk = dk.tensor(), t.dv = dv.tensor();
  t.dbias = dbias.tensor(), t.dalibi = dalibi.tensor(), t.dsink = dsink.tensor();
  return t;
}

std::vector<Inputs::Named> Inputs::inputs() {
  std::vector<Named> all = {{"q", &q}, {"k", &k}, {"v", &v}, {"bias", &bias}, {"alibi_slopes", &alibi_slopes},
                            {"sink", &sink}, {"rng_state", &rng_state}, {"cu_seqlens_q", &cu_seqlens_q},
                            {"cu_seqlens_k", &cu_seqlens_k}, {"seqused_q", &seqused_q}, {"seqused_k", &seqused_k},
                            {"page_table", &page_table}, {"cache_batch_idx", &cache_batch_idx}, {"leftpad_k", &leftpad_k},
                            {"k_new", &k_new}, {"v_new", &v_new}, {"rotary_cos", &rotary_cos}, {"rotary_sin", &rotary_sin},
                            {"rotary_seqlens", &rotary_seqlens}, {"dout", &dout}, {"dlse", &dlse}};
  if (problem_.pass == TW_BACKWARD) all.push_back({"o", &o}), all.push_back({"lse", &lse});
  std::erase_if(all, [](const Named& named) { return !named.buffer->exists(); });
  return all;
}

std::vector<Inputs::Named> Inputs::outputs() {
  std::vector<Named> all = {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dbias", &dbias}, {"dalibi", &dalibi}, {"dsink", &dsink}};
  if (problem_.pass == TW_FORWARD) all = {{"o", &o}, {"lse", &lse}, {"max_logit", &max_logit}, {"dropout_mask", &dropout_mask}};
  std::erase_if(all, [](const Named& named) { return !named.buffer->exists(); });
  return all;
}

void Inputs::add_to(GpuTensors* there) {
  for (const auto& list : {inputs(), outputs()})
    for (const Named& named : list) there->add(named.buffer->tensor(), named.buffer->allocation(), named.buffer->bytes().size());
}

void Inputs::poison_outputs() {
  for (const Named& output : outputs()) output.buffer->poison();
}

tw_problem Inputs::forward_problem() const {
  tw_problem p = problem_;
  p.pass = TW_FORWARD;
  p.features &= ~uint32_t{TW_HAS_DLSE | TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV | TW_HAS_DBIAS | TW_HAS_DALIBI | TW_HAS_DSINK};
  p.features |= TW_HAS_LSE;
  return p;
}

void Inputs::set_forward(const std::vector<double>& o_values, const std::vector<double>& lse_values) {
  o.poison();
  lse.poison();
  if (options_.dead != Dead::kNan) {
    const double dead = options_.dead == Dead::kZero ? 0 : INFINITY;
    o.set_values(std::vector<double>(o_values.size(), dead));
    lse.set_values(std::vector<double>(lse_values.size(), dead));
  }
  for (int64_t b = 0; b < problem_.batch; ++b)
    for (int64_t h = 0; h < problem_.num_heads_q; ++h)
      for (int64_t i = 0; i < lengths_[static_cast<size_t>(b)].seqlen_q; ++i) {
        const int64_t begin = q_row(b, i, h) * problem_.head_dim_v;
        for (int64_t n = begin; n < begin + problem_.head_dim_v; ++n) o.set(n, o_values[static_cast<size_t>(n)]);
        const int64_t at = lse_index(b, i, h);
        lse.set(at, lse_values[static_cast<size_t>(at)]);
      }
}

int64_t Inputs::q_row(int64_t b, int64_t i, int64_t h) const {
  const int64_t token = problem_.q_layout == TW_PACKED ? lengths_[static_cast<size_t>(b)].q_begin + i : b * problem_.seqlen_q + i;
  return token * problem_.num_heads_q + h;
}

int64_t Inputs::lse_index(int64_t b, int64_t i, int64_t h) const {
  if (problem_.q_layout == TW_PACKED) return h * problem_.total_q + lengths_[static_cast<size_t>(b)].q_begin + i;
  return (b * problem_.num_heads_q + h) * problem_.seqlen_q + i;
}

int64_t Inputs::k_row(int64_t b, int64_t position, int64_t h) const {
  const Lengths& entry = lengths_[static_cast<size_t>(b)];
  int64_t token;
  if (problem_.k_layout == TW_PACKED) {
    token = entry.k_begin + position;
  } else if (problem_.k_layout == TW_PAGED) {
    const int64_t page = static_cast<int64_t>(page_table.get(b * page_table.row_size() + position / problem_.page_size));
    token = page * problem_.page_size + position % problem_.page_size;
  } else {
    token = entry.cache_row * problem_.seqlen_k + position;
  }
  return token * problem_.num_heads_k + h;
}

int64_t Inputs::bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const auto& shape = bias.shape();
  return (((shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h)) * shape[2] + (shape[2] == 1 ? 0 : i)) * shape[3] +
         (shape[3] == 1 ? 0 : j);
}

bool Inputs::in_mask(int64_t b, int64_t i, int64_t j) const {
  const Lengths& entry = lengths_[static_cast<size_t>(b)];
  const int64_t before = i + entry.seqlen_k - entry.seqlen_q - j;  // how far j lies before the row's diagonal
  if (problem_.causal && before < 0) return false;
  if (problem_.window_left >= 0 && before > problem_.window_left) return false;
  if (problem_.window_right >= 0 && -before > problem_.window_right) return false;
  return true;
}

bool Inputs::visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  if (!in_mask(b, i, j)) return false;
  return !bias.exists() || bias.dtype() != TW_BOOL || bias.get(bias_index(b, h, i, j)) != 0;
}

tw_tensors without_gradients(tw_tensors t) {
  t.dout = t.dlse = nullptr;
  t.dq = t.dk = t.dv = t.dbias = t.dalibi = t.dsink = nullptr;
  return t;
}

}  // namespace tilewise::harness
