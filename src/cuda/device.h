// The GPUs of this machine, asked once; and the current device, set for a call and put back.
#pragma once
#include <string>

#include "core/status.h"

namespace tilewise::cuda {

struct DeviceFacts {
  int capability = 0;  // 10 * major + minor; 0 = no such device
  int multiprocessors = 0;
  int shared_bytes_per_block = 0;
  int64_t l2_bytes = 0;
  std::string name;
};

int device_count();  // 0 where there is no driver
const DeviceFacts& device_facts(int index);
bool any_device_from(int capability);

// May kernels that wait by themselves (ptx/grid.cuh) start early there? Only if their code for sm_90 is what runs: what a driver
// compiles for a newer GPU from PTX of an older one does not wait.
bool can_start_early(int index);

Status device_error(const char* what, int cuda_error);

class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  Status status() const { return status_; }

 private:
  int previous_ = -1;  // -1: nothing to put back
  Status status_;
};

}  // namespace tilewise::cuda
