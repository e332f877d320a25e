// The safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "io/array.h"

namespace tilewise::io {

struct SafetensorsEntry {
  std::string dtype;  // as the file spells it: "BF16"
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // in the file
};

// A whole file, its header checked: every dtype known, every size equal to its shape's, and the tensors one after the
// other to the file's end, without gap, overlap or rest.
class Safetensors {
 public:
  static Status read(const std::string& path, Safetensors* out);
  static Status parse(const std::string& name, const std::shared_ptr<Buffer>& file, Safetensors* out);

  const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  // F16, BF16, F32, F64, I32, I64, BOOL and U8 (zeros and ones, as a mask), of 1 to 4 dimensions. No copy.
  Status get(const std::string& tensor, Array* out) const;

 private:
  Status read_header();

  std::string name_;
  std::shared_ptr<Buffer> file_;
  std::map<std::string, SafetensorsEntry> entries_;
};

}  // namespace tilewise::io
