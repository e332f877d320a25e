// TW_HOST_DEVICE marks the few definitions that CPU and CUDA code compile from one source: mask, softmax, dropout.
#pragma once
#if defined(__CUDACC__)
#define TW_HOST_DEVICE __host__ __device__
#else
#define TW_HOST_DEVICE
#endif
