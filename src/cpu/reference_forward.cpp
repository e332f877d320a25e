// The forward pass, row by row:
//
//   s_j = cap(scale * (q . k_j)) + alibi_j + bias_j      for the keys j that the row sees
//   lse = log(exp(sink) + sum_j exp(s_j))                p_j = exp(s_j - lse)
//   o   = sum_j dropout(p_j) v_j
#include "cpu/kv_append.h"
#include "cpu/reference_common.h"
#include "cpu/thread_pool.h"

namespace tilewise::reference {
namespace {

struct Scratch {  // of one worker
  double *q, *row, *o, *s;

  Scratch(Arena& arena, const tw_problem& p)
      : q(arena.take(p.head_dim)),
        row(arena.take(std::max(p.head_dim, p.head_dim_v))),
        o(arena.take(p.head_dim_v)),
        s(arena.take(p.seqlen_k)) {}
};

// Returns the row's largest visible score.
double forward_row(const Call& call, const Sequence& s, int64_t h, int64_t i, const Scratch& scratch) {
  const tw_problem& p = call.p;
  const tw_tensors& t = call.t;
  const int64_t key_head = call.key_head(h);
  const KeyRange keys = call.mask.keys(i, s.seqlen_q, s.seqlen_k);
  const auto load_key_row = [&](const tw_tensor& x, int64_t j, int64_t n) {
    load_row(x, key_offset(p, t, x, s, j + s.leftpad, key_head), n, scratch.row);
  };

  rotate_query_row(p, t, s, i, h, scratch.q);
  double max_score = -kInfinity;
  bool any_nan = false;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (!call.visible(s, h, i, j)) continue;
    load_key_row(*t.k, j, p.head_dim);
    const double score = call.capped(dot(scratch.q, scratch.row, p.head_dim)) + call.added(s, h, i, j);
    scratch.s[j] = score;
    if (score > max_score) max_score = score;
    any_nan |= std::isnan(score);
  }

  const double max = std::max(max_score, call.sink(h));
  double sum = OnlineSoftmax<double>::weight(call.sink(h), max);
  for (int64_t j = keys.begin; j < keys.end; ++j)
    if (call.visible(s, h, i, j)) sum += OnlineSoftmax<double>::weight(scratch.s[j], max);
  const bool empty = sum == 0;  // no key, no sink: o = 0, lse = -inf
  const double lse = empty ? -kInfinity : max + std::log(sum);

  std::fill_n(scratch.o, p.head_dim_v, 0.0);
  for (int64_t j = keys.begin; j < keys.end && !empty; ++j) {
    if (!call.visible(s, h, i, j)) continue;
    const double probability = OnlineSoftmax<double>::weight(scratch.s[j], max) / sum;
    load_key_row(*t.v, j, p.head_dim_v);
    add_scaled(call.after_dropout(call.dropout_factor(s, h, i, j), probability), scratch.row, p.head_dim_v, scratch.o);
  }
  store_row(*t.o, query_offset(p, *t.o, s, i, h), p.head_dim_v, scratch.o);
  if (t.lse) store_element(t.lse->data, t.lse->dtype, lse_offset(p, *t.lse, s, i, h), lse);
  return any_nan ? NAN : max_score;
}

// 1 = kept, for every pair of the sequence, seen or not.
void write_dropout_mask(const Call& call, const Sequence& s, int64_t h) {
  const tw_tensor& mask = *call.t.dropout_mask;
  const int64_t head = s.batch * mask.stride[0] + h * mask.stride[1];
  for (int64_t i = 0; i < s.seqlen_q; ++i)
    for (int64_t j = 0; j < s.seqlen_k; ++j)
      store_element(mask.data, TW_BOOL, head + i * mask.stride[2] + j * mask.stride[3],
                    call.dropout_factor(s, h, i, j) != 0);
}

}  // namespace

int64_t forward_workspace(const tw_problem& p, int num_workers) {
  Arena arena(nullptr);
  for (int worker = 0; worker < num_workers; ++worker) Scratch(arena, p);
  return arena.used();
}

void forward(const Plan& plan, const tw_tensors& t, void* workspace) {
  const tw_problem& p = plan.problem;
  const Call call(p, t);
  append_kv(p, t);
  fill(*t.o, 0);  // rows of no sequence keep this
  if (t.lse) fill(*t.lse, -kInfinity);
  if (t.dropout_mask) fill(*t.dropout_mask, 0);

  const int64_t per_worker = forward_workspace(p, 1);
  parallel_for(plan.target.executor, plan.target.num_threads, p.batch * p.num_heads_q, [&](int64_t task, int worker) {
    Arena arena(static_cast<double*>(workspace) + worker * per_worker);
    const Scratch scratch(arena, p);
    const Sequence s = sequence_of(p, t, task / p.num_heads_q);
    const int64_t h = task % p.num_heads_q;
    double max_logit = -kInfinity;
    for (int64_t i = 0; i < s.seqlen_q; ++i) {
      const double row_max = forward_row(call, s, h, i, scratch);
      if (row_max > max_logit || std::isnan(row_max)) max_logit = row_max;
    }
    if (t.max_logit)
      store_element(t.max_logit->data, TW_FLOAT32, s.batch * t.max_logit->stride[0] + h * t.max_logit->stride[1],
                    max_logit);
    if (t.dropout_mask) write_dropout_mask(call, s, h);
  });
}

}  // namespace tilewise::reference
