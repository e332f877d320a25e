// The models and GPUs of models.def and gpus.def as values.
#include "core/memory.h"

namespace tilewise {
namespace {

constexpr tw_model kModels[] = {
#define TW_MODEL(name, hidden, layers, hq, hk, d, dv, window, full, softcap, sink) \
  {sizeof(tw_model), sink, name, hidden, layers, hq, hk, d, dv, window, full, softcap},
#include "core/models.def"
#undef TW_MODEL
};

constexpr tw_gpu kGpus[] = {
#define TW_GPU(name, capability, multiprocessors, gigabytes, bandwidth, tensor, vector, l2)                           \
  {sizeof(tw_gpu),        capability,       name, multiprocessors, int64_t{gigabytes} * 1000000000, int64_t{l2} << 20, \
   (bandwidth) * 1e9, (tensor) * 1e12, (vector) * 1e12},
#include "core/gpus.def"
#undef TW_GPU
};

}  // namespace

std::span<const tw_model> models() { return kModels; }
std::span<const tw_gpu> gpus() { return kGpus; }

}  // namespace tilewise
