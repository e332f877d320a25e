// The small kernels around the backward pass.
#include <algorithm>

#include "cuda/backward_post.cuh"
#include "cuda/backward_pre.cuh"
#include "cuda/launch.cuh"

namespace tilewise::cuda {
namespace {

int64_t row_blocks(const BackwardParams& p) { return (p.sequence.seqlen_q + kRowPadding - 1) / kRowPadding; }

template <auto kernel, class Params>
int launch_small(const Params& p, int64_t blocks, int threads, bool early, void* stream) {
  return launch<kernel>(p, blocks, threads, 0, static_cast<cudaStream_t>(stream), early ? Start::kEarly : Start::kInOrder);
}

template <class T>
int launch_pre(const BackwardParams& p, bool early, void* stream) {
  const int64_t blocks = row_blocks(p) * p.sequence.num_heads_q * p.sequence.batch;
  if constexpr (sizeof(T) == 2) {
    const int columns = p.aligned && p.o_aligned ? p.head_dim_v : 0;
    if (columns == 64) return launch_small<backward_pre_kernel<T, 1>>(p, blocks, kPreThreads, early, stream);
    if (columns == 128) return launch_small<backward_pre_kernel<T, 2>>(p, blocks, kPreThreads, early, stream);
    if (columns == 256) return launch_small<backward_pre_kernel<T, 4>>(p, blocks, kPreThreads, early, stream);
  }
  return launch_small<backward_pre_kernel<T, 0>>(p, blocks, kPreThreads, early, stream);
}

}  // namespace

int launch_backward_pre(const BackwardParams& p, Element element, bool early, void* stream) {
  switch (element) {
    case Element::kFloat16: return launch_pre<ptx::float16>(p, early, stream);
    case Element::kBfloat16: return launch_pre<ptx::bfloat16>(p, early, stream);
    default: return launch_pre<float>(p, early, stream);
  }
}

int launch_backward_post(const BackwardParams& p, Element element, bool early, void* stream) {
  int64_t blocks = std::max<int64_t>(row_blocks(p), 1) * p.sequence.num_heads_q * (p.sequence.batch + p.sequence.packed_q);
  if (p.only_again) blocks = std::min<int64_t>(blocks, 264);
  switch (element) {
    case Element::kFloat16: return launch_small<backward_post_kernel<ptx::float16>>(p, blocks, kPostWarps * 32, early, stream);
    case Element::kBfloat16: return launch_small<backward_post_kernel<ptx::bfloat16>>(p, blocks, kPostWarps * 32, early, stream);
    default: return launch_small<backward_post_kernel<float>>(p, blocks, kPostWarps * 32, early, stream);
  }
}

int launch_dsink(const BackwardParams& p, float* dsink, int64_t stride, bool early, void* stream) {
  return launch_small<dsink_kernel<kPreThreads>>(DsinkParams{p, dsink, stride}, p.sequence.num_heads_q, kPreThreads, early, stream);
}

int launch_dalibi(const BackwardParams& p, float* dalibi, int64_t stride_batch, int64_t stride_head, bool sum_batch,
                  void* stream) {
  const DalibiParams params{p.dalibi_parts, p.sequence.batch, p.sequence.num_heads_q, int64_t{p.num_key_blocks} * p.dalibi_split, dalibi,
                            stride_batch,   stride_head,      sum_batch};
  const int64_t slopes = sum_batch ? params.heads : params.batch * params.heads;
  return launch<dalibi_kernel<128>>(params, (slopes + 127) / 128, 128, 0, static_cast<cudaStream_t>(stream));
}

int launch_largest_value(const BackwardParams& p, Element element, void* stream) {
  const int64_t blocks = (p.sequence.seqlen_k + kRowPadding - 1) / kRowPadding * int64_t{p.sequence.num_heads_k} * p.sequence.batch;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (element) {
    case Element::kFloat16: return launch<largest_value_kernel<ptx::float16>>(p, blocks, kPreThreads, 0, s);
    case Element::kBfloat16: return launch<largest_value_kernel<ptx::bfloat16>>(p, blocks, kPreThreads, 0, s);
    default: return launch<largest_value_kernel<float>>(p, blocks, kPreThreads, 0, s);
  }
}

int launch_dbias(const BackwardParams& params, void* dbias, int32_t dtype, const int64_t (&shape)[4], const int64_t (&stride)[4],
                 bool only_again, void* stream) {
  DbiasParams p{params, dbias, dtype, only_again, {}, {}};
  int64_t total = 1;
  for (int n = 0; n < 4; ++n) p.shape[n] = shape[n], p.stride[n] = stride[n], total *= shape[n];
  return launch<dbias_kernel<256>>(p, std::min<int64_t>((total + 255) / 256, only_again ? 264 : 65536), 256, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace tilewise::cuda
