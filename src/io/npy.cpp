#include "io/npy.h"

#include <charconv>
#include <cstring>
#include <string_view>

namespace tilewise::io {
namespace {

constexpr size_t kMaxHeader = size_t{1} << 20;  // NumPy's own headers take 118 bytes

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

// Reads the header, a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  Status read(Header* header) {
    bool seen[3] = {};
    if (!take('{')) return broken("'{'");
    while (!take('}')) {
      std::string key;
      if (!string(&key)) return broken("a key in quotes, or '}'");
      if (!take(':')) return broken("':'");
      const int which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : -1;
      if (which < 0) return invalid("header key '", key, "': must be descr, fortran_order or shape");
      if (seen[which]) return invalid("header key '", key, "' occurs twice");
      seen[which] = true;
      if (which == 0 && !string(&header->descr)) return broken("a plain dtype in quotes (no structured dtypes)");
      if (which == 1 && !boolean(&header->fortran_order)) return broken("True or False");
      if (which == 2) TW_RETURN_IF_ERROR(tuple(&header->shape));
      if (!take(',') && !next_is('}')) return broken("',' or '}'");
    }
    if (!seen[0] || !seen[1] || !seen[2])
      return invalid("header lacks ", !seen[0] ? "descr" : !seen[1] ? "fortran_order" : "shape");
    skip_space();
    return at_ == text_.size() ? Status() : broken("the header's end");
  }

 private:
  Status broken(const char* expected) const { return invalid("header, byte ", at_, ": expected ", expected); }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool next_is(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) { return next_is(c) && ++at_; }
  bool string(std::string* out) {
    skip_space();
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return false;
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return false;
    *out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return out->find('\\') == std::string::npos;
  }
  bool boolean(bool* out) {
    skip_space();
    for (std::string_view word : {"True", "False"})
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        *out = word == "True";
        return true;
      }
    return false;
  }
  Status tuple(std::vector<int64_t>* out) {
    if (!take('(')) return broken("the shape as a tuple");
    while (!take(')')) {
      skip_space();
      int64_t size = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), size);
      if (error != std::errc() || size < 0) return broken("a size of 0 to 2^63 - 1");
      at_ = static_cast<size_t>(end - text_.data());
      if (out->size() == TW_MAX_DIMS)
        return invalid("shape: more than ", TW_MAX_DIMS, " dimensions: must be 1 to ", TW_MAX_DIMS);
      out->push_back(size);
      if (!take(',') && !next_is(')')) return broken("',' or ')'");
    }
    return out->empty() ? invalid("shape (): must have 1 to ", TW_MAX_DIMS, " dimensions") : Status();
  }

  std::string_view text_;
  size_t at_ = 0;
};

struct TypeName {
  const char* descr;
  int32_t dtype;
};
constexpr TypeName kTypes[] = {{"<f4", TW_FLOAT32}, {"<f2", TW_FLOAT16}, {"<f8", TW_FLOAT64}, {"<i4", TW_INT32},
                               {"<i8", TW_INT64},   {"|b1", TW_BOOL},    {"|u1", TW_BOOL}};

Status dtype_of_descr(const std::string& descr, int32_t* dtype) {
  for (const TypeName& type : kTypes)
    if (descr == type.descr) return *dtype = type.dtype, Status();
  if (descr.starts_with('>')) return invalid("dtype '", descr, "' is big-endian: must be little-endian");
  if (descr.ends_with("V2"))
    return invalid("dtype '", descr,
                   "' has no name: bfloat16 comes in a .safetensors file, or as float32 with --dtype bf16");
  return invalid("dtype '", descr, "': must be float16, float32, float64, int32, int64, bool or uint8");
}

void from_fortran_order(const Array& from, Array* to) {
  const int64_t size = dtype_size(from.dtype);
  const size_t ndim = from.shape.size();
  std::vector<int64_t> index(ndim, 0), stride(ndim, 1);
  for (size_t n = 1; n < ndim; ++n) stride[n] = stride[n - 1] * from.shape[n - 1];
  for (int64_t out = 0, in = 0; out < from.count(); ++out) {
    std::memcpy(to->data + out * size, from.data + in * size, static_cast<size_t>(size));
    for (size_t n = ndim; n-- > 0;) {  // the next index, last dimension first
      in += stride[n];
      if (++index[n] < from.shape[n]) break;
      in -= stride[n] * from.shape[n];
      index[n] = 0;
    }
  }
}

// Where the header's text lies, and with it where the data begin.
Status find_header(std::span<const std::byte> file, size_t* begin, size_t* end) {
  if (file.size() < 10 || std::memcmp(file.data(), "\x93NUMPY", 6) != 0)
    return invalid("is no .npy file (no \\x93NUMPY at its start)");
  const int major = static_cast<int>(file[6]), minor = static_cast<int>(file[7]);
  if (major < 1 || major > 3 || minor != 0) return invalid("version ", major, ".", minor, ": must be 1.0, 2.0 or 3.0");
  const size_t length_bytes = major == 1 ? 2 : 4;
  *begin = 8 + length_bytes;
  if (file.size() < *begin) return invalid("ends inside its header");
  size_t length = 0;
  for (size_t n = length_bytes; n-- > 0;) length = length << 8 | static_cast<size_t>(file[8 + n]);
  if (length > kMaxHeader) return invalid("header of ", length, " bytes: must be at most ", kMaxHeader);
  if (length > file.size() - *begin) return invalid("ends inside its header");
  *end = *begin + length;
  return Status();
}

Status parse(const std::shared_ptr<Buffer>& file, Array* out) {
  size_t begin = 0, end = 0;
  TW_RETURN_IF_ERROR(find_header(file->bytes(), &begin, &end));
  Header header;
  TW_RETURN_IF_ERROR(HeaderReader({reinterpret_cast<const char*>(file->data()) + begin, end - begin}).read(&header));
  int32_t dtype = 0;
  TW_RETURN_IF_ERROR(dtype_of_descr(header.descr, &dtype));
  int64_t bytes = 0;
  if (!checked_bytes(header.shape, dtype_size(dtype), &bytes))
    return invalid("shape ", shape_text(header.shape), " exceeds 2^63 bytes");
  if (static_cast<uint64_t>(bytes) != file->size() - end)
    return invalid("holds ", file->size() - end, " bytes of data: ", dtype_name(dtype), " ", shape_text(header.shape),
                   " takes ", bytes);
  Array array;
  TW_RETURN_IF_ERROR(view_array("data", file, end, dtype, header.shape, &array));
  if (header.fortran_order && array.count() > 0 && array.shape.size() > 1) {
    Array reordered = make_array(dtype, array.shape);
    from_fortran_order(array, &reordered);
    array = std::move(reordered);
  }
  *out = std::move(array);
  return Status();
}

}  // namespace

Status parse_npy(const std::string& name, const std::shared_ptr<Buffer>& file, Array* out) {
  const Status status = parse(file, out);
  return status.ok() ? status : Status(status.code(), name + ": " + status.message());
}

Status read_npy(const std::string& path, Array* out) {
  std::shared_ptr<Buffer> file;
  TW_RETURN_IF_ERROR(read_file(path, &file));
  return parse_npy(path, file, out);
}

std::string npy_header(int32_t dtype, std::span<const int64_t> shape) {
  const char* descr = "|b1";
  for (const TypeName& type : kTypes)
    if (type.dtype == dtype) {
      descr = type.descr;
      break;
    }
  std::string sizes;
  for (size_t n = 0; n < shape.size(); ++n) sizes += concat(n ? ", " : "", shape[n]);
  if (shape.size() == 1) sizes += ',';  // "(3,)" but "(3, 4)"
  std::string text = concat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (", sizes, "), }");
  const size_t used = 10 + text.size() + 1;
  text += std::string((64 - used % 64) % 64, ' ') + '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xff);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

}  // namespace tilewise::io
