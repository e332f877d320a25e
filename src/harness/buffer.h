// A tensor in memory of its own, laid out as asked, with guard elements around it and between its rows.
//
// Guards of an output are the integers 1, 2, 3, ...: read as floats these are subnormal, so that a stray write, and even
// a stray `+= 0` with flushing, changes them. Guards of an input are NaN (all bits set): an over-read shows in the result.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <vector>

#include "tilewise/tilewise.h"

namespace tilewise::harness {

enum class Layout {
  kContiguous,  // row-major in the tensor's own order
  kTransposed,  // heads outside tokens: the [b, s, h, d] view of [b, h, s, d] memory
  kFusedQkv,    // a slice of a wider tensor, as of a fused q, k, v projection
  kEveryOther,  // every other token of a longer sequence
  kPadded,      // rows of d elements, 5 apart
  kUnaligned,   // contiguous, begins 1 to 7 elements past a 64-byte boundary
  kExpanded,    // k and v: stride 0 over the batch; dout: stride 0 everywhere but in the last dimension
  kMixed        // every tensor another one of the first six
};
inline constexpr int kNumLayouts = 8;
const char* layout_name(Layout layout);
bool layout_from_name(std::string_view name, Layout* out);  // false if it is none

template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const AlignedAllocator&) const { return true; }
};
using Bytes = std::vector<uint8_t, AlignedAllocator<uint8_t>>;

class Buffer {
 public:
  enum class Use { kInput, kOutput };  // what the guards are: NaN, or counting integers

  Buffer() = default;
  // `vectors`: the last dimension stays contiguous in every layout. kExpanded lays out contiguously; see expand().
  Buffer(int32_t dtype, std::vector<int64_t> shape, Use use, Layout layout = Layout::kContiguous, bool vectors = true,
         int unaligned = 3);
  Buffer(const Buffer& other) { *this = other; }
  Buffer& operator=(const Buffer& other);

  // The dimension shows its first slice everywhere: stride 0. For inputs.
  void expand(int dim);

  bool exists() const { return !bytes_.empty(); }
  tw_tensor* tensor() { return exists() ? &tensor_ : nullptr; }
  int32_t dtype() const { return tensor_.dtype; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const { return size_; }  // elements, numbered row-major 0 .. size - 1
  int64_t row_size() const { return shape_.back(); }
  int64_t num_rows() const { return row_size() == 0 ? 0 : size_ / row_size(); }

  int64_t offset(int64_t n) const;  // of element n, from tensor()->data
  double get(int64_t n) const { return load(offset(n)); }
  void set(int64_t n, double value) { store(offset(n), value); }
  std::vector<double> values() const;                  // row-major
  void set_values(const std::vector<double>& values);

  void poison();                   // every element: all bits set (NaN; a bool that is neither 0 nor 1; -1)
  void poison(int64_t n);          // one
  bool poisoned(int64_t n) const;  // still as poison() left it
  bool all_poisoned() const;
  bool guards_intact() const;
  bool same_elements(const Buffer& other, int64_t* first_bad) const;  // bit for bit, whatever the layouts

  const Bytes& bytes() const { return bytes_; }  // guards included
  void* allocation() { return bytes_.data(); }
  void restore(const Bytes& bytes);

 private:
  template <class F>
  void for_each_offset(F&& f) const;
  double load(int64_t offset) const;
  void store(int64_t offset, double value);
  uint8_t* element(int64_t offset) { return bytes_.data() + (begin_ + offset) * element_size_; }
  const uint8_t* element(int64_t offset) const { return bytes_.data() + (begin_ + offset) * element_size_; }
  void guard_value(int64_t index, uint8_t* out) const;

  Bytes bytes_;
  std::vector<bool> is_element_;  // of the allocation; false: a guard
  std::vector<int64_t> shape_;
  int64_t size_ = 0;
  int64_t begin_ = 0;      // element 0, counted in elements from the allocation's start
  int64_t allocated_ = 0;  // elements, guards included
  int64_t element_size_ = 0;
  Use use_ = Use::kInput;
  tw_tensor tensor_{};
};

}  // namespace tilewise::harness
