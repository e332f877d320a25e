// Which instruction set this machine has, capped by TILEWISE_CPU_ISA (for tests: they prove which row ran).
#pragma once
#include <string>

namespace tilewise {

enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16 };

const char* isa_name(Isa isa);  // "scalar", "avx2", "avx512", "avx512bf16"
bool has_isa(Isa isa);          // machine and operating system have it, and the cap allows it
std::string isa_text();         // for tw_machine_text

}  // namespace tilewise
