#include "api/kernels.h"

#include <vector>

#include "cpu/backend.h"
#if defined(TILEWISE_HAVE_CUDA)
#include "cuda/backend.h"
#endif

namespace tilewise {

std::span<const KernelRow> all_kernels() {
  static const std::vector<KernelRow> kRows = [] {
    std::vector<KernelRow> rows;
#if defined(TILEWISE_HAVE_CUDA)
    for (const KernelRow& row : cuda_kernels()) rows.push_back(row);
#endif
    for (const KernelRow& row : cpu_kernels()) rows.push_back(row);
    return rows;
  }();
  return kRows;
}

}  // namespace tilewise
