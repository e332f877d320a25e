#include "cuda/softmax.h"

#include <algorithm>

#include "core/softmax.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/math.cuh"

namespace tilewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerLane = 32;  // elements of a row in registers: rows of up to 32 * 32 belong to one warp

struct RowsParams {  // rows of any strides; dimension ndim - 1 is the row
  const void* x;
  void* y;
  float* lse;
  int32_t x_dtype, y_dtype, ndim;
  int64_t rows, columns, shape[TW_MAX_DIMS], x_stride[TW_MAX_DIMS], y_stride[TW_MAX_DIMS], lse_stride[TW_MAX_DIMS];
};

template <class Real>
__device__ __forceinline__ Real load(const void* data, int32_t dtype, int64_t at) {
  switch (dtype) {
    case TW_FLOAT16: return ptx::to_float(static_cast<const ptx::float16*>(data)[at]);
    case TW_BFLOAT16: return ptx::to_float(static_cast<const ptx::bfloat16*>(data)[at]);
    case TW_FLOAT32: return static_cast<const float*>(data)[at];
    default: return static_cast<Real>(static_cast<const double*>(data)[at]);
  }
}

template <class Real>
__device__ __forceinline__ void store(void* data, int32_t dtype, int64_t at, Real value) {
  switch (dtype) {
    case TW_FLOAT16: static_cast<ptx::float16*>(data)[at] = ptx::from_float<ptx::float16>(static_cast<float>(value)); break;
    case TW_BFLOAT16: static_cast<ptx::bfloat16*>(data)[at] = ptx::from_float<ptx::bfloat16>(static_cast<float>(value)); break;
    case TW_FLOAT32: static_cast<float*>(data)[at] = static_cast<float>(value); break;
    default: static_cast<double*>(data)[at] = value; break;
  }
}

__device__ __forceinline__ int64_t row_offset(const RowsParams& p, const int64_t* stride, int64_t row) {
  int64_t at = 0;
  for (int dim = p.ndim - 2; dim >= 0; --dim) at += row % p.shape[dim] * stride[dim], row /= p.shape[dim];
  return at;
}

// The state of all lanes together; every lane learns it.
template <class Real>
__device__ __forceinline__ OnlineSoftmax<Real> merge_warp(OnlineSoftmax<Real> state) {
  for (int mask = 16; mask > 0; mask /= 2)
    state.merge({__shfl_xor_sync(0xffffffffu, state.max, mask), __shfl_xor_sync(0xffffffffu, state.sum, mask)});
  return state;
}

// A warp per row, the row in registers: one read and one write of every element.
template <class Real>
__global__ void __launch_bounds__(kThreads) short_rows_kernel(const __grid_constant__ RowsParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; row < p.rows; row += step) {
    const int64_t from = row_offset(p, p.x_stride, row), to = row_offset(p, p.y_stride, row);
    Real x[kPerLane];
    OnlineSoftmax<Real> state;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int64_t column = n * 32 + lane;
      x[n] = column < p.columns ? load<Real>(p.x, p.x_dtype, from + column * p.x_stride[p.ndim - 1]) : -static_cast<Real>(INFINITY);
      state.max = x[n] > state.max ? x[n] : state.max;
    }
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) state.sum += x[n] = OnlineSoftmax<Real>::weight(x[n], state.max);
    const Real own = state.max;
    state = merge_warp(state);
    const Real factor = state.sum == 0 ? Real(0) : OnlineSoftmax<Real>::rescale(own, state.max) / state.sum;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int64_t column = n * 32 + lane;
      if (column < p.columns) store<Real>(p.y, p.y_dtype, to + column * p.y_stride[p.ndim - 1], x[n] * factor);
    }
    if (p.lse && lane == 0) p.lse[row_offset(p, p.lse_stride, row)] = static_cast<float>(state.lse());
  }
}

// A block per row: one read for maximum and sum together, then a second, mostly from cache, as it is written.
template <class Real>
__global__ void __launch_bounds__(kThreads) long_rows_kernel(const __grid_constant__ RowsParams p) {
  __shared__ OnlineSoftmax<Real> parts[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t from = row_offset(p, p.x_stride, row), to = row_offset(p, p.y_stride, row);
    const int64_t x_step = p.x_stride[p.ndim - 1], y_step = p.y_stride[p.ndim - 1];
    OnlineSoftmax<Real> state;
    for (int64_t column = threadIdx.x; column < p.columns; column += kThreads) state.push(load<Real>(p.x, p.x_dtype, from + column * x_step));
    state = merge_warp(state);
    __syncthreads();  // the last row's parts have been read
    if (lane == 0) parts[warp] = state;
    __syncthreads();
    state = merge_warp(lane < kThreads / 32 ? parts[lane] : OnlineSoftmax<Real>());
    const Real factor = state.sum == 0 ? Real(0) : 1 / state.sum;
    for (int64_t column = threadIdx.x; column < p.columns; column += kThreads) {
      const Real x = load<Real>(p.x, p.x_dtype, from + column * x_step);
      store<Real>(p.y, p.y_dtype, to + column * y_step, OnlineSoftmax<Real>::weight(x, state.max) * factor);
    }
    if (p.lse && threadIdx.x == 0) p.lse[row_offset(p, p.lse_stride, row)] = static_cast<float>(state.lse());
  }
}

struct MergeParams {
  void* o;
  const void* o_other;
  float* lse;
  const float* lse_other;
  int32_t o_dtype, other_dtype;
  int64_t batch, rows, heads, columns;
  int64_t o_stride[4], other_stride[4];      // batch, row, head, column
  int64_t lse_stride[3], lse_other_stride[3];  // batch, head, row
};

// A warp per row of a head. An empty part takes no part at all: its o may hold anything.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32), total = p.batch * p.rows * p.heads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < total; item += step) {
    const int64_t h = item % p.heads, i = item / p.heads % p.rows, b = item / p.heads / p.rows;
    float* const lse = p.lse + b * p.lse_stride[0] + h * p.lse_stride[1] + i * p.lse_stride[2];
    const float mine = *lse, other = p.lse_other[b * p.lse_other_stride[0] + h * p.lse_other_stride[1] + i * p.lse_other_stride[2]];
    const MergeWeights<float> merged = merge_weights(mine, other);
    const bool empty = mine == -INFINITY, empty_other = other == -INFINITY;
    __syncwarp();
    if (lane == 0) *lse = merged.lse;
    if (empty_other && !empty) continue;
    const int64_t at = b * p.o_stride[0] + i * p.o_stride[1] + h * p.o_stride[2];
    const int64_t at_other = b * p.other_stride[0] + i * p.other_stride[1] + h * p.other_stride[2];
    for (int64_t c = lane; c < p.columns; c += 32) {
      const float x = empty ? 0.f : load<float>(p.o, p.o_dtype, at + c * p.o_stride[3]);
      const float y = empty_other ? 0.f : load<float>(p.o_other, p.other_dtype, at_other + c * p.other_stride[3]);
      store<float>(p.o, p.o_dtype, at + c * p.o_stride[3], empty ? y : merged.weight_a * x + merged.weight_b * y);
    }
  }
}

int64_t blocks_for(int64_t items, int64_t per_block) { return std::min<int64_t>((items + per_block - 1) / per_block, 1 << 20); }

}  // namespace

Status softmax(const tw_tensor& x, const tw_tensor& y, const tw_tensor* lse, void* stream) {
  const DeviceGuard guard(x.device_index);
  TW_RETURN_IF_ERROR(guard.status());
  RowsParams p = {x.data, y.data, lse ? static_cast<float*>(lse->data) : nullptr, x.dtype, y.dtype, x.ndim, 1, x.shape[x.ndim - 1], {}, {}, {}, {}};
  for (int n = 0; n < x.ndim; ++n) {
    p.shape[n] = x.shape[n], p.x_stride[n] = x.stride[n], p.y_stride[n] = y.stride[n];
    if (lse && n + 1 < x.ndim) p.lse_stride[n] = lse->stride[n];
    if (n + 1 < x.ndim) p.rows *= x.shape[n];
  }
  const bool wide = x.dtype == TW_FLOAT64, in_registers = p.columns <= 32 * kPerLane;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t blocks = blocks_for(p.rows, in_registers ? kThreads / 32 : 1);
  const cudaError_t error = in_registers ? (wide ? launch<short_rows_kernel<double>>(p, blocks, kThreads, 0, s)
                                                 : launch<short_rows_kernel<float>>(p, blocks, kThreads, 0, s))
                                         : (wide ? launch<long_rows_kernel<double>>(p, blocks, kThreads, 0, s)
                                                 : launch<long_rows_kernel<float>>(p, blocks, kThreads, 0, s));
  return error == cudaSuccess ? Status() : device_error("softmax", error);
}

Status merge_states(const tw_tensor& o, const tw_tensor& lse, const tw_tensor& o_other, const tw_tensor& lse_other, void* stream) {
  const DeviceGuard guard(o.device_index);
  TW_RETURN_IF_ERROR(guard.status());
  const int packed = o.ndim == 3;
  MergeParams p = {};
  p.o = o.data, p.o_other = o_other.data, p.o_dtype = o.dtype, p.other_dtype = o_other.dtype;
  p.lse = static_cast<float*>(lse.data), p.lse_other = static_cast<const float*>(lse_other.data);
  p.batch = packed ? 1 : o.shape[0], p.rows = o.shape[1 - packed], p.heads = o.shape[2 - packed], p.columns = o.shape[3 - packed];
  for (int n = packed; n < 4; ++n) p.o_stride[n] = o.stride[n - packed], p.other_stride[n] = o_other.stride[n - packed];
  for (int n = packed; n < 3; ++n) p.lse_stride[n] = lse.stride[n - packed], p.lse_other_stride[n] = lse_other.stride[n - packed];
  const int64_t blocks = blocks_for(p.batch * p.rows * p.heads, kThreads / 32);
  const cudaError_t error = launch<merge_kernel>(p, blocks, kThreads, 0, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : device_error("merge_states", error);
}

}  // namespace tilewise::cuda
