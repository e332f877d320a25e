#include "cpu/isa.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tilewise {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

// __builtin_cpu_supports looks at CPUID and, through XGETBV, at what the operating system saves.
bool machine_has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kScalar: return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return machine_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16: return machine_has(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

Isa cap() {
  if (const char* text = std::getenv("TILEWISE_CPU_ISA"))
    for (Isa isa : kAll)
      if (std::string_view(text) == isa_name(isa)) return isa;
  return Isa::kAvx512Bf16;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512bf16";
  }
  return "unknown";
}

bool has_isa(Isa isa) {
  static const Isa kCap = cap();
  return isa <= kCap && machine_has(isa);
}

std::string isa_text() {
  std::string text = "cpu";
  for (Isa isa : kAll)
    if (machine_has(isa)) text += std::string(" ") + isa_name(isa) + (has_isa(isa) ? "" : "(capped)");
  text += "\ncaches";
  constexpr struct {
    const char* name;
    int key;
  } kCaches[] = {{"L1d", _SC_LEVEL1_DCACHE_SIZE}, {"L2", _SC_LEVEL2_CACHE_SIZE}, {"L3", _SC_LEVEL3_CACHE_SIZE}};
  for (const auto& cache : kCaches)
    text += std::string(" ") + cache.name + " " + std::to_string(sysconf(cache.key) / 1024) + " KiB";
  return text + "\n";
}

}  // namespace tilewise
