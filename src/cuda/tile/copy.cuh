// Tiles between global and shared memory. Rows and columns that do not exist are filled with zeros, so that memory
// beyond a sequence never takes part in arithmetic.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/layout.cuh"

namespace tilewise::cuda {

template <class T, int kRows, int kCols, int kThreads>
struct TileCopy {
  using Layout = TileLayout<kCols * static_cast<int>(sizeof(T))>;
  static constexpr int kTileRows = kRows, kTileThreads = kThreads;
  static constexpr int kPerChunk = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kChunks = kCols / kPerChunk;
  static constexpr int kThreadsPerRow = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static constexpr int kChunksPerThread = kChunks / kThreadsPerRow;
  static_assert(kRows % kRowsPerPass == 0 && kChunks % kThreadsPerRow == 0);

  // f(row, chunk) for every chunk of this thread.
  template <class F>
  static __device__ __forceinline__ void for_each(F&& f) {
    const int thread_row = threadIdx.x / kThreadsPerRow, thread_chunk = threadIdx.x % kThreadsPerRow;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int c = 0; c < kChunksPerThread; ++c) f(thread_row + pass * kRowsPerPass, thread_chunk + c * kThreadsPerRow);
  }

  // Row r of the tile comes from source + r * stride, if r < rows; of others nothing is read, whatever their address. Needs
  // 16-byte aligned rows. kFast: a second copy of the code for whole tiles, without bounds. Worth 5 % where registers are
  // left (forward, d <= 128), a loss elsewhere.
  template <bool kFast>
  static __device__ __forceinline__ void load(uint32_t tile, const T* source, int64_t stride, int rows, int cols) {
    const int thread_row = threadIdx.x / kThreadsPerRow, thread_chunk = threadIdx.x % kThreadsPerRow;
    const T* thread_source = source + thread_row * stride + thread_chunk * kPerChunk;
    if (kFast && rows >= kRows && cols == kCols) {  // one addition a row
      const int64_t step = kRowsPerPass * stride;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, thread_source += step)
#pragma unroll
        for (int c = 0; c < kChunksPerThread; ++c)
          ptx::cp_async_16(tile + Layout::chunk_offset(thread_row + pass * kRowsPerPass, thread_chunk + c * kThreadsPerRow),
                           thread_source + c * kThreadsPerRow * kPerChunk);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread_row + pass * kRowsPerPass;
#pragma unroll
      for (int c = 0; c < kChunksPerThread; ++c) {
        const int chunk = thread_chunk + c * kThreadsPerRow;
        const bool exists = row < rows && chunk * kPerChunk < cols;
        ptx::cp_async_16(tile + Layout::chunk_offset(row, chunk),
                         thread_source + pass * kRowsPerPass * stride + c * kThreadsPerRow * kPerChunk, exists ? 16 : 0);
      }
    }
  }

  // The same where row r lies at source + row_offset(r): paged keys, packed query heads, and rows of any alignment.
  template <class RowOffset>
  static __device__ __forceinline__ void load_rows(uint32_t tile, const T* source, RowOffset&& row_offset, int rows,
                                                   int cols, bool aligned) {
    const int thread_row = threadIdx.x / kThreadsPerRow, thread_chunk = threadIdx.x % kThreadsPerRow;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread_row + pass * kRowsPerPass;
      const T* row_source = row < rows ? source + row_offset(row) : source;
#pragma unroll 1
      for (int c = 0; c < kChunksPerThread; ++c) {
        const int chunk = thread_chunk + c * kThreadsPerRow;
        const bool exists = row < rows && chunk * kPerChunk < cols;
        const uint32_t address = tile + Layout::chunk_offset(row, chunk);
        if (aligned) {
          ptx::cp_async_16(address, exists ? row_source + chunk * kPerChunk : source, exists ? 16 : 0);
        } else {
          uint32_t words[4] = {0, 0, 0, 0};
          if (exists) {  // up to `cols`, which may end inside the chunk
            const T* elements = row_source + chunk * kPerChunk;
            const int left = cols - chunk * kPerChunk;
            if constexpr (sizeof(T) == 4) {
#pragma unroll
              for (int n = 0; n < 4; ++n) words[n] = n < left ? __float_as_uint(elements[n]) : 0;
            } else {
              const auto* halves = reinterpret_cast<const uint16_t*>(elements);
#pragma unroll
              for (int n = 0; n < 8; ++n)
                if (n < left) words[n / 2] |= static_cast<uint32_t>(halves[n]) << 16 * (n % 2);
            }
          }
          ptx::store_shared(address, make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }

  // Zeroes the chunks of this thread that hold inf or NaN and marks them, one bit for 8 columns or kMark, in marks[row]; true if
  // there was one. For tiles in which some pair is masked: 0 * NaN must not reach a row that does not see the key. Call
  // between the end of the thread's own copies and the barrier that publishes the tile.
  template <uint32_t kMark = 0>
  static __device__ __forceinline__ bool remove_nonfinite(uint32_t tile, uint32_t* marks) {
    uint32_t sum = 0;  // of zeros of either sign: NaN as soon as one chunk is not finite
    for_each([&](int row, int chunk) {
      const uint4 x = ptx::load_shared_16(tile + Layout::chunk_offset(row, chunk));
      sum = ptx::add_zero_times<T>(x.x, ptx::add_zero_times<T>(x.y, ptx::add_zero_times<T>(x.z, ptx::add_zero_times<T>(x.w, sum))));
    });
    if ((sum & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu)) == 0) return false;
    bool found = false;
    for_each([&](int row, int chunk) {
      const uint32_t address = tile + Layout::chunk_offset(row, chunk);
      const uint4 x = ptx::load_shared_16(address);
      if (ptx::has_nonfinite<T>(x.x) || ptx::has_nonfinite<T>(x.y) || ptx::has_nonfinite<T>(x.z) ||
          ptx::has_nonfinite<T>(x.w)) {
        ptx::store_shared(address, make_uint4(0, 0, 0, 0));
        if constexpr (sizeof(T) == 4)  // and its neighbour of the same 8 columns; who reads that meanwhile sees either
          ptx::store_shared(tile + Layout::chunk_offset(row, chunk ^ 1), make_uint4(0, 0, 0, 0));
        atomicOr(marks + row, kMark != 0 ? kMark : 1u << chunk * kPerChunk / 8);
        found = true;
      }
    });
    return found;
  }
};

}  // namespace tilewise::cuda
