// What a consumer warpgroup of the backward pass does with 64 keys and a tile of queries: products with K, V, Q and dO,
// P from S, dS from dP, and the gradients' way out. Keys are the rows: P^T and dS^T are A operands as they leave the
// accumulators.
#pragma once
#include "cuda/config_backward_sm90.h"
#include "cuda/params_backward_sm90.h"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/key_block.cuh"
#include "cuda/tile/panel_sm90.cuh"

namespace tilewise::cuda {

// Addresses in shared memory.
template <BackwardSm90Config C>
struct SharedBackwardSm90 {
  uint32_t base;
  __device__ __forceinline__ uint32_t k(int n) const { return base + n % C.k_slots() * C.k_bytes(); }  // [block_n, d], of block n
  __device__ __forceinline__ uint32_t v() const { return base + C.v_offset(); }                      // [block_n, d]
  __device__ __forceinline__ uint32_t q(int stage) const { return base + C.q_offset() + stage * C.q_bytes(); }  // [block_m, d]
  __device__ __forceinline__ uint32_t dout(uint32_t step) const { return base + C.do_offset() + step % C.kDoutStages * C.q_bytes(); }
  __device__ __forceinline__ uint32_t ds(int slot) const { return base + C.ds_offset() + slot * C.ds_bytes(); }  // [block_n, block_m]
  __device__ __forceinline__ uint32_t weights() const { return base + C.p_offset(); }  // fragments of P, split only
  __device__ __forceinline__ uint32_t rows(int stage) const { return base + C.rows_offset() + stage * C.row_bytes(); }
  __device__ __forceinline__ uint32_t barrier(int n) const { return base + C.barrier_offset() + 8 * n; }
  __device__ __forceinline__ uint32_t ds_full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t ds_empty(int slot) const { return barrier(2 + slot); }
  __device__ __forceinline__ uint32_t weights_full() const { return barrier(4); }
  __device__ __forceinline__ uint32_t weights_empty() const { return barrier(5); }
  __device__ __forceinline__ uint32_t block_full(int slot) const { return barrier(6 + slot); }
  __device__ __forceinline__ uint32_t block_empty(int slot) const { return barrier(8 + slot); }
  __device__ __forceinline__ uint32_t k_full(int n) const { return barrier(10 + n % C.k_slots()); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(12); }
  // Q, lse and delta; and dO, unless it has barriers of its own (split).
  __device__ __forceinline__ uint32_t full(int stage) const { return barrier(13 + stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barrier(13 + C.stages + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(13 + 2 * C.stages + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return barrier(13 + 3 * C.stages + stage); }
  // With helpers. The next key block is wanted; a tile's turn has come, and that of two tiles before is passed; its sums are on their
  // way (kAny: those of a key block); where they go is known.
  __device__ __forceinline__ uint32_t wanted() const { return barrier(13 + 4 * C.stages); }
  __device__ __forceinline__ uint32_t turn(uint32_t step) const { return barrier(14 + 4 * C.stages + (step & 1)); }
  __device__ __forceinline__ uint32_t sums(uint32_t step) const { return barrier(16 + 4 * C.stages + (step & 1)); }
  // The bias of a tile, and the parts of it that follow.
  __device__ __forceinline__ uint32_t bias_full(int warp, bool follows) const { return barrier(C.num_barriers() - 2 * C.bias_warps() + 2 * warp + follows); }
  __device__ __forceinline__ uint32_t target_full(uint32_t step) const { return barrier(18 + 4 * C.stages + step % C.kTargets); }
};

template <BackwardSm90Config C>
struct GradientSm90 {
  using T = typename ElementType<C.element>::Type;
  static constexpr int kS = C.block_m / 2;   // registers of S and of dP
  static constexpr int kA = C.block_m / 4;   // of P and of dS as operands
  static constexpr int kD = C.head_dim / 2;  // of dK and of dV
  static constexpr int kSteps = C.head_dim / 16;
  using Keys = Panels<C.block_n()>;
  using Queries = Panels<C.block_m>;

  // What options keep of a tile: nothing here. See OptionsSm90, which also draws.
  struct State {};
  __device__ __forceinline__ static const uint32_t (&for_gradients(const uint32_t (&a)[kA], const State&))[kA] { return a; }
  __device__ __forceinline__ void begin_head(const KeyBlock&, int) const {}
  __device__ __forceinline__ void load_facts(State&) const {}
  __device__ __forceinline__ void load_lse(auto&, uint32_t) const {}
  __device__ __forceinline__ void load_delta(auto&, uint32_t) const {}
  __device__ __forceinline__ void add_sums(const uint32_t (&)[kA], int, int) const {}
  __device__ __forceinline__ void end_head(int) const {}
  __device__ __forceinline__ void draw(State&, int) const {}
  __device__ __forceinline__ void prefetch_bias(const KeyBlock&, int, int) const {}
  __device__ __forceinline__ void copy_bias(const KeyBlock&, int, int) const {}
  __device__ __forceinline__ bool copies_early() const { return false; }

  const BackwardSm90Params& p;
  const SharedBackwardSm90<C> shared;
  const KeyBlock* block;
  const int consumer, warp, lane;  // warp of the warpgroup

  __device__ __forceinline__ int first_row() const { return C.split ? 0 : consumer * 64; }  // of the block's keys
  __device__ __forceinline__ int key_row(int half) const { return first_row() + warp * 16 + half * 8 + (lane >> 2); }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  // Steps [begin, end) of S^T = K Q^T or dP^T = V dO^T, for this warpgroup's 64 keys.
  __device__ __forceinline__ void issue_steps(float (&x)[kS], uint32_t s_keys, uint32_t s_queries, int begin, int end) const {
    uint32_t a = ptx::descriptor(s_keys + first_row() * 128), b = ptx::descriptor(s_queries);
    if constexpr (C.split) asm volatile("" : "+r"(a), "+r"(b));
#pragma unroll
    for (int step = begin; step < end; ++step)
      ptx::Wgmma<T, C.block_m>::ss(x, a + Keys::column_step(step), b + Queries::column_step(step), step != 0);
  }

  // x -= lse / scale, or x -= delta: A [64, 16], in registers, is -1 where B [block_m, 16] has the three parts of the number,
  // else 0. (A in shared memory costs 2 % of the whole.) With helpers the four registers of A serve for both: B has the same eight
  // columns twice, the second time times zeros. Where registers suffice that is 2 to 4 % slower.
  template <bool kDelta>
  __device__ __forceinline__ void issue_columns(float (&x)[kS], uint32_t s_rows, uint32_t minus) const {
    constexpr bool kSecond = kDelta && !C.helpers;
    ptx::Wgmma<ptx::bfloat16, C.block_m>::template rs<0, ptx::kDescriptorHighPlain>(
        x, kSecond ? 0u : minus, kSecond ? 0u : minus, kSecond ? minus : 0u, kSecond ? minus : 0u,
        C.helpers ? ptx::descriptor(s_rows + (kDelta ? 128 : 0), 0) : ptx::descriptor(s_rows, 128), 1);
  }
  // This thread's -1: columns 2 (lane % 4) and its right neighbour of the first three.
  __device__ __forceinline__ uint32_t make_minus() const {
    const int quad = lane & 3;
    uint32_t minus = quad == 0 ? 0xbf80bf80u : quad == 1 ? 0x0000bf80u : 0u;
    asm volatile("" : "+r"(minus));  // before the fence that lets products read it
    return minus;
  }

  template <bool kDelta>
  __device__ __forceinline__ void issue_scores(float (&x)[kS], uint32_t s_keys, uint32_t s_queries, uint32_t s_rows) const {
    ptx::wgmma_pin(x);
    const uint32_t minus = make_minus();
    ptx::wgmma_fence();
    issue_steps(x, s_keys, s_queries, 0, kSteps);
    if constexpr (kDelta ? C.plain() : C.lse_is_column()) issue_columns<kDelta>(x, s_rows, minus);
    ptx::wgmma_commit();
  }

  // Step of dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient_step(float (&d)[kD], const uint32_t (&a)[kA], uint32_t s_queries, int step) const {
    ptx::Wgmma<T, C.head_dim>::template rs<1>(d, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                                              ptx::descriptor(s_queries, Queries::kPanelBytes) + Queries::row_step(step), 1);
  }

  __device__ __forceinline__ void issue_gradient(float (&d)[kD], uint32_t (&a)[kA], uint32_t s_queries) const {
    ptx::wgmma_pin(d);
    ptx::wgmma_pin(a);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C.block_m / 16; ++step) issue_gradient_step(d, a, s_queries, step);
    ptx::wgmma_commit();
  }

  // Both at once, steps alternating: a product with both operands in shared memory takes all of its bandwidth at N = 64, one
  // with an operand in registers half. In between, others can read and write.
  template <bool kDelta>
  __device__ __forceinline__ void issue_both(float (&d)[kD], uint32_t (&a)[kA], uint32_t s_d, float (&x)[kS], uint32_t s_keys,
                                             uint32_t s_queries, uint32_t s_rows) const {
    ptx::wgmma_pin(d);
    ptx::wgmma_pin(a);
    ptx::wgmma_pin(x);
    const uint32_t minus = make_minus();
    ptx::wgmma_fence();
    constexpr int kGradientSteps = C.block_m / 16;
#pragma unroll
    for (int step = 0; step < kGradientSteps; ++step) {
      issue_gradient_step(d, a, s_d, step);
      issue_steps(x, s_keys, s_queries, step * kSteps / kGradientSteps, (step + 1) * kSteps / kGradientSteps);
    }
    if constexpr (kDelta ? C.plain() : C.lse_is_column()) issue_columns<kDelta>(x, s_rows, minus);
    ptx::wgmma_commit();
  }

  // A row of Q, K or dO that is not finite met a pair that does not see each other.
  __device__ __forceinline__ void tell_nonfinite() const {
    if (p.backward.again) p.backward.again->wanted = 1;
  }

  // S^T to P^T, as an operand. Pairs that do not see each other: zeros, not products. If S is not finite there, some row of Q
  // or K is not, and the products would carry it where it does not belong: then everything is computed again by the sm_80
  // kernels, which look for such rows.
  template <bool kMasked>
  __device__ __forceinline__ void weights(uint32_t (&a)[kA], const float (&x)[kS], int i0) const {
    uint32_t visible[2] = {}, largest = 0;  // a bit an element of a row; magnitude of the hidden scores
    if constexpr (kMasked) see(visible, i0);
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = x[4 * n + 2 * half + e];
          pair[e] = ptx::exp2_approx(score * p.scale_log2);
          if constexpr (kMasked) {
            const bool sees = (visible[half] >> (2 * n + e) & 1) != 0;
            largest = max(largest, sees ? 0u : __float_as_uint(score) & 0x7fffffffu);
            pair[e] = sees ? pair[e] : 0.f;
          }
        }
        a[2 * n + half] = ptx::pack<T>(pair[0], pair[1]);
      }
    if (kMasked && largest >= 0x7f800000u) tell_nonfinite();
  }

  // A bit an element of a row.
  __device__ __forceinline__ void see(uint32_t (&visible)[2], int i0) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range queries =
          visible_queries(p.backward.score, block->first_key + key_row(half), block->s.seqlen_q, block->s.seqlen_k);
      visible[half] = elements_before(queries.end - i0) & ~elements_before(queries.begin - i0);
    }
  }

  // This thread has the columns 8 n + 2 (lane % 4) + {0, 1}: bits of those before `column`.
  __device__ __forceinline__ uint32_t elements_before(int column) const {
    const int own = max(column - 2 * (lane & 3), 0), count = own / 8 * 2 + min(own % 8, 2);
    return count < 32 ? (1u << count) - 1 : 0xffffffffu;
  }

  // By byte permutes: the compiler would shift by a multiplication, which takes a cycle from the tensor cores.
  __device__ __forceinline__ static float2 unpack(uint32_t pair) {
    if constexpr (__is_same(T, ptx::bfloat16))
      return make_float2(__uint_as_float(__byte_perm(pair, 0, 0x1044)), __uint_as_float(pair & 0xffff0000u));
    else
      return ptx::unpack<T>(pair);
  }

  // dP^T to dS^T for four operand registers, from the rounded P: as good as from the other, since dS is rounded, too, and it
  // costs half the registers. A dO that is not finite shows in dS, even where P is 0.
  template <bool kMasked>
  __device__ __forceinline__ void gradients4(uint32_t* a, const uint32_t* a_p, const float* dp, uint32_t& largest, int, uint32_t) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 weight = unpack(a_p[n]);
      a[n] = ptx::pack<T>(weight.x * dp[2 * n], weight.y * dp[2 * n + 1]);
      if constexpr (kMasked) largest = ptx::max_magnitude<T>(largest, a[n]);
    }
  }

  __device__ __forceinline__ bool masked(int i0) const {
    const volatile int* full = block->full_rows[C.split ? 0 : consumer];  // from shared memory each time: registers are short
    return i0 < full[0] || i0 + C.block_m > full[1];
  }

  __device__ __forceinline__ void make_weights(uint32_t (&a)[kA], State&, const float (&x)[kS], int i0, int, uint32_t, uint32_t) const {
    if (masked(i0))
      weights<true>(a, x, i0);
    else
      weights<false>(a, x, i0);
  }

  // Until the slot of dS of tile n is free.
  __device__ __forceinline__ void wait_ds(uint32_t n) const { ptx::mbarrier_wait(shared.ds_empty(n & 1), (n >> 1 & 1) ^ 1); }

  // This warp's rows of it.
  __device__ __forceinline__ uint32_t ds_rows(uint32_t n) const { return shared.ds(n & 1) + (first_row() + warp * 16) * 128; }

  // dS of tile n to shared memory, for dQ.
  __device__ __forceinline__ void write_ds(const uint32_t (&a)[kA], uint32_t n) const {
    const int slot = static_cast<int>(n & 1), row = first_row() + warp * 16 + (lane & 15);
    wait_ds(n);
#pragma unroll
    for (int i = 0; i < C.block_m / 16; ++i)
      ptx::stmatrix_x4(shared.ds(slot) + Keys::chunk_offset(row, 2 * i + (lane >> 4)), a[4 * i], a[4 * i + 1], a[4 * i + 2],
                       a[4 * i + 3]);
    ptx::fence_async_shared();
    __syncwarp();
    arrive(shared.ds_full(slot));
  }

  // 64 columns of this warp's rows of dK or dV at a time through 2 KiB of shared memory, so that eight lanes store 128 bytes of a row.
  // (By shuffles in the quads it took 2.6 us at d 128, as each must have come before the next can go.)
  __device__ __forceinline__ void store_rows(T* out, int64_t row_stride, const float (&d)[kD], float factor, int columns,
                                             uint32_t to) const {
    const int row = first_row() + warp * 16, chunk = lane & 7;
    const int rows = block->s.capacity_k - block->first_key - row, used = block->s.seqlen_k - block->first_key - row;
    out += (block->first_key + row + (lane >> 3)) * row_stride + chunk * 8;
#pragma unroll
    for (int n = 0; n < C.head_dim / 64; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = ptx::pack<T>(d[32 * n + 8 * i + 2 * e] * factor, d[32 * n + 8 * i + 2 * e + 1] * factor);
        ptx::stmatrix_x4(to + Keys::chunk_offset(lane & 15, 2 * i + (lane >> 4)), x[0], x[1], x[2], x[3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + (lane >> 3);
        const uint4 value = ptx::load_shared_16(to + Keys::chunk_offset(r, chunk));
        const bool seen = r < used;
        const uint32_t x[4] = {seen ? value.x : 0, seen ? value.y : 0, seen ? value.z : 0, seen ? value.w : 0};
        ptx::store_global_if(r < rows && n * 64 + chunk * 8 < columns, out + 4 * i * row_stride + n * 64, x);
      }
      __syncwarp();  // all have read, before the next is written there
    }
  }

  // This warp's rows of dK or dV. `to`: 2 KiB of shared memory that nobody else looks at now.
  __device__ __forceinline__ void store(const RowTensor& out, bool is_float, bool aligned, const float (&d)[kD], float factor,
                                        int columns, uint32_t to) const {
    if (out.data == nullptr) return;
    const int64_t base =
        (p.backward.sequence.packed_k ? block->s.k_begin * out.row : block->s.cache_row * out.batch) + block->head_k * out.head;
    if (aligned) {
      store_rows(static_cast<T*>(out.data) + base, out.row, d, factor, columns, to);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = block->first_key + key_row(half);
      if (j >= block->s.capacity_k) continue;
      const bool used = j < block->s.seqlen_k;
#pragma unroll
      for (int n = 0; n < kD / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + 2 * (lane & 3) + e;
          if (column >= columns) continue;
          const float value = used ? d[4 * n + 2 * half + e] * factor : 0.f;
          if (is_float)
            static_cast<float*>(out.data)[base + j * out.row + column] = value;
          else
            static_cast<T*>(out.data)[base + j * out.row + column] = ptx::from_float<T>(value);
        }
    }
  }
  __device__ __forceinline__ void store_dk(const float (&dk)[kD], uint32_t to) const {
    store(p.backward.dk, p.backward.dk_is_float, p.dk_aligned, dk, p.backward.gradient_scale, p.backward.head_dim, to);
  }
  __device__ __forceinline__ void store_dv(const float (&dv)[kD], uint32_t to, float factor = 1.f) const {
    store(p.backward.dv, p.backward.dv_is_float, p.dv_aligned, dv, factor, p.backward.head_dim_v, to);
  }
};

}  // namespace tilewise::cuda
