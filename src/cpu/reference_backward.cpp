// The backward pass, in two sweeps. With g = the dropout factor (0 or 1 / (1 - p)) and delta_i = dO_i . O_i - dlse_i:
//
//   rows     dP_ij = g_ij (dO_i . v_j)      dS_ij = P_ij (dP_ij - delta_i)      dS'_ij = cap'(s_ij) dS_ij
//            dq_i = scale * sum_j dS'_ij k_j              dbias = dS summed over its broadcast dimensions
//            dalibi_h = -sum_ij |i + sk - sq - j| dS_ij   dsink_h = -sum_i exp(sink_h - lse_i) delta_i
//   columns  dv_j = sum_i P_ij g_ij dO_i                  dk_j = scale * sum_i dS'_ij q_i
//
// The given o and lse are rounded, and an oracle depends on q, k, v and dO alone: a row whose lse is that of the keys at
// hand takes both in float64. Another lse is an lse over more keys (ring attention): that row takes lse and o as given.
// Every sum has a fixed order.
#include <cmath>

#include "cpu/reference_common.h"
#include "cpu/thread_pool.h"

namespace tilewise::reference {
namespace {

constexpr double kLseRounding = 1e-5;  // no float32 kernel's lse is further off (relative, 1e-5 absolute near 0)

struct RowState {  // P_ij = exp(s_ij - max) / sum; a row without keys and sink has sum = 0
  double *max, *sum, *delta;
};

struct Scratch {                            // of one worker
  double *q, *k, *v, *dout, *dq, *dk, *dv;  // a row each
  double *capped, *p, *dp;                  // per key

  Scratch(Arena& arena, const tw_problem& problem)
      : q(arena.take(problem.head_dim)),
        k(arena.take(problem.head_dim)),
        v(arena.take(problem.head_dim_v)),
        dout(arena.take(problem.head_dim_v)),
        dq(arena.take(problem.head_dim)),
        dk(arena.take(problem.head_dim)),
        dv(arena.take(problem.head_dim_v)),
        capped(arena.take(problem.seqlen_k)),
        p(arena.take(problem.seqlen_k)),
        dp(arena.take(problem.seqlen_k)) {}
};

// dbias as float64 sums. Where nothing is broadcast each element has one summand, and there is no array of sums.
struct BiasSums {
  int64_t size_b, size_h, size_q, size_k;
  bool any, across_heads;
  double* sums = nullptr;

  explicit BiasSums(const tw_problem& p) {
    const auto size = [&](tw_dim dim, int64_t full) { return p.bias_dims & dim ? full : 1; };
    size_b = size(TW_DIM_B, p.batch), size_h = size(TW_DIM_H, p.num_heads_q);
    size_q = size(TW_DIM_Q, p.seqlen_q), size_k = size(TW_DIM_K, p.seqlen_k);
    const bool wanted = has(p, TW_HAS_DBIAS);
    across_heads = wanted && (size_b < p.batch || size_h < p.num_heads_q);  // tasks would meet in one element
    any = across_heads || (wanted && (size_q < p.seqlen_q || size_k < p.seqlen_k));
  }
  int64_t count() const { return any ? size_b * size_h * size_q * size_k : 0; }
  double& at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    b = size_b == 1 ? 0 : b, h = size_h == 1 ? 0 : h, i = size_q == 1 ? 0 : i, j = size_k == 1 ? 0 : j;
    return sums[((b * size_h + h) * size_q + i) * size_k + j];
  }
  void store(const tw_tensor& dbias) const {
    for (int64_t b = 0; b < size_b; ++b)
      for (int64_t h = 0; h < size_h; ++h)
        for (int64_t i = 0; i < size_q; ++i)
          for (int64_t j = 0; j < size_k; ++j)
            store_element(dbias.data, dbias.dtype, bias_offset(dbias, b, h, i, j), at(b, h, i, j));
  }
};

struct Memory {            // the workspace
  RowState rows;           // [num_heads_q, query_rows] each
  double *dalibi, *dsink;  // [batch, num_heads_q]
  BiasSums dbias;
  double* per_worker;
  int64_t worker_size;

  Memory(const tw_problem& p, int num_workers, void* workspace, int64_t* used) : dbias(p) {
    Arena arena(workspace);
    const int64_t num_rows = p.num_heads_q * query_rows(p);
    rows = {arena.take(num_rows), arena.take(num_rows), arena.take(num_rows)};
    dalibi = arena.take(p.batch * p.num_heads_q);
    dsink = arena.take(p.batch * p.num_heads_q);
    dbias.sums = arena.take(dbias.count());
    Arena one(nullptr);
    Scratch(one, p);
    worker_size = one.used();
    per_worker = arena.take(worker_size * num_workers);
    *used = arena.used();
  }
};

int64_t row_index(const tw_problem& p, const Sequence& s, int64_t i, int64_t h) {
  return h * query_rows(p) + (p.q_layout == TW_PACKED ? s.q_begin + i : s.batch * p.seqlen_q + i);
}

void row_gradients(const Call& call, const Sequence& s, int64_t h, int64_t i, const Memory& memory,
                   const Scratch& scratch) {
  const tw_problem& p = call.p;
  const tw_tensors& t = call.t;
  const int64_t key_head = call.key_head(h), index = row_index(p, s, i, h);
  const KeyRange keys = call.mask.keys(i, s.seqlen_q, s.seqlen_k);
  const auto load_key = [&](int64_t j) {
    load_row(*t.k, key_offset(p, t, *t.k, s, j, key_head), p.head_dim, scratch.k);
  };
  const auto load_value = [&](int64_t j) {
    load_row(*t.v, key_offset(p, t, *t.v, s, j, key_head), p.head_dim_v, scratch.v);
  };
  load_row(*t.q, query_offset(p, *t.q, s, i, h), p.head_dim, scratch.q);
  load_row(*t.dout, query_offset(p, *t.dout, s, i, h), p.head_dim_v, scratch.dout);

  double max = call.sink(h);
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (!call.visible(s, h, i, j)) continue;
    load_key(j);
    scratch.capped[j] = call.capped(dot(scratch.q, scratch.k, p.head_dim));
    scratch.p[j] = scratch.capped[j] + call.added(s, h, i, j);
    if (scratch.p[j] > max) max = scratch.p[j];
  }
  const double sink_weight = OnlineSoftmax<double>::weight(call.sink(h), max);
  double sum = sink_weight;
  for (int64_t j = keys.begin; j < keys.end; ++j)
    if (call.visible(s, h, i, j)) sum += scratch.p[j] = OnlineSoftmax<double>::weight(scratch.p[j], max);
  const double own = max + std::log(sum);
  const double given = t.lse == nullptr ? own : load_element(t.lse->data, t.lse->dtype, lse_offset(p, *t.lse, s, i, h));
  const bool more_keys = sum > 0 && std::isfinite(given) && std::fabs(given - own) > kLseRounding * (1 + std::fabs(own));
  if (more_keys) sum = std::exp(given - max);
  memory.rows.max[index] = max;
  memory.rows.sum[index] = sum;
  if (sum == 0) return;  // dq stays 0

  double delta = 0;  // dO . O = sum_j P_j g_j (dO . v_j) = sum_j P_j dP_j
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (!call.visible(s, h, i, j)) continue;
    load_value(j);
    scratch.p[j] /= sum;
    const double factor = call.dropout_factor(s, h, i, j), dp = dot(scratch.dout, scratch.v, p.head_dim_v);
    scratch.dp[j] = call.after_dropout(factor, dp);
    delta += call.after_dropout(factor, scratch.p[j]) * dp;  // dO . O: a dropped value that is NaN makes O NaN
  }
  if (more_keys) {
    delta = 0;
    for (int64_t c = 0; c < p.head_dim_v; ++c)
      delta += scratch.dout[c] * load_element(t.o->data, t.o->dtype, query_offset(p, *t.o, s, i, h) + c);
  }
  if (t.dlse) delta -= load_element(t.dlse->data, t.dlse->dtype, lse_offset(p, *t.dlse, s, i, h));
  memory.rows.delta[index] = delta;
  memory.dsink[s.batch * p.num_heads_q + h] -= sink_weight / sum * delta;

  std::fill_n(scratch.dq, p.head_dim, 0.0);
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (!call.visible(s, h, i, j)) continue;
    const double ds = scratch.p[j] * (scratch.dp[j] - delta);
    memory.dalibi[s.batch * p.num_heads_q + h] -= Call::distance(s, i, j) * ds;
    if (memory.dbias.any)
      memory.dbias.at(s.batch, h, i, j) += ds;
    else if (t.dbias)
      store_element(t.dbias->data, t.dbias->dtype, bias_offset(*t.dbias, s.batch, h, i, j), ds);
    if (!t.dq) continue;
    load_key(j);
    add_scaled(call.scale * call.capped_derivative(scratch.capped[j]) * ds, scratch.k, p.head_dim, scratch.dq);
  }
  if (t.dq) store_row(*t.dq, query_offset(p, *t.dq, s, i, h), p.head_dim, scratch.dq);
}

void column_gradients(const Call& call, const Sequence& s, int64_t key_head, int64_t j, const Memory& memory,
                      const Scratch& scratch) {
  const tw_problem& p = call.p;
  const tw_tensors& t = call.t;
  load_row(*t.k, key_offset(p, t, *t.k, s, j, key_head), p.head_dim, scratch.k);
  load_row(*t.v, key_offset(p, t, *t.v, s, j, key_head), p.head_dim_v, scratch.v);
  std::fill_n(scratch.dk, p.head_dim, 0.0);
  std::fill_n(scratch.dv, p.head_dim_v, 0.0);
  const KeyRange rows = call.mask.rows_of_keys(j, j + 1, s.seqlen_q, s.seqlen_k);
  for (int64_t h = key_head * group_size(p); h < (key_head + 1) * group_size(p); ++h)
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const int64_t index = row_index(p, s, i, h);
      if (!call.visible(s, h, i, j) || memory.rows.sum[index] == 0) continue;
      load_row(*t.q, query_offset(p, *t.q, s, i, h), p.head_dim, scratch.q);
      load_row(*t.dout, query_offset(p, *t.dout, s, i, h), p.head_dim_v, scratch.dout);
      const double capped = call.capped(dot(scratch.q, scratch.k, p.head_dim));
      const double score = capped + call.added(s, h, i, j);
      const double probability = OnlineSoftmax<double>::weight(score, memory.rows.max[index]) / memory.rows.sum[index];
      const double factor = call.dropout_factor(s, h, i, j);
      const double dp = call.after_dropout(factor, dot(scratch.dout, scratch.v, p.head_dim_v));
      const double ds = probability * (dp - memory.rows.delta[index]);
      add_scaled(call.after_dropout(factor, probability), scratch.dout, p.head_dim_v, scratch.dv);
      add_scaled(call.scale * call.capped_derivative(capped) * ds, scratch.q, p.head_dim, scratch.dk);
    }
  if (t.dk) store_row(*t.dk, key_offset(p, t, *t.dk, s, j, key_head), p.head_dim, scratch.dk);
  if (t.dv) store_row(*t.dv, key_offset(p, t, *t.dv, s, j, key_head), p.head_dim_v, scratch.dv);
}

void store_dalibi(const tw_problem& p, const tw_tensor& dalibi, const double* sums) {  // [hq] or [batch, hq]
  if (dalibi.ndim == 1) fill(dalibi, 0);
  for (int64_t h = 0; h < p.num_heads_q; ++h) {
    double over_batch = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const double sum = sums[b * p.num_heads_q + h];
      over_batch += sum;
      store_element(dalibi.data, dalibi.dtype, alibi_offset(dalibi, b, h), dalibi.ndim == 1 ? over_batch : sum);
    }
  }
}

void store_dsink(const tw_problem& p, const tw_tensor& dsink, const double* sums) {
  for (int64_t h = 0; h < p.num_heads_q; ++h) {
    double over_batch = 0;
    for (int64_t b = 0; b < p.batch; ++b) over_batch += sums[b * p.num_heads_q + h];
    store_element(dsink.data, dsink.dtype, h * dsink.stride[0], over_batch);
  }
}

}  // namespace

int64_t backward_workspace(const tw_problem& p, int num_workers) {
  int64_t used = 0;
  Memory(p, num_workers, nullptr, &used);
  return used;
}

void backward(const Plan& plan, const tw_tensors& t, void* workspace) {
  const tw_problem& p = plan.problem;
  const Call call(p, t);
  for (const tw_tensor* output : {t.dq, t.dk, t.dv, t.dbias})  // rows of no sequence keep this
    if (output) fill(*output, 0);
  int64_t used = 0;
  const int num_workers = std::max(1, plan.target.num_threads);
  const Memory memory(p, num_workers, workspace, &used);
  std::fill_n(memory.dalibi, p.batch * p.num_heads_q, 0.0);
  std::fill_n(memory.dsink, p.batch * p.num_heads_q, 0.0);
  std::fill_n(memory.dbias.sums, memory.dbias.count(), 0.0);
  const auto scratch_of = [&](int worker) {
    Arena arena(memory.per_worker + worker * memory.worker_size);
    return Scratch(arena, p);
  };

  const auto rows_of = [&](int64_t task, int worker) {
    const Scratch scratch = scratch_of(worker);
    const Sequence s = sequence_of(p, t, task / p.num_heads_q);
    for (int64_t i = 0; i < s.seqlen_q; ++i) row_gradients(call, s, task % p.num_heads_q, i, memory, scratch);
  };
  const int64_t num_tasks = p.batch * p.num_heads_q;
  if (memory.dbias.across_heads)  // in order
    parallel_for(nullptr, 1, num_tasks, rows_of);
  else
    parallel_for(plan.target.executor, num_workers, num_tasks, rows_of);
  if (t.dbias && memory.dbias.any) memory.dbias.store(*t.dbias);
  if (t.dalibi) store_dalibi(p, *t.dalibi, memory.dalibi);
  if (t.dsink) store_dsink(p, *t.dsink, memory.dsink);

  if (!t.dk && !t.dv) return;
  parallel_for(plan.target.executor, num_workers, p.batch * p.num_heads_k, [&](int64_t task, int worker) {
    const Scratch scratch = scratch_of(worker);
    const Sequence s = sequence_of(p, t, task / p.num_heads_k);
    for (int64_t j = 0; j < s.seqlen_k; ++j) column_gradients(call, s, task % p.num_heads_k, j, memory, scratch);
  });
}

}  // namespace tilewise::reference
