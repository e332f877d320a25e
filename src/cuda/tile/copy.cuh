// Tiles between global and shared memory. Rows and columns that do not exist are filled with zeros, so that memory
// beyond a sequence never takes part in arithmetic.
#pragma once
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/layout.cuh"

namespace tilewise::cuda {

template <int kRows, int kCols, int kThreads>
struct TileCopy {
  using Layout = TileLayout<kCols>;
  static constexpr int kChunks = kCols / 8;
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

  // Row r of the tile comes from source + r * stride, if r < rows. Needs 16-byte aligned rows. kFast: a second copy of the
  // code for whole tiles, without bounds. Worth 5 % where registers are left (forward, d <= 128), a loss elsewhere.
  template <bool kFast, class T>
  static __device__ __forceinline__ void load(uint32_t tile, const T* source, int64_t stride, int rows, int cols) {
    const int thread_row = threadIdx.x / kThreadsPerRow, thread_chunk = threadIdx.x % kThreadsPerRow;
    const T* thread_source = source + thread_row * stride + thread_chunk * 8;
    if (kFast && rows >= kRows && cols == kCols) {  // one addition a row
      const int64_t step = kRowsPerPass * stride;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, thread_source += step)
#pragma unroll
        for (int c = 0; c < kChunksPerThread; ++c)
          ptx::cp_async_16(tile + Layout::chunk_offset(thread_row + pass * kRowsPerPass, thread_chunk + c * kThreadsPerRow),
                           thread_source + c * kThreadsPerRow * 8);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread_row + pass * kRowsPerPass;
#pragma unroll
      for (int c = 0; c < kChunksPerThread; ++c) {
        const int chunk = thread_chunk + c * kThreadsPerRow;
        const bool exists = row < rows && chunk * 8 < cols;
        ptx::cp_async_16(tile + Layout::chunk_offset(row, chunk),
                         exists ? thread_source + pass * kRowsPerPass * stride + c * kThreadsPerRow * 8 : source,
                         exists ? 16 : 0);
      }
    }
  }

  // The same where row r lies at source + row_offset(r): paged keys, packed query heads, and rows of any alignment.
  template <class T, class RowOffset>
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
        const bool exists = row < rows && chunk * 8 < cols;
        const uint32_t address = tile + Layout::chunk_offset(row, chunk);
        if (aligned) {
          ptx::cp_async_16(address, exists ? row_source + chunk * 8 : source, exists ? 16 : 0);
        } else {
          uint32_t words[4] = {0, 0, 0, 0};
          if (exists) {
            const auto* elements = reinterpret_cast<const uint16_t*>(row_source + chunk * 8);
#pragma unroll
            for (int n = 0; n < 4; ++n) words[n] = elements[2 * n] | static_cast<uint32_t>(elements[2 * n + 1]) << 16;
          }
          ptx::store_shared(address, make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }

  // Zeroes the chunks of this thread that hold inf or NaN and marks them, one bit a chunk, in marks[row]; true if there
  // was one. For tiles in which some pair is masked: 0 * NaN must not reach a row that does not see the key. Call
  // between the end of the thread's own copies and the barrier that publishes the tile.
  template <class T>
  static __device__ __forceinline__ bool remove_nonfinite(uint32_t tile, uint32_t* marks) {
    bool found = false;
    for_each([&](int row, int chunk) {
      const uint32_t address = tile + Layout::chunk_offset(row, chunk);
      const uint4 x = ptx::load_shared_16(address);
      if (ptx::has_nonfinite<T>(x.x) || ptx::has_nonfinite<T>(x.y) || ptx::has_nonfinite<T>(x.z) ||
          ptx::has_nonfinite<T>(x.w)) {
        ptx::store_shared(address, make_uint4(0, 0, 0, 0));
        atomicOr(marks + row, 1u << chunk);
        found = true;
      }
    });
    return found;
  }
};

}  // namespace tilewise::cuda
