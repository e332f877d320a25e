// Host side of every kernel: plain functions that plain C++ can call. A launcher is a template instantiated in the
// generated .cu of its kernels.def line. The int is a cudaError_t.
#pragma once
#include <cstdint>

#include "cuda/config_sm80.h"
#include "cuda/config_sm90.h"
#include "cuda/params.h"

namespace tilewise::cuda {

// Lets a kernel have more than 48 KiB of shared memory a block on the current device. `permitted`: the kernel's own, one bit a device; it is
// read and written as an atomic, in device.cpp, since <atomic> takes each generated unit a second of the compiler's time.
int permit_shared_bytes(const void* kernel, int bytes, uint64_t* permitted);

// Bytes of shared memory that a block may have on the current device; 0 without one.
int shared_bytes_of_device();

struct ForwardSm90Params;  // params_sm90.h; has the driver's types

// Kernels are templates on these four and not on the ForwardConfig itself: nvcc 13.0 writes host stubs that do not
// compile for class-type template arguments of a __global__.
template <Element kElement, ForwardKind kKind, int kHeadDim, bool kSmall>
int launch_forward(const ForwardParams& params, int64_t num_blocks, void* stream);
template <Element kElement, ForwardKind kKind, int kHeadDim>
int launch_forward_roomy(const ForwardParams& params, int64_t num_blocks, void* stream);

template <Element kElement, BackwardKind kKind, int kHeadDim, bool kSmall>
int launch_backward(const BackwardParams& params, int64_t num_blocks, void* stream);
template <Element kElement, BackwardKind kKind, int kHeadDim>
int launch_backward_roomy(const BackwardParams& params, int64_t num_blocks, void* stream);

// `early`: the kernel may start before those ahead of it in the stream have ended, and waits by itself.
template <Element kElement, int kHeadDim>
int launch_decode(const ForwardParams& params, int64_t num_blocks, bool early, void* stream);
// Behind params.again, with every option: any number of blocks share the tasks. On sm_90 and newer.
template <Element kElement, int kHeadDim>
int launch_backward_again(const BackwardParams& params, int64_t num_blocks, void* stream);

// All shapes of a head dimension; `num_blocks` stay on their multiprocessors and take tiles.
template <Element kElement, int kHeadDim>
int launch_forward_sm90(const ForwardSm90Config& config, const ForwardSm90Params& params, int num_blocks, void* stream);
// With a bias. In a unit of its own, where it does not change what the compiler makes of the others.
template <Element kElement, int kHeadDim>
int launch_forward_sm90_bias(const ForwardSm90Config& config, const ForwardSm90Params& params, int num_blocks, void* stream);

#define TW_FORWARD_SM80(element, head_dim) \
  extern template int launch_forward<Element::element, ForwardKind::kPlain, head_dim, false>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kPlain, head_dim, true>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kDropout, head_dim, false>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kDropout, head_dim, true>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kGeneral, head_dim, false>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kGeneral, head_dim, true>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kFewRows, head_dim, false>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward<Element::element, ForwardKind::kFewRows, head_dim, true>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward_roomy<Element::element, ForwardKind::kPlain, head_dim>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward_roomy<Element::element, ForwardKind::kDropout, head_dim>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward_roomy<Element::element, ForwardKind::kGeneral, head_dim>(const ForwardParams&, int64_t, void*); \
  extern template int launch_forward_roomy<Element::element, ForwardKind::kFewRows, head_dim>(const ForwardParams&, int64_t, void*);
#define TW_FORWARD_SM90(element, head_dim) \
  extern template int launch_forward_sm90<Element::element, head_dim>(const ForwardSm90Config&, const ForwardSm90Params&, int, void*); \
  extern template int launch_forward_sm90_bias<Element::element, head_dim>(const ForwardSm90Config&, const ForwardSm90Params&, int, void*);
#define TW_BACKWARD_SM80(element, head_dim) \
  extern template int launch_backward<Element::element, BackwardKind::kPlain, head_dim, false>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kPlain, head_dim, true>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kDropout, head_dim, false>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kDropout, head_dim, true>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kGeneral, head_dim, false>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kGeneral, head_dim, true>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kOrdered, head_dim, false>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward<Element::element, BackwardKind::kOrdered, head_dim, true>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward_roomy<Element::element, BackwardKind::kPlain, head_dim>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward_roomy<Element::element, BackwardKind::kDropout, head_dim>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward_roomy<Element::element, BackwardKind::kGeneral, head_dim>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward_roomy<Element::element, BackwardKind::kOrdered, head_dim>(const BackwardParams&, int64_t, void*); \
  extern template int launch_backward_again<Element::element, head_dim>(const BackwardParams&, int64_t, void*);
#define TW_DECODE_SM80(element, head_dim) \
  extern template int launch_decode<Element::element, head_dim>(const ForwardParams&, int64_t, bool, void*);
#include "cuda/kernels.def"

// utility.cu
int launch_fill(float* data, int64_t n0, int64_t n1, int64_t stride0, int64_t stride1, float value, void* stream);
int launch_append(const AppendParams& params, Element element, void* stream);
int launch_combine(const ForwardParams& params, Element element, bool early, void* stream);
int launch_dropout_mask(const SequenceParams& sequence, const ScoreParams& score, uint8_t* mask,
                        const int64_t (&shape)[4], const int64_t (&stride)[4], void* stream);

// backward_utility.cu. `early`: as a dependent launch, where the kernel has code for sm_90.
int launch_backward_pre(const BackwardParams& params, Element element, bool early, void* stream);
int launch_backward_post(const BackwardParams& params, Element element, bool early, void* stream);
int launch_dsink(const BackwardParams& params, float* dsink, int64_t stride, bool early, void* stream);
int launch_dalibi(const BackwardParams& params, float* dalibi, int64_t stride_batch, int64_t stride_head, bool sum_batch,
                  void* stream);
int launch_largest_value(const BackwardParams& params, Element element, void* stream);  // into dbias.largest
int launch_dbias(const BackwardParams& params, void* dbias, int32_t dtype, const int64_t (&shape)[4], const int64_t (&stride)[4],
                 bool only_again, void* stream);

}  // namespace tilewise::cuda
