// An array out of a file: dtype, shape and contiguous C-order elements in host memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"

namespace tilewise::io {

// Bytes at a 64-byte boundary; arrays share them, so that a file is held once.
class Buffer {
 public:
  explicit Buffer(size_t size);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Delete {
    void operator()(std::byte* data) const;
  };
  size_t size_;
  std::unique_ptr<std::byte[], Delete> data_;
};

struct Array {
  int32_t dtype = TW_FLOAT32;
  std::vector<int64_t> shape;
  std::shared_ptr<Buffer> owner;
  std::byte* data = nullptr;  // in *owner, aligned to the element

  int64_t count() const {
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    return count;
  }
  size_t bytes() const { return static_cast<size_t>(count() * dtype_size(dtype)); }
  tw_tensor tensor() const;  // a view, of 1 to 4 dimensions
};

// An array of its own memory, not initialised. The shape's bytes must fit in int64.
Array make_array(int32_t dtype, const std::vector<int64_t>& shape);

// The same values in another dtype: floats round to nearest, float64 -> 16 bits by way of float32. Integers only to
// other integers, refused if one does not fit.
Status convert(const Array& from, int32_t dtype, Array* out);

// "[2, 128, 4, 64]"
std::string shape_text(std::span<const int64_t> shape);

// count * size, or false if that exceeds int64. Sizes of 0 count as 1, so that strides of empty arrays fit as well.
bool checked_bytes(std::span<const int64_t> shape, int64_t size, int64_t* bytes);

// The whole file. Refuses what is no regular file.
Status read_file(const std::string& path, std::shared_ptr<Buffer>* out);

// An array over bytes [begin, begin + bytes) of the buffer; copies only if they are misaligned for the dtype.
// TW_BOOL bytes other than 0 and 1 are refused. `name` begins the message.
Status view_array(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin, int32_t dtype,
                  const std::vector<int64_t>& shape, Array* out);

}  // namespace tilewise::io
