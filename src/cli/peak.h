// The roof of a machine, measured: multiply-adds in registers and nothing else.
#pragma once
#include <string>
#include <string_view>

namespace tilewise::cli {

// The instruction set whose peak a kernel is measured against: its own ("scalar", "avx2", "avx512", "avx512bf16"), or
// for a kernel of another name the machine's best in float32.
std::string peak_isa(std::string_view kernel_isa);

// GFLOP/s of `threads` threads at once over about `seconds`. float32 multiply-adds; avx512bf16: vdpbf16ps.
double measure_peak(std::string_view isa, int threads, double seconds);

}  // namespace tilewise::cli
