#include "io/array.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>

namespace tilewise::io {
namespace {

constexpr std::align_val_t kAlign{64};

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

template <class From, class To>
bool copy_integers(const Array& from, Array* to, int64_t* bad) {
  const From* source = reinterpret_cast<const From*>(from.data);
  To* target = reinterpret_cast<To*>(to->data);
  for (int64_t n = 0; n < from.count(); ++n) {
    if (source[n] < std::numeric_limits<To>::min() || source[n] > std::numeric_limits<To>::max()) {
      *bad = static_cast<int64_t>(source[n]);
      return false;
    }
    target[n] = static_cast<To>(source[n]);
  }
  return true;
}

}  // namespace

Buffer::Buffer(size_t size)
    : size_(size), data_(static_cast<std::byte*>(::operator new(std::max<size_t>(size, 1), kAlign))) {}

void Buffer::Delete::operator()(std::byte* data) const { ::operator delete(data, kAlign); }

tw_tensor Array::tensor() const {
  tw_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t n = shape.size(); n-- > 0; stride *= shape[n]) {
    tensor.shape[n] = shape[n];
    tensor.stride[n] = stride;
  }
  return tensor;
}

Array make_array(int32_t dtype, const std::vector<int64_t>& shape) {
  Array array;
  array.dtype = dtype;
  array.shape = shape;
  array.owner = std::make_shared<Buffer>(array.bytes());
  array.data = array.owner->data();
  return array;
}

Status convert(const Array& from, int32_t dtype, Array* out) {
  if (from.dtype == dtype) {
    *out = from;
    return Status();
  }
  Array to = make_array(dtype, from.shape);
  if (is_float(from.dtype) && is_float(dtype)) {
    for (int64_t n = 0; n < from.count(); ++n) store_element(to.data, dtype, n, load_element(from.data, from.dtype, n));
  } else if (from.dtype == TW_INT64 && dtype == TW_INT32) {
    int64_t bad = 0;
    if (!copy_integers<int64_t, int32_t>(from, &to, &bad)) return invalid("value ", bad, " does not fit in int32");
  } else if (from.dtype == TW_INT32 && dtype == TW_INT64) {
    int64_t bad = 0;
    copy_integers<int32_t, int64_t>(from, &to, &bad);
  } else {
    return invalid("dtype ", dtype_name(from.dtype), ": must be ",
                   is_float(dtype) ? "a float type" : dtype_name(dtype));
  }
  *out = std::move(to);
  return Status();
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t n = 0; n < shape.size(); ++n) text += concat(n ? ", " : "", shape[n]);
  return text + "]";
}

bool checked_bytes(std::span<const int64_t> shape, int64_t size, int64_t* bytes) {
  int64_t span = size;  // with sizes of 0 as 1
  bool empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) return false;
    empty = empty || extent == 0;
    if (__builtin_mul_overflow(span, std::max<int64_t>(extent, 1), &span)) return false;
  }
  *bytes = empty ? 0 : span;
  return true;
}

Status read_file(const std::string& path, std::shared_ptr<Buffer>* out) {
  std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
  if (!file) return invalid(path, ": cannot be opened: ", std::strerror(errno));
  struct stat info;
  if (fstat(fileno(file.get()), &info) != 0) return invalid(path, ": ", std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return invalid(path, ": must be a regular file");
  auto buffer = std::make_shared<Buffer>(static_cast<size_t>(info.st_size));
  if (std::fread(buffer->data(), 1, buffer->size(), file.get()) != buffer->size())
    return invalid(path,
                   ": cannot be read in full: ", std::ferror(file.get()) ? std::strerror(errno) : "it became shorter");
  *out = std::move(buffer);
  return Status();
}

Status view_array(const std::string& name, const std::shared_ptr<Buffer>& buffer, size_t begin, int32_t dtype,
                  const std::vector<int64_t>& shape, Array* out) {
  Array array;
  array.dtype = dtype;
  array.shape = shape;
  array.owner = buffer;
  array.data = buffer->data() + begin;
  const size_t bytes = array.bytes();
  if (dtype == TW_BOOL)
    for (size_t n = 0; n < bytes; ++n)
      if (static_cast<uint8_t>(array.data[n]) > 1)
        return invalid(name, ": element ", n, " of a mask is ", static_cast<int>(array.data[n]), ": must be 0 or 1");
  if (reinterpret_cast<uintptr_t>(array.data) % static_cast<size_t>(dtype_size(dtype)) != 0) {
    Array copy = make_array(dtype, shape);
    std::memcpy(copy.data, array.data, bytes);
    array = std::move(copy);
  }
  *out = std::move(array);
  return Status();
}

}  // namespace tilewise::io
