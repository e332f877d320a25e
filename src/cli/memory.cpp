#include "cli/memory.h"

#include <cstdio>
#include <cstring>

namespace tilewise::cli {
namespace {

int64_t status_bytes(const char* key) {  // of /proc/self/status, which counts in kB; -1 if it is not there
  std::FILE* file = std::fopen("/proc/self/status", "r");
  if (file == nullptr) return -1;
  char line[256];
  int64_t kilobytes = -1;
  while (kilobytes < 0 && std::fgets(line, sizeof line, file) != nullptr)
    if (std::strncmp(line, key, std::strlen(key)) == 0) {
      long long value = 0;
      if (std::sscanf(line + std::strlen(key), ": %lld", &value) == 1) kilobytes = value;
    }
  std::fclose(file);
  return kilobytes < 0 ? -1 : kilobytes * 1024;
}

bool reset_peak() {
  std::FILE* file = std::fopen("/proc/self/clear_refs", "w");
  if (file == nullptr) return false;
  const bool written = std::fputs("5", file) >= 0;
  return std::fclose(file) == 0 && written;
}

}  // namespace

PeakMemory::PeakMemory() : before_(reset_peak() ? status_bytes("VmRSS") : -1) {}

int64_t PeakMemory::growth() const {
  const int64_t peak = status_bytes("VmHWM");
  return before_ < 0 || peak < 0 ? -1 : peak > before_ ? peak - before_ : 0;
}

}  // namespace tilewise::cli
