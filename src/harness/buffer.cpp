#include "harness/buffer.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"

namespace tilewise::harness {
namespace {

constexpr const char* kLayoutNames[kNumLayouts] = {"contiguous", "transposed", "fused_qkv", "every_other",
                                                   "padded",     "unaligned",  "expanded",  "mixed"};
constexpr int64_t kMargin = 64;  // guard elements on each side; a multiple of 64 bytes for every dtype

struct Placement {
  int64_t stride[TW_MAX_DIMS];
  int64_t begin;  // first element after the margin
};

// Strides for dimensions laid out from the innermost of `order` outwards; extra[n] elements follow each slice of dim n.
Placement place(const std::vector<int64_t>& shape, Layout layout, bool vectors, int unaligned) {
  const int ndim = static_cast<int>(shape.size());
  int order[TW_MAX_DIMS];  // innermost first
  for (int n = 0; n < ndim; ++n) order[n] = ndim - 1 - n;
  int64_t step = 1, begin = 0;  // of the innermost dimension
  int64_t pad = 0;              // elements after each innermost row
  int spread = -1;              // this dimension's slices lie `spread_by` times as far apart as they need
  int64_t spread_by = 1;
  switch (layout) {
    case Layout::kTransposed:
      if (vectors && ndim >= 3) std::swap(order[1], order[2]);
      if (!vectors && ndim >= 2) std::swap(order[0], order[1]);
      break;
    case Layout::kFusedQkv:
      if (vectors && ndim >= 3) spread = ndim - 3, spread_by = 3;
      if (!vectors) step = 3;
      break;
    case Layout::kEveryOther:
      if (vectors && ndim >= 3) spread = ndim - 3, spread_by = 2;
      if (!vectors) step = 2;
      break;
    case Layout::kPadded: pad = 5; break;
    case Layout::kUnaligned: begin = 1 + (unaligned + 6) % 7; break;
    default: break;
  }
  Placement placement{{0, 0, 0, 0}, begin};
  int64_t extent = step;
  for (int n = 0; n < ndim; ++n) {
    const int dim = order[n];
    if (dim == spread) {
      placement.begin += extent;  // the middle third, the odd tokens
      extent *= spread_by;
    }
    placement.stride[dim] = extent;
    extent *= std::max<int64_t>(shape[static_cast<size_t>(dim)], 1);
    if (n == 0) extent += pad;
  }
  return placement;
}

}  // namespace

const char* layout_name(Layout layout) { return kLayoutNames[static_cast<int>(layout)]; }

bool layout_from_name(std::string_view name, Layout* out) {
  for (int n = 0; n < kNumLayouts; ++n)
    if (name == kLayoutNames[n]) return *out = static_cast<Layout>(n), true;
  return false;
}

// f(n, offset(n)) for every element: a division a row and not one a dimension and element, which was a third of a test's time.
template <class F>
void Buffer::for_each_offset(F&& f) const {
  if (size_ == 0) return;
  const int64_t row = row_size(), step = tensor_.stride[tensor_.ndim - 1];
  for (int64_t n = 0; n < size_; n += row) {
    const int64_t begin = offset(n);
    for (int64_t c = 0; c < row; ++c) f(n + c, begin + c * step);
  }
}

Buffer::Buffer(int32_t dtype, std::vector<int64_t> shape, Use use, Layout layout, bool vectors, int unaligned)
    : shape_(std::move(shape)), element_size_(dtype_size(dtype)), use_(use) {
  const Placement placement = place(shape_, layout, vectors, unaligned);
  size_ = 1;
  int64_t last = 0;
  for (size_t n = 0; n < shape_.size(); ++n) {
    size_ *= shape_[n];
    last += placement.stride[n] * std::max<int64_t>(shape_[n] - 1, 0);
  }
  begin_ = kMargin + placement.begin;
  allocated_ = begin_ + last + 1 + kMargin;
  bytes_.resize(static_cast<size_t>(allocated_ * element_size_));
  tensor_.dtype = dtype;
  tensor_.ndim = static_cast<int32_t>(shape_.size());
  std::copy(shape_.begin(), shape_.end(), tensor_.shape);
  std::copy(placement.stride, placement.stride + shape_.size(), tensor_.stride);
  tensor_.data = element(0);
  is_element_.assign(static_cast<size_t>(allocated_), false);
  for_each_offset([&](int64_t, int64_t at) { is_element_[static_cast<size_t>(begin_ + at)] = true; });
  for (int64_t n = 0; n < allocated_; ++n) guard_value(n, bytes_.data() + n * element_size_);
  for_each_offset([&](int64_t, int64_t at) { store(at, 0); });
}

Buffer& Buffer::operator=(const Buffer& other) {
  if (this == &other) return *this;
  bytes_ = other.bytes_;
  is_element_ = other.is_element_;
  shape_ = other.shape_;
  size_ = other.size_;
  begin_ = other.begin_;
  allocated_ = other.allocated_;
  element_size_ = other.element_size_;
  use_ = other.use_;
  tensor_ = other.tensor_;
  if (exists()) tensor_.data = element(0);
  return *this;
}

void Buffer::expand(int dim) {
  for_each_offset([&](int64_t, int64_t at) { is_element_[static_cast<size_t>(begin_ + at)] = false; });
  for_each_offset([&](int64_t, int64_t at) { guard_value(begin_ + at, element(at)); });
  tensor_.stride[dim] = 0;
  for_each_offset([&](int64_t, int64_t at) { is_element_[static_cast<size_t>(begin_ + at)] = true; });
}

int64_t Buffer::offset(int64_t n) const {
  int64_t at = 0;
  for (int dim = tensor_.ndim - 1; dim >= 0; --dim) {
    at += n % tensor_.shape[dim] * tensor_.stride[dim];
    n /= tensor_.shape[dim];
  }
  return at;
}

double Buffer::load(int64_t at) const { return load_element(tensor_.data, tensor_.dtype, at); }
void Buffer::store(int64_t at, double value) { store_element(tensor_.data, tensor_.dtype, at, value); }

std::vector<double> Buffer::values() const {
  std::vector<double> out(static_cast<size_t>(size_));
  for_each_offset([&](int64_t n, int64_t at) { out[static_cast<size_t>(n)] = load(at); });
  return out;
}

void Buffer::set_values(const std::vector<double>& values) {
  for_each_offset([&](int64_t n, int64_t at) { store(at, values[static_cast<size_t>(n)]); });
}

void Buffer::poison() {
  for_each_offset([&](int64_t, int64_t at) { std::memset(element(at), 0xff, static_cast<size_t>(element_size_)); });
}
void Buffer::poison(int64_t n) { std::memset(element(offset(n)), 0xff, static_cast<size_t>(element_size_)); }

bool Buffer::poisoned(int64_t n) const {
  const uint8_t* bytes = element(offset(n));
  return std::all_of(bytes, bytes + element_size_, [](uint8_t byte) { return byte == 0xff; });
}

bool Buffer::all_poisoned() const {
  for (int64_t n = 0; n < size_; ++n)
    if (!poisoned(n)) return false;
  return true;
}

void Buffer::guard_value(int64_t index, uint8_t* out) const {
  if (use_ == Use::kInput) {
    std::memset(out, 0xff, static_cast<size_t>(element_size_));
    return;
  }
  const uint64_t value = static_cast<uint64_t>(1 + index % 120);  // subnormal in every float dtype
  std::memcpy(out, &value, static_cast<size_t>(element_size_));
}

bool Buffer::guards_intact() const {
  uint8_t expected[8];
  for (int64_t n = 0; n < allocated_; ++n) {
    if (is_element_[static_cast<size_t>(n)]) continue;
    guard_value(n, expected);
    if (std::memcmp(bytes_.data() + n * element_size_, expected, static_cast<size_t>(element_size_)) != 0) return false;
  }
  return true;
}

bool Buffer::same_elements(const Buffer& other, int64_t* first_bad) const {
  if (first_bad != nullptr) *first_bad = -1;
  if (tensor_.dtype != other.tensor_.dtype || shape_ != other.shape_) return false;
  for (int64_t n = 0; n < size_; ++n)
    if (std::memcmp(element(offset(n)), other.element(other.offset(n)), static_cast<size_t>(element_size_)) != 0) {
      if (first_bad != nullptr) *first_bad = n;
      return false;
    }
  return true;
}

void Buffer::restore(const Bytes& bytes) { std::copy(bytes.begin(), bytes.end(), bytes_.begin()); }

}  // namespace tilewise::harness
