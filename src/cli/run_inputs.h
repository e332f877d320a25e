// The tensors of `tilewise run`, out of .npy files or one .safetensors file.
#pragma once
#include <map>
#include <string>

#include "cli/cli.h"
#include "io/array.h"

namespace tilewise::cli {

// A tensor that a flag can name; in a .safetensors file it goes by `name`.
struct InputSpec {
  enum Kind {
    kVectors,  // q, k, v, do: rounded to --dtype
    kBias,     // any float, or a mask
    kReals,    // float32
    kIndices,  // int32
  };
  const char* name;   // "cu_seqlens_q", its flag --cu-seqlens-q
  const char* alias;  // a second name in .safetensors files, or ""
  Kind kind;
  const char* description;
};
std::span<const InputSpec> input_specs();
std::string flag_of(const InputSpec& spec);

using Arrays = std::map<std::string, io::Array>;  // by spec's name; those that are there

// `files`: path by name, "" = not given. `tensors`: path of a .safetensors file, or "". `dtype`: as of --dtype, or "".
Arrays load_inputs(const std::map<std::string, std::string>& files, const std::string& tensors,
                   const std::string& dtype);

}  // namespace tilewise::cli
