#include "io/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

namespace tilewise::io {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeader = uint64_t{16} << 20;  // some 100,000 tensors
constexpr int kMaxDepth = 4;                         // {"name": {"shape": [..]}} goes down 3

struct TypeName {
  std::string_view name;
  int64_t size;
  int32_t dtype;  // tw_dtype, -1 = known, not ours
};
constexpr TypeName kTypes[] = {
    {"F32", 4, TW_FLOAT32}, {"F16", 2, TW_FLOAT16}, {"BF16", 2, TW_BFLOAT16}, {"F64", 8, TW_FLOAT64},
    {"I32", 4, TW_INT32},   {"I64", 8, TW_INT64},   {"BOOL", 1, TW_BOOL},     {"U8", 1, TW_BOOL},
    {"I8", 1, -1},          {"I16", 2, -1},         {"U16", 2, -1},           {"U32", 4, -1},
    {"U64", 8, -1},         {"F8_E4M3", 1, -1},     {"F8_E5M2", 1, -1},       {"C64", 8, -1}};

const TypeName* find_type(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& type) { return type.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

// The header as JSON. JSON leaves the meaning of repeated keys open, so they are refused; so is needless depth.
Status parse_json(std::string_view text, Json* out) {
  std::set<std::string> keys[kMaxDepth + 1];
  std::string fault;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth && fault.empty()) fault = "is nested too deep";
    if (!fault.empty()) return false;
    if (event == Json::parse_event_t::object_start) keys[depth].clear();
    if (event == Json::parse_event_t::key && !keys[depth - 1].insert(parsed.get<std::string>()).second)
      fault = "has the key \"" + parsed.get<std::string>() + "\" twice";
    return true;
  };
  *out = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (!fault.empty()) return invalid("header ", fault);
  if (out->is_discarded()) return invalid("header is no valid JSON");
  if (!out->is_object()) return invalid("header must be a JSON object");
  return Status();
}

bool read_sizes(const Json& json, std::vector<int64_t>* out) {
  if (!json.is_array()) return false;
  for (const Json& size : json) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{INT64_MAX}) return false;
    out->push_back(static_cast<int64_t>(size.get<uint64_t>()));
  }
  return true;
}

}  // namespace

Status Safetensors::read_header() {
  const std::span<const std::byte> file = file_->bytes();
  if (file.size() < 8) return invalid("is no .safetensors file (shorter than 8 bytes)");
  uint64_t length = 0;
  for (size_t n = 8; n-- > 0;) length = length << 8 | static_cast<uint64_t>(file[n]);
  if (length > kMaxHeader) return invalid("header of ", length, " bytes: must be at most ", kMaxHeader);
  if (length > file.size() - 8) return invalid("ends inside its header");
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (length == 0 || text[0] != '{') return invalid("header must begin with '{'");
  Json json;
  TW_RETURN_IF_ERROR(parse_json({text, length}, &json));

  const uint64_t data_begin = 8 + length, data_bytes = file.size() - data_begin;
  struct Extent {
    uint64_t begin, end;
    std::string name;
    bool operator<(const Extent& other) const { return std::tie(begin, end) < std::tie(other.begin, other.end); }
  };
  std::vector<Extent> extents;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      const bool texts =
          value.is_object() && std::all_of(value.begin(), value.end(), [](const Json& v) { return v.is_string(); });
      if (!texts) return invalid("__metadata__ must map strings to strings");
      continue;
    }
    SafetensorsEntry entry;
    std::vector<int64_t> offsets;
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      return invalid("tensor \"", name, "\" must have dtype, shape and data_offsets, and nothing else");
    const TypeName* type =
        value["dtype"].is_string() ? find_type(value["dtype"].get_ref<const std::string&>()) : nullptr;
    if (type == nullptr)
      return invalid("tensor \"", name, "\": dtype ",
                     value["dtype"].dump(-1, ' ', true, Json::error_handler_t::replace), " is none of safetensors");
    entry.dtype = type->name;
    if (!read_sizes(value["shape"], &entry.shape))
      return invalid("tensor \"", name, "\": shape must be a list of sizes");
    if (!read_sizes(value["data_offsets"], &offsets) || offsets.size() != 2 || offsets[0] > offsets[1] ||
        static_cast<uint64_t>(offsets[1]) > data_bytes)
      return invalid("tensor \"", name, "\": data_offsets must be [begin, end] with begin <= end <= ", data_bytes);
    int64_t bytes = 0;
    if (!checked_bytes(entry.shape, type->size, &bytes) || bytes != offsets[1] - offsets[0])
      return invalid("tensor \"", name, "\": ", type->name, " ", shape_text(entry.shape), " does not take the ",
                     offsets[1] - offsets[0], " bytes of its data_offsets");
    entry.begin = data_begin + static_cast<uint64_t>(offsets[0]);
    extents.push_back({static_cast<uint64_t>(offsets[0]), static_cast<uint64_t>(offsets[1]), name});
    entries_[name] = std::move(entry);
  }

  std::sort(extents.begin(), extents.end());
  uint64_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != end)
      return invalid("tensor \"", extent.name, "\" begins at byte ", extent.begin,
                     extent.begin < end ? ", inside" : ", after a gap behind", " the one before it, which ends at ",
                     end);
    end = extent.end;
  }
  if (end != data_bytes) return invalid("holds ", data_bytes, " bytes of data: its tensors take ", end);
  return Status();
}

Status Safetensors::parse(const std::string& name, const std::shared_ptr<Buffer>& file, Safetensors* out) {
  Safetensors result;
  result.name_ = name;
  result.file_ = file;
  if (const Status status = result.read_header(); !status.ok())
    return Status(status.code(), name + ": " + status.message());
  *out = std::move(result);
  return Status();
}

Status Safetensors::read(const std::string& path, Safetensors* out) {
  std::shared_ptr<Buffer> file;
  TW_RETURN_IF_ERROR(read_file(path, &file));
  return parse(path, file, out);
}

Status Safetensors::get(const std::string& tensor, Array* out) const {
  const auto found = entries_.find(tensor);
  if (found == entries_.end()) return invalid(name_, ": has no tensor \"", tensor, "\"");
  const SafetensorsEntry& entry = found->second;
  const std::string name = concat(name_, ": tensor \"", tensor, "\"");
  const int32_t dtype = find_type(entry.dtype)->dtype;
  if (dtype < 0) return invalid(name, ": dtype ", entry.dtype, ": must be F16, BF16, F32, F64, I32, I64, BOOL or U8");
  if (entry.shape.empty() || entry.shape.size() > TW_MAX_DIMS)
    return invalid(name, ": shape ", shape_text(entry.shape), ": must have 1 to ", TW_MAX_DIMS, " dimensions");
  return view_array(name, file_, entry.begin, dtype, entry.shape, out);
}

}  // namespace tilewise::io
