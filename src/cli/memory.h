// Resident memory of this process, as Linux counts it.
#pragma once
#include <cstdint>

namespace tilewise::cli {

// Growth of the peak of resident memory since construction, in bytes.
class PeakMemory {
 public:
  PeakMemory();
  int64_t growth() const;  // -1 if the system does not say

 private:
  int64_t before_;
};

}  // namespace tilewise::cli
