#include "harness/gpu.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/dtype.h"

#if defined(TILEWISE_HAVE_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace tilewise::harness {
namespace {

#if defined(TILEWISE_HAVE_CUDA)
void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forgotten, or the next call would report it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}
#else
[[noreturn]] void no_cuda() { throw std::runtime_error(gpu_missing()); }
#endif

// Behind struct_size and reserved there are pointers to tensors only.
static_assert(offsetof(tw_tensors, q) == 8 && (sizeof(tw_tensors) - 8) % sizeof(void*) == 0);
template <class F>
void for_each_tensor(tw_tensors* tensors, F&& f) {
  const auto fields = reinterpret_cast<const tw_tensor**>(reinterpret_cast<uint8_t*>(tensors) + offsetof(tw_tensors, q));
  for (size_t n = 0; n < (sizeof(tw_tensors) - offsetof(tw_tensors, q)) / sizeof(void*); ++n) f(fields + n);
}

}  // namespace

#if defined(TILEWISE_HAVE_CUDA)

std::string gpu_missing() {
  std::string rows;
  for (int32_t n = 0; n < tw_kernel_count(); ++n) {
    tw_kernel_info info{};
    info.struct_size = sizeof info;
    if (tw_kernel_at(n, &info) == TW_OK && info.backend == TW_BACKEND_CUDA && info.available) return "";
  }
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return std::string("no GPU to run on: ") + (error == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one too old for this build"
                                                                                    : cudaGetErrorString(error));
  }
  return "no GPU to run on: this library has no kernel for the one of this machine";
}

GpuMemory::GpuMemory(size_t bytes, int fill) : bytes_(bytes) {
  void* data = nullptr;
  must(cudaMalloc(&data, std::max<size_t>(bytes, 1)), "cudaMalloc");
  data_ = static_cast<uint8_t*>(data);
  must(cudaMemset(data_, fill, std::max<size_t>(bytes, 1)), "cudaMemset");
}
GpuMemory::~GpuMemory() { cudaFree(data_); }
void GpuMemory::upload(const void* from) const { must(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice), "copy to the GPU"); }
void GpuMemory::download(void* to) const { must(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "copy from the GPU"); }
void GpuMemory::copy(const GpuMemory& from) const {
  must(cudaMemcpyAsync(data_, from.data_, bytes_, cudaMemcpyDeviceToDevice), "copy on the GPU");
}

namespace {

int64_t pool_bytes(cudaMemPoolAttr attribute) {
  cudaMemPool_t pool = nullptr;
  must(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
  uint64_t bytes = 0;
  must(cudaMemPoolGetAttribute(pool, attribute, &bytes), "cudaMemPoolGetAttribute");
  return static_cast<int64_t>(bytes);
}

int64_t bytes_beside_the_pool() {
  size_t free = 0, total = 0;
  must(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(total - free) - pool_bytes(cudaMemPoolAttrReservedMemCurrent);
}

}  // namespace

GpuPoolMemory::GpuPoolMemory(size_t bytes) : bytes_(bytes) {
  if (bytes > 0) must(cudaMallocAsync(&data_, bytes, nullptr), "cudaMallocAsync");
}
GpuPoolMemory::~GpuPoolMemory() {
  if (data_ != nullptr) cudaFreeAsync(data_, nullptr);
}
void GpuPoolMemory::fill(int byte) const {
  if (bytes_ > 0) must(cudaMemset(data_, byte, bytes_), "cudaMemset");
}

GpuPeakMemory::GpuPeakMemory() {
  must(cudaDeviceSynchronize(), "kernel");
  cudaMemPool_t pool = nullptr;
  must(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
  uint64_t zero = 0;  // back to what is in use
  must(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &zero), "cudaMemPoolSetAttribute");
  pool_ = pool_bytes(cudaMemPoolAttrUsedMemCurrent), beside_ = bytes_beside_the_pool();
}
int64_t GpuPeakMemory::growth() const {
  must(cudaDeviceSynchronize(), "kernel");
  return pool_bytes(cudaMemPoolAttrUsedMemHigh) - pool_ + std::max<int64_t>(0, bytes_beside_the_pool() - beside_);
}

tw_status run_on_gpu(const tw_plan* plan, const tw_tensors& there, const GpuWorkspace& workspace, int times, double* seconds) {
  struct Events {
    cudaEvent_t begin = nullptr, end = nullptr;
    Events() { must(cudaEventCreate(&begin), "event"), must(cudaEventCreate(&end), "event"); }
    ~Events() { cudaEventDestroy(begin), cudaEventDestroy(end); }
  } events;
  must(cudaEventRecord(events.begin, nullptr), "event");
  for (int n = 0; n < times; ++n)
    if (const tw_status status = tw_run(plan, &there, workspace.data(), workspace.size(), nullptr); status != TW_OK) return status;
  must(cudaEventRecord(events.end, nullptr), "event");
  must(cudaEventSynchronize(events.end), "kernel");
  float ms = 0;
  must(cudaEventElapsedTime(&ms, events.begin, events.end), "event");
  *seconds = 1e-3 * static_cast<double>(ms) / times;
  return TW_OK;
}

#else

std::string gpu_missing() { return "no GPU to run on: this build has no CUDA kernels; -DTILEWISE_CUDA=ON builds them"; }
GpuMemory::GpuMemory(size_t bytes, int) : bytes_(bytes) { no_cuda(); }
GpuMemory::~GpuMemory() = default;
void GpuMemory::upload(const void*) const { no_cuda(); }
void GpuMemory::download(void*) const { no_cuda(); }
void GpuMemory::copy(const GpuMemory&) const { no_cuda(); }
GpuPoolMemory::GpuPoolMemory(size_t bytes) : bytes_(bytes) { no_cuda(); }
GpuPoolMemory::~GpuPoolMemory() = default;
void GpuPoolMemory::fill(int) const { no_cuda(); }
GpuPeakMemory::GpuPeakMemory() { no_cuda(); }
int64_t GpuPeakMemory::growth() const { no_cuda(); }
tw_status run_on_gpu(const tw_plan*, const tw_tensors&, const GpuWorkspace&, int, double*) { no_cuda(); }

#endif

bool GpuWorkspace::guard_intact() const {
  std::vector<uint8_t> bytes(memory_.size());
  memory_.download(bytes.data());
  return std::all_of(bytes.begin() + static_cast<int64_t>(bytes_), bytes.end(), [](uint8_t byte) { return byte == 0xff; });
}

GpuTensors::GpuTensors(const tw_tensors& host) {
  tw_tensors all = host;
  for_each_tensor(&all, [&](const tw_tensor** tensor) { add(*tensor); });
}

void GpuTensors::add(const tw_tensor* host) {
  if (host == nullptr) return;
  int64_t first = 0, last = 0;
  bool empty = false;
  for (int32_t dim = 0; dim < host->ndim; ++dim) {
    empty = empty || host->shape[dim] <= 0;
    (host->stride[dim] < 0 ? first : last) += (host->shape[dim] - 1) * host->stride[dim];
  }
  const int64_t size = dtype_size(host->dtype);
  add(host, static_cast<uint8_t*>(host->data) + (empty ? 0 : first * size), empty ? 0 : static_cast<size_t>((last - first + 1) * size));
}

void GpuTensors::add(const tw_tensor* host, void* begin, size_t bytes) {
  if (host == nullptr) return;
  Copy& copy = copies_.emplace_back(Copy{host, begin, GpuMemory(bytes), *host});
  copy.there.data = copy.memory.data() + (static_cast<uint8_t*>(host->data) - static_cast<uint8_t*>(begin));
  copy.there.device = TW_CUDA;
  copy.memory.upload(begin);
}

tw_tensors GpuTensors::on_gpu(const tw_tensors& host) const {
  tw_tensors there = host;
  for_each_tensor(&there, [&](const tw_tensor** tensor) {
    for (const Copy& copy : copies_)
      if (*tensor == copy.host) {
        *tensor = &copy.there;
        break;
      }
  });
  return there;
}

void GpuTensors::upload() const {
  for (const Copy& copy : copies_) copy.memory.upload(copy.begin);
}
void GpuTensors::download() const {
  for (const Copy& copy : copies_) copy.memory.download(copy.begin);
}
void GpuTensors::download(const tw_tensor* host) const {
  for (const Copy& copy : copies_)
    if (copy.host == host) return copy.memory.download(copy.begin);
  throw std::runtime_error("a tensor that was never copied to the GPU");
}

void GpuTensors::keep(int place) {
  std::deque<GpuMemory>& kept = kept_[place];
  for (size_t n = 0; n < copies_.size(); ++n) {
    if (n == kept.size()) kept.emplace_back(copies_[n].memory.size());
    kept[n].copy(copies_[n].memory);
  }
}
void GpuTensors::restore(int place) const {
  for (size_t n = 0; n < kept_[place].size(); ++n) copies_[n].memory.copy(kept_[place][n]);
}

}  // namespace tilewise::harness
