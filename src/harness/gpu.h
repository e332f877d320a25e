// Host tensors copied to a GPU and back, and a plan run on them: how the tests and the command line tool reach the CUDA rows.
// Built without CUDA, every function but gpu_missing throws. Errors of the CUDA runtime throw std::runtime_error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "tilewise/tilewise.h"

namespace tilewise::harness {

// Why no kernel can run on a GPU here, in words; "" if one can.
std::string gpu_missing();

// Bytes on the GPU, each set to `fill`.
class GpuMemory {
 public:
  explicit GpuMemory(size_t bytes, int fill = 0xff);
  ~GpuMemory();
  GpuMemory(GpuMemory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  void upload(const void* from) const;
  void download(void* to) const;  // waits for what runs
  void copy(const GpuMemory& from) const;  // of the same size; does not wait

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_;
};

// Bytes from the device's memory pool, where tw_forward and tw_backward take a call's workspace from: the pool counts both.
class GpuPoolMemory {
 public:
  explicit GpuPoolMemory(size_t bytes);
  ~GpuPoolMemory();
  GpuPoolMemory(const GpuPoolMemory&) = delete;
  GpuPoolMemory& operator=(const GpuPoolMemory&) = delete;
  void* data() const { return data_; }
  void fill(int byte) const;

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// How far memory in use rose above what it was at construction: the pool's high-water mark, and what else was taken from the
// device and kept.
class GpuPeakMemory {
 public:
  GpuPeakMemory();
  int64_t growth() const;  // waits for what runs

 private:
  int64_t pool_ = 0, beside_ = 0;
};

// A plan's workspace on the GPU, poisoned, with guard bytes behind it.
class GpuWorkspace {
 public:
  explicit GpuWorkspace(size_t bytes) : memory_(bytes + kGuard), bytes_(bytes) {}
  void* data() const { return memory_.data(); }
  size_t size() const { return bytes_; }
  bool guard_intact() const;

 private:
  static constexpr size_t kGuard = 256;
  GpuMemory memory_;
  size_t bytes_;
};

// Copies of tensors. They keep their strides and, if so asked, the memory around them.
class GpuTensors {
 public:
  GpuTensors() = default;
  explicit GpuTensors(const tw_tensors& host);                 // all of a call's
  void add(const tw_tensor* host);                            // what its elements span; nullptr: nothing
  void add(const tw_tensor* host, void* begin, size_t bytes);  // the allocation that it lies in
  tw_tensors on_gpu(const tw_tensors& host) const;            // those that were added, there; valid while this object is
  void upload() const;                                        // add() does it once
  void download() const;
  void download(const tw_tensor* host) const;                 // one of them
  // As they are there now, and as they were then, in one of two places; on the default stream, without waiting (but keep() the first time).
  void keep(int place = 0);
  void restore(int place = 0) const;

 private:
  struct Copy {
    const tw_tensor* host;
    void* begin;
    GpuMemory memory;
    tw_tensor there;
  };
  std::deque<Copy> copies_;  // their addresses stay
  std::deque<GpuMemory> kept_[2];
};

// Runs the plan `times` times, waits, and tells the seconds of one run, as the GPU counts them.
tw_status run_on_gpu(const tw_plan* plan, const tw_tensors& there, const GpuWorkspace& workspace, int times, double* seconds);

}  // namespace tilewise::harness
