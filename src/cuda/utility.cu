// Small kernels beside the main ones: fill, combine, the dropout mask.
#include "cuda/append.cuh"
#include "cuda/combine.cuh"
#include "cuda/launch.cuh"
#include "cuda/tile/dropout.cuh"

namespace tilewise::cuda {
namespace {

struct FillParams {
  float* data;
  int64_t n0, n1, stride0, stride1;
  float value;
};

__global__ void fill_kernel(const __grid_constant__ FillParams p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < p.n0 * p.n1; n += stride)
    p.data[n / p.n1 * p.stride0 + n % p.n1 * p.stride1] = p.value;
}

// 1 = kept, for every pair of a sequence, seen or not; 0 for rows and keys of no sequence.
struct DropoutMaskParams {
  SequenceParams sequence;
  ScoreParams score;
  uint8_t* mask;
  int64_t shape[4], stride[4];  // [batch, head, query, key]
};

__global__ void dropout_mask_kernel(const __grid_constant__ DropoutMaskParams p) {
  const Dropout dropout = resolve_dropout(p.score);
  const int64_t total = p.shape[0] * p.shape[1] * p.shape[2] * p.shape[3];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < total; n += step) {
    const int64_t j = n % p.shape[3], rest = n / p.shape[3], i = rest % p.shape[2], batch_head = rest / p.shape[2];
    const int64_t h = batch_head % p.shape[1], b = batch_head / p.shape[1];
    const DeviceSequence s = resolve(p.sequence, static_cast<int>(b));
    p.mask[b * p.stride[0] + h * p.stride[1] + i * p.stride[2] + j * p.stride[3]] =
        i < s.seqlen_q && j < s.seqlen_k && dropout.keep(batch_head, i, j);
  }
}

int64_t blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return blocks < 65536 ? blocks : 65536;  // the kernels stride
}

}  // namespace

int launch_fill(float* data, int64_t n0, int64_t n1, int64_t stride0, int64_t stride1, float value, void* stream) {
  return launch<fill_kernel>(FillParams{data, n0, n1, stride0, stride1, value}, blocks_for(n0 * n1, 256), 256, 0,
                             static_cast<cudaStream_t>(stream));
}

int launch_append(const AppendParams& p, Element element, void* stream) {
  const SequenceParams& q = p.sequence;
  const int64_t rows = 2 * int64_t{q.batch} * q.seqlen_new * q.num_heads_k +
                       (p.rotary_dim > 0 ? int64_t{q.batch} * q.seqlen_q * q.num_heads_q : 0);
  const int64_t blocks = blocks_for(rows, kAppendWarps);
  const auto s = static_cast<cudaStream_t>(stream);
  switch (element) {
    case Element::kFloat16: return launch<append_kernel<ptx::float16>>(p, blocks, kAppendWarps * 32, 0, s);
    case Element::kBfloat16: return launch<append_kernel<ptx::bfloat16>>(p, blocks, kAppendWarps * 32, 0, s);
    default: return launch<append_kernel<float>>(p, blocks, kAppendWarps * 32, 0, s);
  }
}

int launch_combine(const ForwardParams& p, Element element, bool early, void* stream) {
  const SequenceParams& q = p.sequence;
  const int64_t rows = q.packed_q ? q.total_q : static_cast<int64_t>(q.batch) * q.seqlen_q;
  const int64_t blocks = blocks_for(rows * q.num_heads_q, 1);
  const auto s = static_cast<cudaStream_t>(stream);
  const Start start = early ? Start::kEarly : Start::kInOrder;
  switch (element) {
    case Element::kFloat16: return launch<combine_kernel<ptx::float16>>(p, blocks, kCombineWarps * 32, 0, s, start);
    case Element::kBfloat16: return launch<combine_kernel<ptx::bfloat16>>(p, blocks, kCombineWarps * 32, 0, s, start);
    default: return launch<combine_kernel<float>>(p, blocks, kCombineWarps * 32, 0, s, start);
  }
}

int launch_dropout_mask(const SequenceParams& sequence, const ScoreParams& score, uint8_t* mask,
                        const int64_t (&shape)[4], const int64_t (&stride)[4], void* stream) {
  DropoutMaskParams p{sequence, score, mask, {}, {}};
  int64_t total = 1;
  for (int n = 0; n < 4; ++n) p.shape[n] = shape[n], p.stride[n] = stride[n], total *= shape[n];
  return launch<dropout_mask_kernel>(p, blocks_for(total, 256), 256, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace tilewise::cuda
