// Definition of the sm_90a backward launcher, for backward_sm90_*.cu.
#pragma once
#define TW_BACKWARD_SM90_DEFINES_ROWS
#include <algorithm>

#include "cuda/backward_sm90.cuh"
#include "cuda/backward_sm90_key.cuh"
#include "cuda/backward_sm90_query.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_backward_sm90.h"

namespace tilewise::cuda {

template <Element kElement, int kHeadDim, DqSums kSums, BackwardKind kKind>
int start_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, kKind, kSums);
  return launch<backward_sm90_kernel<kElement, kHeadDim, kSums, kKind>>(params, num_blocks, C.num_threads(), C.shared_bytes(),
                                                                        static_cast<cudaStream_t>(stream), Start::kEarly);
}

template <Element kElement, int kHeadDim>
int launch_backward_sm90_sums(const BackwardSm90Params& params, int num_blocks, void* stream) {
  if (params.backward.deterministic)
    return start_backward_sm90<kElement, kHeadDim, DqSums::kOrdered, BackwardKind::kPlain>(params, num_blocks, stream);
  if (params.backward.first_stores)
    return start_backward_sm90<kElement, kHeadDim, DqSums::kFirst, BackwardKind::kPlain>(params, num_blocks, stream);
  return start_backward_sm90<kElement, kHeadDim, DqSums::kAny, BackwardKind::kPlain>(params, num_blocks, stream);
}

// dq, and dk and dv; the pass with the longer tasks first. Where `passes_overlap`, the blocks of the second start where those of the first end.
template <Element kElement, int kHeadDim>
int launch_backward_sm90_passes(BackwardSm90Params params, int num_blocks, void* stream) {
  const bool queries = params.backward.dq.data != nullptr, keys = params.backward.dk.data != nullptr || params.backward.dv.data != nullptr;
  const auto start = [&]<auto kernel>(int tasks, int threads, int bytes, bool second) {
    params.second_pass = second && params.passes_overlap;
    return launch<kernel>(params, std::min(num_blocks, tasks), threads, bytes, static_cast<cudaStream_t>(stream),
                          second && !params.passes_overlap ? Start::kInOrder : Start::kEarly);
  };
  const auto start_queries = [&](bool second) {
    constexpr BackwardQuerySm90Config C{kElement, kHeadDim};
    return start.template operator()<backward_sm90_query_kernel<kElement, kHeadDim>>(params.num_query_tasks, C.num_threads(), C.shared_bytes(), second);
  };
  const auto start_keys = [&](bool second) {
    constexpr BackwardSm90Config C = backward_sm90_config(kElement, kHeadDim, BackwardKind::kPlain, DqSums::kAny);
    return start.template operator()<backward_sm90_key_kernel<kElement, kHeadDim>>(params.num_tasks, C.num_threads(), C.shared_bytes(), second);
  };
  int error = cudaSuccess;
  if (keys && params.keys_first) error = start_keys(false);
  if (error == cudaSuccess && queries) error = start_queries(keys && params.keys_first);
  if (error == cudaSuccess && keys && !params.keys_first) error = start_keys(queries);
  return error;
}

template <Element kElement, int kHeadDim>
int launch_backward_sm90(const BackwardSm90Params& params, int num_blocks, void* stream) {
  if constexpr (backward_sm90_config(kElement, kHeadDim, BackwardKind::kPlain, DqSums::kAny).two_passes())
    return launch_backward_sm90_passes<kElement, kHeadDim>(params, num_blocks, stream);
  else
    return launch_backward_sm90_sums<kElement, kHeadDim>(params, num_blocks, stream);
}

template <Element kElement, int kHeadDim>
int launch_backward_sm90_options(const BackwardSm90Params& params, int num_blocks, void* stream) {
  const auto start = [&]<BackwardKind kKind>() {
    if (params.backward.deterministic) return start_backward_sm90<kElement, kHeadDim, DqSums::kOrdered, kKind>(params, num_blocks, stream);
    return start_backward_sm90<kElement, kHeadDim, DqSums::kAny, kKind>(params, num_blocks, stream);
  };
  if (params.kind == BackwardKind::kDropout) return start.template operator()<BackwardKind::kDropout>();
  if (params.kind == BackwardKind::kBias) return start.template operator()<BackwardKind::kBias>();
  return start.template operator()<BackwardKind::kGeneral>();
}

}  // namespace tilewise::cuda
