// A problem's tensors on host and device: random values, ragged lengths, NaN where a value must not matter, poisoned
// outputs with guard bytes around them.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/problem.h"

namespace tilewise::cuda_test {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

enum class LayoutKind { kContiguous, kHeadsFirst, kSliced, kUnaligned, kEverySecondRow };
inline const char* layout_name(LayoutKind kind) {
  constexpr const char* names[] = {"contiguous", "heads first", "sliced", "unaligned", "every second row"};
  return names[static_cast<int>(kind)];
}

constexpr size_t kGuardBytes = 256;

// One tensor in both memories; the allocation has guard bytes on both sides and poison in all gaps.
struct Mirror {
  std::vector<uint8_t> host;
  uint8_t* device = nullptr;
  size_t begin = kGuardBytes;
  tw_tensor tensor{};         // host view
  tw_tensor device_tensor{};  // the same on the device
  bool exists = false;

  ~Mirror() {
    if (device) cudaFree(device);
  }
  Mirror() = default;
  Mirror(const Mirror&) = delete;

  // order: dimensions from outermost to innermost in memory; gap: extra elements per innermost row.
  void make(tw_dtype dtype, std::vector<int64_t> shape, LayoutKind kind = LayoutKind::kContiguous) {
    exists = true;
    tensor.dtype = dtype;
    tensor.ndim = static_cast<int>(shape.size());
    const int rank = tensor.ndim;
    std::vector<int> order(rank);
    for (int n = 0; n < rank; ++n) order[n] = n;
    if (kind == LayoutKind::kHeadsFirst && rank >= 3) std::swap(order[rank - 3], order[rank - 2]);
    int64_t stride = 1, size = 1;
    for (int n = rank - 1; n >= 0; --n) {
      const int dim = order[n];
      tensor.shape[dim] = shape[dim];
      tensor.stride[dim] = stride;
      stride *= shape[dim];
      if (n == rank - 1 && rank >= 3 && kind == LayoutKind::kUnaligned) stride += 3;
      if (n == rank - 2 && rank >= 3 && kind == LayoutKind::kSliced) stride *= 3;
      if (n == rank - 2 && rank >= 3 && kind == LayoutKind::kEverySecondRow) stride *= 2;
    }
    size = stride;
    const size_t bytes = static_cast<size_t>(size * dtype_size(dtype));
    begin = kGuardBytes + (kind == LayoutKind::kUnaligned && rank >= 3 ? dtype_size(dtype) : 0);
    host.assign(bytes + 2 * kGuardBytes + 16, 0xff);
    tensor.data = host.data() + begin;
    tensor.device = TW_CPU;
    check_cuda(cudaMalloc(&device, host.size()), "cudaMalloc");
    device_tensor = tensor;
    device_tensor.data = device + begin;
    device_tensor.device = TW_CUDA;
  }
  int64_t count() const {
    int64_t n = 1;
    for (int d = 0; d < tensor.ndim; ++d) n *= tensor.shape[d];
    return n;
  }
  int64_t offset(int64_t n) const {
    int64_t at = 0;
    for (int d = tensor.ndim - 1; d >= 0; --d) at += n % tensor.shape[d] * tensor.stride[d], n /= tensor.shape[d];
    return at;
  }
  double get(int64_t n) const { return load_element(tensor.data, tensor.dtype, offset(n)); }
  void set(int64_t n, double x) { store_element(tensor.data, tensor.dtype, offset(n), x); }
  void upload() { check_cuda(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice), "upload"); }
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(host.size());
    check_cuda(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost), "download");
    return bytes;
  }
  double get_from(const std::vector<uint8_t>& bytes, int64_t n) const {
    return load_element(bytes.data() + begin, tensor.dtype, offset(n));
  }
};

struct Inputs {
  tw_problem p;
  Mirror q, k, v, o, lse, max_logit, bias, alibi, sink, rng, mask_out, cu_q, cu_k, used_q, used_k, table, cache_idx, leftpad;
  Mirror dout, dlse, dq, dk, dv, dbias, dalibi, dsink;
  Mirror k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens;

  Mirror* all[31] = {&q,     &k,      &v,      &o,     &lse,       &max_logit, &bias, &alibi, &sink, &rng, &mask_out, &cu_q, &cu_k,
                     &used_q, &used_k, &table, &cache_idx, &leftpad, &dout, &dlse, &dq, &dk, &dv, &dbias, &dalibi, &dsink,
                     &k_new, &v_new, &rotary_cos, &rotary_sin, &rotary_seqlens};

  tw_tensors tensors(bool device) {
    tw_tensors t{};
    t.struct_size = sizeof t;
    const auto at = [&](Mirror& m) { return m.exists ? (device ? &m.device_tensor : &m.tensor) : nullptr; };
    t.q = at(q), t.k = at(k), t.v = at(v), t.o = at(o), t.lse = at(lse), t.max_logit = at(max_logit), t.bias = at(bias);
    t.alibi_slopes = at(alibi), t.sink = at(sink), t.rng_state = at(rng), t.dropout_mask = at(mask_out);
    t.cu_seqlens_q = at(cu_q), t.cu_seqlens_k = at(cu_k), t.seqused_q = at(used_q), t.seqused_k = at(used_k);
    t.page_table = at(table), t.cache_batch_idx = at(cache_idx), t.leftpad_k = at(leftpad);
    t.dout = at(dout), t.dlse = at(dlse), t.dq = at(dq), t.dk = at(dk), t.dv = at(dv), t.dbias = at(dbias);
    t.dalibi = at(dalibi), t.dsink = at(dsink);
    t.k_new = at(k_new), t.v_new = at(v_new), t.rotary_cos = at(rotary_cos), t.rotary_sin = at(rotary_sin);
    t.rotary_seqlens = at(rotary_seqlens);
    return t;
  }

  // value_scale: standard deviation of q and k; nan_dead: NaN in rows of no sequence, unused keys and pages.
  Inputs(const tw_problem& problem, LayoutKind layout, unsigned seed, double value_scale = 1, bool nan_dead = true) : p(problem) {
    std::mt19937_64 rng_engine(seed * 7919 + 17);
    std::normal_distribution<double> normal;
    const auto type = static_cast<tw_dtype>(p.dtype);
    const auto uniform = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(rng_engine() % (high - low + 1)); };
    const auto fill = [&](Mirror& m, double scale) {
      for (int64_t n = 0; n < m.count(); ++n) m.set(n, scale * normal(rng_engine));
    };
    const bool packed_q = p.q_layout == TW_PACKED, packed_k = p.k_layout == TW_PACKED, paged = p.k_layout == TW_PAGED;
    const auto q_shape = [&](int64_t cols) {
      return packed_q ? std::vector<int64_t>{p.total_q, p.num_heads_q, cols}
                      : std::vector<int64_t>{p.batch, p.seqlen_q, p.num_heads_q, cols};
    };
    const int64_t cache = p.cache_batch ? p.cache_batch : p.batch;
    const auto k_shape = [&](int64_t cols) {
      return packed_k ? std::vector<int64_t>{p.total_k, p.num_heads_k, cols}
             : paged  ? std::vector<int64_t>{p.num_pages, p.page_size, p.num_heads_k, cols}
                      : std::vector<int64_t>{cache, p.seqlen_k, p.num_heads_k, cols};
    };
    q.make(type, q_shape(p.head_dim), layout);
    k.make(type, k_shape(p.head_dim), layout);
    v.make(type, k_shape(p.head_dim_v), layout);
    o.make(type, q_shape(p.head_dim_v), layout);
    fill(q, value_scale), fill(k, value_scale), fill(v, 1);
    const auto lse_shape = packed_q ? std::vector<int64_t>{p.num_heads_q, p.total_q}
                                    : std::vector<int64_t>{p.batch, p.num_heads_q, p.seqlen_q};
    if (p.pass == TW_BACKWARD || has(p, TW_HAS_LSE)) lse.make(TW_FLOAT32, lse_shape);
    if (has(p, TW_HAS_MAX_LOGIT)) max_logit.make(TW_FLOAT32, {p.batch, p.num_heads_q});
    const auto bias_shape = [&] {
      return std::vector<int64_t>{p.bias_dims & TW_DIM_B ? p.batch : 1, p.bias_dims & TW_DIM_H ? p.num_heads_q : 1,
                                  p.bias_dims & TW_DIM_Q ? p.seqlen_q : 1, p.bias_dims & TW_DIM_K ? p.seqlen_k : 1};
    };
    if (has(p, TW_HAS_BIAS)) {
      bias.make(static_cast<tw_dtype>(p.bias_dtype), bias_shape());
      for (int64_t n = 0; n < bias.count(); ++n) bias.set(n, p.bias_dtype == TW_BOOL ? uniform(0, 3) != 0 : normal(rng_engine));
    }
    if (has(p, TW_HAS_ALIBI)) {
      alibi.make(TW_FLOAT32, p.alibi_dims & TW_DIM_B ? std::vector<int64_t>{p.batch, p.num_heads_q} : std::vector<int64_t>{p.num_heads_q});
      for (int64_t n = 0; n < alibi.count(); ++n) alibi.set(n, std::exp2(-1.0 - n % 8));
    }
    if (has(p, TW_HAS_SINK)) {
      sink.make(TW_FLOAT32, {p.num_heads_q});
      for (int64_t n = 0; n < sink.count(); ++n) sink.set(n, n == 1 ? 100.0 : normal(rng_engine));
    }
    if (has(p, TW_HAS_RNG_STATE)) {
      rng.make(TW_INT64, {2});
      static_cast<int64_t*>(rng.tensor.data)[0] = 0x123456789abcdefll;
      static_cast<int64_t*>(rng.tensor.data)[1] = 77;
    }
    if (has(p, TW_HAS_DROPOUT_MASK)) mask_out.make(TW_BOOL, {p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k});
    const auto lengths = [&](Mirror& m, int64_t maximum, int64_t total) {  // cu_seqlens with empty ones; leaves a tail
      m.make(TW_INT32, {p.batch + 1});
      int64_t at = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        m.set(b, static_cast<double>(at));
        const int64_t length = b == 0 ? maximum : b % 3 == 1 ? 0 : uniform(0, maximum);
        at = std::min(at + length, total);
      }
      m.set(p.batch, static_cast<double>(at));
    };
    if (packed_q) lengths(cu_q, p.seqlen_q, p.total_q);
    if (packed_k) lengths(cu_k, p.seqlen_k, p.total_k);
    const auto used = [&](Mirror& m, const Mirror& cu, int64_t maximum) {
      m.make(TW_INT32, {p.batch});
      for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t room = &m == &used_k ? p.seqlen_new : 0;
        const int64_t limit = -room + (cu.exists ? static_cast<int64_t>(cu.get(b + 1) - cu.get(b)) : maximum);
        m.set(b, static_cast<double>(b == 1 ? 0 : uniform(limit / 2, limit)));
      }
    };
    if (has(p, TW_HAS_SEQUSED_Q)) used(used_q, cu_q, p.seqlen_q);
    if (has(p, TW_HAS_SEQUSED_K)) used(used_k, cu_k, p.seqlen_k);
    if (paged) {
      const int64_t per = (p.seqlen_k + p.page_size - 1) / p.page_size;
      table.make(TW_INT32, {p.batch, per});
      std::vector<int> pages(p.num_pages);
      for (int n = 0; n < p.num_pages; ++n) pages[n] = n;
      std::shuffle(pages.begin(), pages.end(), rng_engine);
      for (int64_t n = 0; n < table.count(); ++n) table.set(n, pages[n % p.num_pages]);
    }
    if (has(p, TW_HAS_CACHE_BATCH_IDX)) {
      cache_idx.make(TW_INT32, {p.batch});
      for (int64_t b = 0; b < p.batch; ++b) cache_idx.set(b, static_cast<double>(cache - 1 - b));
    }
    if (has(p, TW_HAS_LEFTPAD_K)) {
      leftpad.make(TW_INT32, {p.batch});
      for (int64_t b = 0; b < p.batch; ++b) leftpad.set(b, static_cast<double>(uniform(0, p.seqlen_k / 3)));
    }
    if (p.seqlen_new > 0) {
      k_new.make(type, {p.batch, p.seqlen_new, p.num_heads_k, p.head_dim}), fill(k_new, value_scale);
      v_new.make(type, {p.batch, p.seqlen_new, p.num_heads_k, p.head_dim_v}), fill(v_new, 1);
    }
    if (p.rotary_dim > 0) {
      const int64_t positions = 2 * (p.seqlen_k + p.seqlen_q);
      const tw_dtype table_type = p.rotary_interleaved ? type : TW_FLOAT32;
      rotary_cos.make(table_type, {positions, p.rotary_dim / 2});
      rotary_sin.make(table_type, {positions, p.rotary_dim / 2});
      for (int64_t n = 0; n < rotary_cos.count(); ++n) {
        const double angle = (n / (p.rotary_dim / 2)) * std::pow(10000.0, -2.0 * (n % (p.rotary_dim / 2)) / p.rotary_dim);
        rotary_cos.set(n, std::cos(angle)), rotary_sin.set(n, std::sin(angle));
      }
      if (has(p, TW_HAS_ROTARY_SEQLENS)) {
        rotary_seqlens.make(TW_INT32, {p.batch});
        for (int64_t b = 0; b < p.batch; ++b) rotary_seqlens.set(b, static_cast<double>(uniform(0, p.seqlen_k)));
      }
    }
    if (p.pass == TW_BACKWARD) {
      dout.make(type, q_shape(p.head_dim_v), layout);
      fill(dout, 1);
      if (has(p, TW_HAS_DLSE)) dlse.make(TW_FLOAT32, lse_shape), fill(dlse, 1);
      if (has(p, TW_HAS_DQ)) dq.make(type, q_shape(p.head_dim), layout);
      if (has(p, TW_HAS_DK)) dk.make(type, k_shape(p.head_dim), layout);
      if (has(p, TW_HAS_DV)) dv.make(type, k_shape(p.head_dim_v), layout);
      if (has(p, TW_HAS_DBIAS)) dbias.make(static_cast<tw_dtype>(p.bias_dtype), bias_shape());
      if (has(p, TW_HAS_DALIBI)) dalibi.make(TW_FLOAT32, alibi.tensor.ndim == 1 ? std::vector<int64_t>{p.num_heads_q} : std::vector<int64_t>{p.batch, p.num_heads_q});
      if (has(p, TW_HAS_DSINK)) dsink.make(TW_FLOAT32, {p.num_heads_q});
    }
    if (nan_dead) poison_dead();
  }

  // NaN in every row of k and v that no sequence uses, and in every row of q and dout likewise.
  void poison_dead() {
    const auto poison = [](Mirror& m, const std::vector<bool>& live, int64_t columns) {
      if (!m.exists) return;
      for (int64_t n = 0; n < m.count(); ++n)
        if (!live[n / columns]) m.set(n, NAN);
    };
    std::vector<bool> live_k(p.k_layout == TW_PACKED ? p.total_k * p.num_heads_k : k.count() / p.head_dim, false);
    const int64_t hk = p.num_heads_k, hq = p.num_heads_q;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t begin = cu_k.exists ? cu_k.get(b) : 0;
      int64_t length = cu_k.exists ? cu_k.get(b + 1) - begin : p.seqlen_k;
      if (used_k.exists) length = used_k.get(b);
      for (int64_t n = leftpad.exists ? leftpad.get(b) : 0; n < length; ++n) {
        int64_t row;
        if (p.k_layout == TW_PACKED) row = begin + n;
        else if (p.k_layout == TW_PAGED) row = static_cast<int64_t>(table.get(b * table.tensor.shape[1] + n / p.page_size)) * p.page_size + n % p.page_size;
        else row = (cache_idx.exists ? static_cast<int64_t>(cache_idx.get(b)) : b) * p.seqlen_k + n;
        for (int64_t h = 0; h < hk; ++h) live_k[row * hk + h] = true;
      }
    }
    poison(k, live_k, p.head_dim), poison(v, live_k, p.head_dim_v);
    std::vector<bool> live_q(q.count() / p.head_dim, false);
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t begin = cu_q.exists ? cu_q.get(b) : b * p.seqlen_q;
      int64_t length = cu_q.exists ? cu_q.get(b + 1) - begin : p.seqlen_q;
      if (used_q.exists) length = used_q.get(b);
      for (int64_t n = 0; n < length; ++n)
        for (int64_t h = 0; h < hq; ++h) live_q[(begin + n) * hq + h] = true;
    }
    poison(q, live_q, p.head_dim), poison(dout, live_q, p.head_dim_v);
  }

  // NaN in whole rows that the mask hides from some queries: keys 5 and the last, inf in value 40, and, for the backward
  // pass, query 3 and the gradient of row 7. Dense q only.
  void add_nan_rows() {
    const auto put = [](Mirror& m, int64_t row, double x) {
      const int64_t per = m.tensor.shape[2] * m.tensor.shape[3];
      for (int64_t n = 0; n < per; ++n) m.set(row * per + n, x);
    };
    put(k, 5, NAN), put(v, 5, NAN), put(v, 40, INFINITY), put(k, p.seqlen_k - 1, NAN), put(v, p.seqlen_k - 1, NAN);
    if (p.pass == TW_BACKWARD) put(q, 3, NAN), put(dout, 7, NAN);
  }

  void upload() {
    for (Mirror* m : all)
      if (m->exists) m->upload();
  }
};

// Guard bytes and gaps of a downloaded tensor are as they were.
inline bool gaps_intact(const Mirror& m, const std::vector<uint8_t>& bytes) {
  std::vector<bool> element(bytes.size(), false);
  const int64_t size = dtype_size(m.tensor.dtype);
  for (int64_t n = 0; n < m.count(); ++n)
    for (int64_t byte = 0; byte < size; ++byte) element[m.begin + m.offset(n) * size + byte] = true;
  for (size_t n = 0; n < bytes.size(); ++n)
    if (!element[n] && bytes[n] != 0xff) return false;
  return true;
}

}  // namespace tilewise::cuda_test
