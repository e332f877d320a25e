// Any bytes: parse_npy() says no in words, or gives an array that survives being written and read again.
#include "fuzz.h"
#include "io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tilewise::io;
  Array array;
  const tilewise::Status parsed = parse_npy("input", to_buffer(data, size), &array);
  if (!parsed.ok()) {
    FUZZ_REQUIRE(parsed.message().starts_with("input: "));
    return 0;
  }
  FUZZ_REQUIRE(array.shape.size() >= 1 && array.shape.size() <= TW_MAX_DIMS);
  FUZZ_REQUIRE(array.bytes() <= size);
  std::string file = npy_header(array.dtype, array.shape);
  FUZZ_REQUIRE(file.size() % 64 == 0);
  file.append(reinterpret_cast<const char*>(array.data), array.bytes());
  Array again;
  FUZZ_REQUIRE(parse_npy("again", to_buffer(file.data(), file.size()), &again).ok());
  FUZZ_REQUIRE(again.dtype == array.dtype && again.shape == array.shape);
  FUZZ_REQUIRE(array.bytes() == 0 || std::memcmp(again.data, array.data, array.bytes()) == 0);
  return 0;
}
