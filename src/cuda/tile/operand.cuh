// How a warp holds the operands of one tensor-core step of 16 k, and how it gets them from shared memory.
//
// 16-bit types: as mma.m16n8k16 takes them, through ldmatrix. Lane l = 4 g + t holds, of A [16, 16], rows g and g + 8, and of
// B [16, 8], column g, in both cases k = 2t, 2t + 1, 2t + 8, 2t + 9.
//
// float32: x = high + middle + low, three bfloat16 that hold its 24 significant bits exactly. A product of two such sums is
// nine; six are computed, the other three are below 2^-24 of the first. That is float32 arithmetic on tensor cores at a
// sixth of bfloat16's rate, a third of TF32's; three TF32 products would lose the last bit of a factor, so that a
// probability of 1 would not give back v. Within a step the order of k is free, if A and B agree: where ldmatrix hands
// lane t the elements t, t + 4, t + 8, t + 12 of a row, these are its k.
#pragma once
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/layout.cuh"

namespace tilewise::cuda {

template <class T>
struct OperandA {
  uint32_t x[4];
};
template <>
struct OperandA<float> {
  uint32_t high[4], middle[4], low[4];
};
template <class T>
struct OperandB {  // one tile of 8 columns
  uint32_t x[2];
};
template <>
struct OperandB<float> {
  uint32_t high[2], middle[2], low[2];
};

// The three parts of a pair of floats, x in the lower halves. Truncation keeps every remainder exact.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& middle, uint32_t& low) {
  const auto upper = [](float v) { return __uint_as_float(__float_as_uint(v) & 0xffff0000u); };
  const auto pack = [](float v, float w) { return __byte_perm(__float_as_uint(v), __float_as_uint(w), 0x7632); };
  high = pack(x, y);
  x -= upper(x), y -= upper(y);
  middle = pack(x, y);
  x -= upper(x), y -= upper(y);
  low = pack(x, y);
}

__device__ __forceinline__ void set(OperandA<float>& a, int n, float x, float y) { split(x, y, a.high[n], a.middle[n], a.low[n]); }
__device__ __forceinline__ void set(OperandB<float>& b, int n, float x, float y) { split(x, y, b.high[n], b.middle[n], b.low[n]); }

// ---- from rows with k along the row: A, and B of S = Q K^T ----

template <class T, int kBytes>
__device__ __forceinline__ LaneAddress<kBytes> lane_address_a(uint32_t tile, int lane) {
  return {tile, lane & 15, lane >> 4};  // matrices (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1)
}
template <class T, int kBytes>
__device__ __forceinline__ LaneAddress<kBytes> lane_address_b(uint32_t tile, int lane) {
  if constexpr (sizeof(T) == 4) return {tile, lane & 7, lane >> 3};  // (0-7, chunk 0), (0-7, 1), (0-7, 2), (0-7, 3)
  else return {tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1};  // (0-7, 0), (0-7, 1), (8-15, 0), (8-15, 1)
}

// Rows row .. row + 15, k = 16 step ..
template <class T, class From>
__device__ __forceinline__ void load_a(OperandA<T>& a, const From& from, int row, int step) {
  if constexpr (sizeof(T) == 4) {
    uint32_t left[4], right[4];
    ptx::ldmatrix_x4(left, from.at(row, step * 64));
    ptx::ldmatrix_x4(right, from.at(row, step * 64 + 32));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      set(a, n, __uint_as_float(left[n]), __uint_as_float(left[n + 2]));
      set(a, n + 2, __uint_as_float(right[n]), __uint_as_float(right[n + 2]));
    }
  } else {
    ptx::ldmatrix_x4(a.x, from.at(row, step * 32));
  }
}

// Two tiles of B: its columns are the rows row .. row + 15.
template <class T, class From>
__device__ __forceinline__ void load_b(OperandB<T> (&b)[2], const From& from, int row, int step) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t x[4];
      ptx::ldmatrix_x4(x, from.at(row + n * 8, step * 64));
      set(b[n], 0, __uint_as_float(x[0]), __uint_as_float(x[1]));
      set(b[n], 1, __uint_as_float(x[2]), __uint_as_float(x[3]));
    }
  } else {
    uint32_t x[4];
    ptx::ldmatrix_x4(x, from.at(row, step * 32));
    b[0].x[0] = x[0], b[0].x[1] = x[1], b[1].x[0] = x[2], b[1].x[1] = x[3];
  }
}

// ---- from rows of k: B of O = P V, and A of dQ = dS K ----

// For float32, where ldmatrix cannot transpose: rows 2t and 2t + 1, which with any column g lie in different banks.
template <int kBytes>
struct RowPair {
  LaneAddress<kBytes> even, odd;
  __device__ __forceinline__ RowPair(uint32_t tile, int t, int chunk, int word)
      : even(tile, 2 * t, chunk, word * 4), odd(tile, 2 * t + 1, chunk, word * 4) {}
};

template <int kBytes>
__device__ __forceinline__ const RowPair<kBytes>& packed(const RowPair<kBytes>& from) {
  return from;
}

template <class T, int kBytes>
__device__ __forceinline__ auto lane_address_bt(uint32_t tile, int lane) {
  if constexpr (sizeof(T) == 4) return RowPair<kBytes>(tile, lane & 3, lane >> 4, lane >> 2 & 3);
  else return LaneAddress<kBytes>(tile, lane & 15, lane >> 4);  // (k 0-7, n 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
}

// Two tiles of B: rows 16 step .., columns column .. column + 15.
template <class T, class From>
__device__ __forceinline__ void load_bt(OperandB<T> (&b)[2], const From& from, int step, int column) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        set(b[n], half, ptx::load_shared_4(from.even.at(step * 16 + half * 8, (column + n * 8) * 4)),
            ptx::load_shared_4(from.odd.at(step * 16 + half * 8, (column + n * 8) * 4)));
  } else {
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, from.at(step * 16, column * 2));
    b[0].x[0] = x[0], b[0].x[1] = x[1], b[1].x[0] = x[2], b[1].x[1] = x[3];
  }
}

// ---- products ----

// c[m][n], c[m][n + 1] += a[m] b[0], a[m] b[1] for every row group m.
template <class T, int kM, int kN>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], int n, const OperandA<T> (&a)[kM], const OperandB<T> (&b)[2]) {
  if constexpr (sizeof(T) == 4) {
    // Into a sum of their own, small products first: tensor cores cut off what does not fit a sum, and in a running sum
    // that would be a loss of up to 2^-24 a step, always towards zero.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum[kM][4] = {};
      const auto add = [&](auto part_a, auto part_b) {
        const uint32_t(&y)[2] = part_b(b[i]);
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::mma_m16n8k16<ptx::bfloat16>(sum[m], part_a(a[m]), y[0], y[1]);
      };
      const auto high = [](const auto& x) -> auto& { return x.high; };
      const auto middle = [](const auto& x) -> auto& { return x.middle; };
      const auto low = [](const auto& x) -> auto& { return x.low; };
      add(low, high), add(high, low), add(middle, middle), add(middle, high), add(high, middle), add(high, high);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[m][n + i][e] += sum[m][e];
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_m16n8k16<T>(c[m][n + i], a[m].x, b[i].x[0], b[i].x[1]);
  }
}

// c += A B for one step, B from rows of n (first column of B: row `row`) ...
template <class T, int kM, int kN, class From>
__device__ __forceinline__ void multiply_b(float (&c)[kM][kN][4], const OperandA<T> (&a)[kM], const From& from, int step) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    OperandB<T> b[2];
    load_b<T>(b, from, n * 8, step);
    multiply<T>(c, n, a, b);
  }
}

// ... or from rows of k (first column `column`).
template <class T, int kM, int kN, class From>
__device__ __forceinline__ void multiply_bt(float (&c)[kM][kN][4], const OperandA<T> (&a)[kM], const From& from, int step,
                                            int column = 0) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    OperandB<T> b[2];
    load_bt<T>(b, from, step, column + n * 8);
    multiply<T>(c, n, a, b);
  }
}

// ---- between accumulators, operands and tiles of pairs ----

// A from columns [16 step, 16 step + 16) of an accumulator [16 kM, 8 kN].
template <class T, int kM, int kN>
__device__ __forceinline__ void operand_of(OperandA<T> (&a)[kM], const float (&x)[kM][kN][4], int step) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float first = x[m][2 * step + quarter / 2][quarter % 2 * 2], second = x[m][2 * step + quarter / 2][quarter % 2 * 2 + 1];
      if constexpr (sizeof(T) == 4) set(a[m], quarter, first, second);
      else a[m].x[quarter] = ptx::pack<T>(first, second);
    }
}

// A tile [key, query] of P^T or dS^T. Columns of float32 are stored in the order of k within a step, see above: of each
// eight, the even ones first.
template <class T, int kBytes>
__device__ __forceinline__ void store_pair(uint32_t tile, int row, int column, float x, float y) {  // column even
  using Layout = TileLayout<kBytes>;
  if constexpr (sizeof(T) == 4) {
    const int place = (column & ~7) + (column & 7) / 2;
    ptx::store_shared(tile + Layout::byte_offset(row, place * 4), __float_as_uint(x));
    ptx::store_shared(tile + Layout::byte_offset(row, place * 4 + 16), __float_as_uint(y));
  } else {
    ptx::store_shared(tile + Layout::byte_offset(row, column * 2), ptx::pack<T>(x, y));
  }
}

// A [16 queries, 16 keys] of such a tile: keys 16 step .., queries 16 group ..
template <class T, int kBytes>
__device__ __forceinline__ auto lane_address_at(uint32_t tile, int lane) {
  if constexpr (sizeof(T) == 4) return RowPair<kBytes>(tile, lane & 3, lane >> 2 & 1, lane >> 3);  // query lane / 4: place
  else return LaneAddress<kBytes>(tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
}
template <class T, class From>
__device__ __forceinline__ void load_at(OperandA<T>& a, const From& from, int step, int group) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < 4; ++n)  // rows of A g, g + 8, twice; keys 2t, 2t + 1, then 2t + 8, 2t + 9
      set(a, n, ptx::load_shared_4(from.even.at(step * 16 + n / 2 * 8, group * 64 + n % 2 * 32)),
          ptx::load_shared_4(from.odd.at(step * 16 + n / 2 * 8, group * 64 + n % 2 * 32)));
  } else {
    ptx::ldmatrix_x4_trans(a.x, from.at(step * 16, group * 32));
  }
}

}  // namespace tilewise::cuda
