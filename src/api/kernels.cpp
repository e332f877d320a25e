#include "api/kernels.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa.h"
#if defined(TILEWISE_HAVE_CUDA)
#include "cuda/backend.h"
#include "cuda/one_call.h"
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

const Tuning& loaded_tuning() {
  static const Tuning kTuning = [] {
    const char* path = std::getenv("TILEWISE_TUNING");
    if (path == nullptr || *path == 0) return Tuning();
    std::ifstream file(path);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::string machine = isa_text();  // "cpu ...\ncaches ...\n"
    while (!machine.empty() && machine.back() == '\n') machine.pop_back();
    for (size_t at; (at = machine.find('\n')) != std::string::npos;) machine.replace(at, 1, "; ");
    std::vector<std::string> gpus;
#if defined(TILEWISE_HAVE_CUDA)
    gpus = cuda::gpu_texts();
#endif
    return Tuning::parse(path, text, tw_version(), machine, gpus);
  }();
  return kTuning;
}

}  // namespace tilewise
