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
  uint32_t part[3][4];  // high, middle, low
};
template <class T>
struct OperandB {  // one tile of 8 columns
  uint32_t x[2];
};
template <>
struct OperandB<float> {
  uint32_t part[3][2];
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

template <class Operand>
__device__ __forceinline__ void set(Operand& to, int n, float x, float y) {
  split(x, y, to.part[0][n], to.part[1][n], to.part[2][n]);
}

// Three bfloat16 tiles in place of one of floats: split once per block, they are read as 16-bit tiles are. kBytes: of a row of
// one of them; kTileBytes: from one to the next.
template <class Address, int kTileBytes>
struct PartsAddress {
  Address first;
  __device__ __forceinline__ uint32_t at(int part, int rows, int bytes) const { return first.at(rows, bytes) + part * kTileBytes; }
  __device__ __forceinline__ PartsAddress moved(int rows, int bytes) const { return {first.moved(rows, bytes)}; }
};
template <class From>
inline constexpr bool is_parts = false;
template <class Address, int kTileBytes>
inline constexpr bool is_parts<PartsAddress<Address, kTileBytes>> = true;

template <int kTileBytes, class Address>
__device__ __forceinline__ PartsAddress<Address, kTileBytes> parts(const Address& first) {
  return {first};
}
template <int kBytes, int kTileBytes>
__device__ __forceinline__ auto packed(const PartsAddress<LaneAddress<kBytes>, kTileBytes>& from) {
  return parts<kTileBytes>(packed(from.first));
}

// The chunks that this thread copied into the tile `from` of floats, as parts into the tiles `to`. Nobody else's, so the
// thread need only wait for its own copies.
template <class Copy>
__device__ __forceinline__ void split_tile(uint32_t from, uint32_t to) {
  using Parts = TileLayout<Copy::Layout::kRowBytes / 2>;
  constexpr int kTileBytes = Copy::kTileRows * Parts::kRowBytes;
  Copy::for_each([&](int row, int chunk) {
    const uint4 x = ptx::load_shared_16(from + Copy::Layout::chunk_offset(row, chunk));
    uint32_t y[3][2];
    split(__uint_as_float(x.x), __uint_as_float(x.y), y[0][0], y[1][0], y[2][0]);
    split(__uint_as_float(x.z), __uint_as_float(x.w), y[0][1], y[1][1], y[2][1]);
    const uint32_t at = to + Parts::byte_offset(row, chunk * 8);
#pragma unroll
    for (int n = 0; n < 3; ++n)
      ptx::store_shared(at + n * kTileBytes, make_float2(__uint_as_float(y[n][0]), __uint_as_float(y[n][1])));
  });
}

// A tile of floats that is read as A by load_a(), while B comes from parts: of each eight columns the even ones first, since
// ldmatrix then hands lane t the elements 2t, 2t + 1, 2t + 8, 2t + 9, as it does of 16-bit elements.
template <class Copy>
__device__ __forceinline__ void even_columns_first(uint32_t tile) {
  constexpr int kUnits = Copy::kChunks / 2;
#pragma unroll 1
  for (int n = threadIdx.x; n < Copy::kTileRows * kUnits; n += Copy::kTileThreads) {
    const uint32_t left = tile + Copy::Layout::chunk_offset(n / kUnits, n % kUnits * 2);
    const uint32_t right = tile + Copy::Layout::chunk_offset(n / kUnits, n % kUnits * 2 + 1);
    const uint4 x = ptx::load_shared_16(left), y = ptx::load_shared_16(right);
    ptx::store_shared(left, make_uint4(x.x, x.z, y.x, y.z));
    ptx::store_shared(right, make_uint4(x.y, x.w, y.y, y.w));
  }
}

// ---- from rows with k along the row: A, and B of S = Q K^T ----

// kPartTile: bytes of a tile of parts; 0: the elements are not in parts.
template <class T, int kBytes, int kPartTile = 0>
__device__ __forceinline__ auto lane_address_a(uint32_t tile, int lane) {
  if constexpr (kPartTile > 0) return parts<kPartTile>(lane_address_a<ptx::bfloat16, kBytes / 2>(tile, lane));
  else return LaneAddress<kBytes>(tile, lane & 15, lane >> 4);  // matrices (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1)
}
template <class T, int kBytes, int kPartTile = 0>
__device__ __forceinline__ auto lane_address_b(uint32_t tile, int lane) {
  if constexpr (kPartTile > 0) return parts<kPartTile>(lane_address_b<ptx::bfloat16, kBytes / 2>(tile, lane));
  else if constexpr (sizeof(T) == 4) return LaneAddress<kBytes>(tile, lane & 7, lane >> 3);  // (0-7, chunk 0), (0-7, 1), (0-7, 2), (0-7, 3)
  else return LaneAddress<kBytes>(tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);  // (0-7, 0), (0-7, 1), (8-15, 0), (8-15, 1)
}

// Rows row .. row + 15, k = 16 step ..
template <class T, class From>
__device__ __forceinline__ void load_a(OperandA<T>& a, const From& from, int row, int step) {
  if constexpr (is_parts<From>) {
#pragma unroll
    for (int n = 0; n < 3; ++n) ptx::ldmatrix_x4(a.part[n], from.at(n, row, step * 32));
  } else if constexpr (sizeof(T) == 4) {
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
__device__ __forceinline__ void load_b(OperandB<T>* b, const From& from, int row, int step) {
  if constexpr (is_parts<From>) {
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      uint32_t x[4];
      ptx::ldmatrix_x4(x, from.at(n, row, step * 32));
      b[0].part[n][0] = x[0], b[0].part[n][1] = x[1], b[1].part[n][0] = x[2], b[1].part[n][1] = x[3];
    }
  } else if constexpr (sizeof(T) == 4) {
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

template <class T, int kBytes, int kPartTile = 0>
__device__ __forceinline__ auto lane_address_bt(uint32_t tile, int lane) {
  if constexpr (kPartTile > 0) return parts<kPartTile>(lane_address_bt<ptx::bfloat16, kBytes / 2>(tile, lane));
  else if constexpr (sizeof(T) == 4) return RowPair<kBytes>(tile, lane & 3, lane >> 4, lane >> 2 & 3);
  else return LaneAddress<kBytes>(tile, lane & 15, lane >> 4);  // (k 0-7, n 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
}

// Two tiles of B: rows 16 step .., columns column .. column + 15.
template <class T, class From>
__device__ __forceinline__ void load_bt(OperandB<T>* b, const From& from, int step, int column) {
  if constexpr (is_parts<From>) {
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      uint32_t x[4];
      ptx::ldmatrix_x4_trans(x, from.at(n, step * 16, column * 2));
      b[0].part[n][0] = x[0], b[0].part[n][1] = x[1], b[1].part[n][0] = x[2], b[1].part[n][1] = x[3];
    }
  } else if constexpr (sizeof(T) == 4) {
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

// c[m][n + i] += a[step][m] b[step][i] for every step, row group m and tile i of B. Each step into sums of its own, small products
// first: tensor cores cut off what does not fit a sum, and in a running sum that would be a loss of up to 2^-24 a step, always
// towards zero. A product waits for the one before it in its sum, so sums take turns.
template <int kM, int kN, int kSteps, int kTiles>
__device__ __forceinline__ void multiply_parts(float (&c)[kM][kN][4], int n, const OperandA<float> (&a)[kSteps][kM],
                                               const OperandB<float> (&b)[kSteps][kTiles]) {
  constexpr int kProducts[6][2] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  float sum[kSteps][kTiles][kM][4] = {};
#pragma unroll
  for (int product = 0; product < 6; ++product)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t(&y)[2] = b[step][i].part[kProducts[product][1]];
#pragma unroll
        for (int m = 0; m < kM; ++m)
          ptx::mma_m16n8k16<ptx::bfloat16>(sum[step][i][m], a[step][m].part[kProducts[product][0]], y[0], y[1]);
      }
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[m][n + i][e] += sum[step][i][m][e];
}

// c[m][n + i] += a[m] b[i] for every row group m and tile i of B.
template <class T, int kM, int kN, int kTiles>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], int n, const OperandA<T> (&a)[kM], const OperandB<T> (&b)[kTiles]) {
  if constexpr (sizeof(T) == 4) {
    multiply_parts(c, n, reinterpret_cast<const OperandA<T>(&)[1][kM]>(a), reinterpret_cast<const OperandB<T>(&)[1][kTiles]>(b));
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < kTiles; ++i) ptx::mma_m16n8k16<T>(c[m][n + i], a[m].x, b[i].x[0], b[i].x[1]);
  }
}

// Tiles of B at a time: of one row group and float32 four, so that four sums take turns.
template <class T, class From, int kM, int kN>
inline constexpr int kTilesAtOnce = is_parts<From> && kM == 1 && kN % 4 == 0 ? 4 : 2;

// c += A B for one step, B from rows of n.
template <class T, int kM, int kN, class From>
__device__ __forceinline__ void multiply_b(float (&c)[kM][kN][4], const OperandA<T> (&a)[kM], const From& from, int step) {
  constexpr int kTiles = kTilesAtOnce<T, From, kM, kN>;
#pragma unroll
  for (int n = 0; n < kN; n += kTiles) {
    OperandB<T> b[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) load_b<T>(b + i, from, (n + i) * 8, step);
    multiply<T>(c, n, a, b);
  }
}

// The same for all steps, A from rows of m (first one: row 0): S = Q K^T, S^T = K Q^T, dP^T = V dO^T.
template <class T, int kSteps, int kUnroll, int kM, int kN, class FromA, class FromB>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], const FromA& from_a, const FromB& from_b) {
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; ++step) {
    OperandA<T> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_a<T>(a[m], from_a, m * 16, step);
    multiply_b<T>(c, a, from_b, step);
  }
}

// c += A B for one step, B from rows of k (first column `column`).
template <class T, int kM, int kN, class From>
__device__ __forceinline__ void multiply_bt(float (&c)[kM][kN][4], const OperandA<T> (&a)[kM], const From& from, int step,
                                            int column = 0) {
  constexpr int kTiles = kTilesAtOnce<T, From, kM, kN>;
#pragma unroll
  for (int n = 0; n < kN; n += kTiles) {
    OperandB<T> b[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) load_bt<T>(b + i, from, step, column + (n + i) * 8);
    multiply<T>(c, n, a, b);
  }
}

// One or two tiles of B, in parts: one tile comes two steps at a time.
template <int kBytes, int kPartTile, int kTiles>
__device__ __forceinline__ auto narrow_address_b(uint32_t tile, int lane) {
  if constexpr (kTiles == 1) return parts<kPartTile>(LaneAddress<kBytes / 2>(tile, lane & 7, lane >> 3));
  else return lane_address_b<float, kBytes, kPartTile>(tile, lane);
}

// c += A B for `kSteps` steps of 16 from `first` on, of A's row group m = 0 .. and all tiles of c: four sums in turns.
template <int kSteps, int kM, int kN, class FromA, class FromB>
__device__ __forceinline__ void multiply_narrow(float (&c)[kM][kN][4], const FromA& from_a, const FromB& from_b, int first) {
  OperandA<float> a[kSteps][kM];
  OperandB<float> b[kSteps][kN];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int m = 0; m < kM; ++m) load_a<float>(a[step][m], from_a, m * 16, first + step);
    if constexpr (kN > 1) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) load_b<float>(b[step] + n, from_b, n * 8, first + step);
    } else if (step % 2 == 0) {
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        uint32_t x[4];
        ptx::ldmatrix_x4(x, from_b.at(part, 0, (first + step) * 32));
        b[step][0].part[part][0] = x[0], b[step][0].part[part][1] = x[1];
        b[step + 1][0].part[part][0] = x[2], b[step + 1][0].part[part][1] = x[3];
      }
    }
  }
  multiply_parts(c, 0, a, b);
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

// A tile [key, query] of P^T or dS^T in float32, or in parts. Columns of float32 are stored in the order of k within a step, see above: of each
// eight, the even ones first.
template <class T, int kBytes, int kPartTile = 0>
__device__ __forceinline__ void store_pair(uint32_t tile, int row, int column, float x, float y) {  // column even
  using Layout = TileLayout<kBytes>;
  if constexpr (kPartTile > 0) {
    uint32_t part[3];
    split(x, y, part[0], part[1], part[2]);
    const uint32_t at = tile + TileLayout<kBytes / 2>::byte_offset(row, column * 2);
#pragma unroll
    for (int n = 0; n < 3; ++n) ptx::store_shared(at + n * kPartTile, part[n]);
  } else {
    static_assert(sizeof(T) == 4);
    const int place = (column & ~7) + (column & 7) / 2;
    ptx::store_shared(tile + Layout::byte_offset(row, place * 4), __float_as_uint(x));
    ptx::store_shared(tile + Layout::byte_offset(row, place * 4 + 16), __float_as_uint(y));
  }
}

// A [16 queries, 16 keys] of such a tile: keys 16 step .., queries 16 group ..
template <class T, int kBytes, int kPartTile = 0>
__device__ __forceinline__ auto lane_address_at(uint32_t tile, int lane) {
  if constexpr (kPartTile > 0) return parts<kPartTile>(lane_address_at<ptx::bfloat16, kBytes / 2>(tile, lane));
  else if constexpr (sizeof(T) == 4) return RowPair<kBytes>(tile, lane & 3, lane >> 2 & 1, lane >> 3);  // query lane / 4: place
  else return LaneAddress<kBytes>(tile, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
}
template <class T, class From>
__device__ __forceinline__ void load_at(OperandA<T>& a, const From& from, int step, int group) {
  if constexpr (is_parts<From>) {
#pragma unroll
    for (int n = 0; n < 3; ++n) ptx::ldmatrix_x4_trans(a.part[n], from.at(n, step * 16, group * 32));
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < 4; ++n)  // rows of A g, g + 8, twice; keys 2t, 2t + 1, then 2t + 8, 2t + 9
      set(a, n, ptx::load_shared_4(from.even.at(step * 16 + n / 2 * 8, group * 64 + n % 2 * 32)),
          ptx::load_shared_4(from.odd.at(step * 16 + n / 2 * 8, group * 64 + n % 2 * 32)));
  } else {
    ptx::ldmatrix_x4_trans(a.x, from.at(step * 16, group * 32));
  }
}

}  // namespace tilewise::cuda
