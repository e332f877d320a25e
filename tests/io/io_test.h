// Files made in memory, for the readers' tests.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "io/array.h"

namespace tilewise::io {

inline std::shared_ptr<Buffer> buffer_of(const std::string& bytes) {
  auto buffer = std::make_shared<Buffer>(bytes.size());
  std::memcpy(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <class T>
std::vector<T> values_of(const Array& array) {
  const T* data = reinterpret_cast<const T*>(array.data);
  return std::vector<T>(data, data + array.count());
}

// The message must hold each of the words: the argument, the value got, what is allowed.
inline void expect_refused(const Status& status, std::initializer_list<const char*> words) {
  EXPECT_EQ(status.code(), TW_INVALID_ARGUMENT);
  for (const char* word : words)
    EXPECT_NE(status.message().find(word), std::string::npos) << "\"" << word << "\" is not in: " << status.message();
}

}  // namespace tilewise::io
