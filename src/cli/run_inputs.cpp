#include "cli/run_inputs.h"

#include <algorithm>

#include "io/npy.h"
#include "io/safetensors.h"

namespace tilewise::cli {
namespace {

constexpr InputSpec kSpecs[] = {
    {"q", "", InputSpec::kVectors, "Queries [b, sq, hq, d], or packed [total_q, hq, d]"},
    {"k", "", InputSpec::kVectors, "Keys [b, sk, hk, d], packed [total_k, hk, d] or paged [pages, page_size, hk, d]"},
    {"v", "", InputSpec::kVectors, "Values, like k with head dimension dv"},
    {"do", "dout", InputSpec::kVectors, "Gradient of o [b, sq, hq, dv]; asks for the backward pass too"},
    {"bias", "", InputSpec::kBias,
     "[b|1, hq|1, sq|1, sk|1]: floats are added to the scores; bool or uint8: 1 = visible"},
    {"alibi", "alibi_slopes", InputSpec::kReals, "ALiBi slopes [hq] or [b, hq]"},
    {"sink", "", InputSpec::kReals, "One logit per head [hq] that only enters the denominator"},
    {"cu_seqlens_q", "", InputSpec::kIndices, "First rows of packed sequences [b + 1]; makes q packed"},
    {"cu_seqlens_k", "", InputSpec::kIndices, "The same for k and v"},
    {"seqused_q", "", InputSpec::kIndices, "Rows in use [b]"},
    {"seqused_k", "", InputSpec::kIndices, "Keys in use [b]"},
    {"page_table", "", InputSpec::kIndices, "Page numbers [b, max_pages]; makes k and v paged"},
};

// Brings an array into the dtype that its place asks for.
io::Array fit(const InputSpec& spec, const std::string& source, io::Array array, const std::string& dtype) {
  int32_t wanted = array.dtype;
  if (spec.kind == InputSpec::kVectors && !is_float(array.dtype))
    throw UsageError(source + ": dtype " + dtype_text(array.dtype) + ": must be f32, f16, bf16 or f64");
  if (spec.kind == InputSpec::kBias && !is_float(array.dtype) && array.dtype != TW_BOOL)
    throw UsageError(source + ": dtype " + dtype_text(array.dtype) +
                     ": must be f32, f16, bf16, f64, or bool or uint8 as a mask");
  if (spec.kind == InputSpec::kVectors && !dtype.empty()) wanted = dtype_named(dtype);
  if (spec.kind == InputSpec::kReals) wanted = TW_FLOAT32;
  if (spec.kind == InputSpec::kIndices) wanted = TW_INT32;
  io::Array fitted;
  if (const Status status = io::convert(array, wanted, &fitted); !status.ok())
    throw UsageError(source + ": " + status.message());
  return fitted;
}

io::Array require(const std::string& flag, const Status& status, io::Array array) {
  if (!status.ok()) throw UsageError(flag + ": " + status.message());
  return array;
}

}  // namespace

std::span<const InputSpec> input_specs() { return kSpecs; }

std::string flag_of(const InputSpec& spec) {
  std::string flag = std::string("--") + spec.name;
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

Arrays load_inputs(const std::map<std::string, std::string>& files, const std::string& tensors,
                   const std::string& dtype) {
  io::Safetensors container;
  if (!tensors.empty())
    if (const Status status = io::Safetensors::read(tensors, &container); !status.ok())
      throw UsageError("--tensors: " + status.message());
  Arrays arrays;
  for (const InputSpec& spec : kSpecs) {
    const std::string flag = flag_of(spec);
    io::Array array;
    if (const auto file = files.find(spec.name);
        file != files.end() && !file->second.empty()) {  // before the container's
      const Status status = io::read_npy(file->second, &array);
      array = require(flag, status, std::move(array));
      arrays[spec.name] = fit(spec, flag + ": " + file->second, std::move(array), dtype);
      continue;
    }
    for (const std::string name : {spec.name, spec.alias}) {
      if (name.empty() || !container.entries().contains(name)) continue;
      const Status status = container.get(name, &array);
      array = require("--tensors", status, std::move(array));
      arrays[spec.name] = fit(spec, "--tensors: " + tensors + ": tensor \"" + name + "\"", std::move(array), dtype);
      break;
    }
  }
  for (const char* name : {"q", "k", "v"})
    if (!arrays.contains(name))
      throw UsageError(
          tensors.empty()
              ? std::string("--") + name + ": is required (a .npy file), or --tensors with a .safetensors file"
              : "--tensors: " + tensors + ": has no tensor \"" + name + "\", and --" + name + " is not given");
  return arrays;
}

}  // namespace tilewise::cli
