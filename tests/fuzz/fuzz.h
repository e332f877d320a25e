// What every fuzz target shares: the entry point that libFuzzer and replay_main.cpp call, and a check that aborts.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "io/array.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FUZZ_REQUIRE(condition)                                                           \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (0)

inline std::shared_ptr<tilewise::io::Buffer> to_buffer(const void* data, size_t size) {
  auto buffer = std::make_shared<tilewise::io::Buffer>(size);
  if (size > 0) std::memcpy(buffer->data(), data, size);
  return buffer;
}
