#include "io/safetensors.h"

#include "io_test.h"

namespace tilewise::io {
namespace {

std::string file(const std::string& header, const std::string& data) {
  std::string out;
  for (int n = 0; n < 8; ++n) out += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * n) & 0xff);
  return out + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

Status parse(const std::string& bytes, Safetensors* out) { return Safetensors::parse("x", buffer_of(bytes), out); }

void expect_refused_file(const std::string& bytes, std::initializer_list<const char*> words) {
  Safetensors tensors;
  expect_refused(parse(bytes, &tensors), words);
}

TEST(Safetensors, ReadsTensorsInAnyOrder) {
  const std::string data =
      bytes_of<float>({1, 2}) + bytes_of<uint16_t>({0x3f80, 0x4000, 0x4040}) + std::string("\1\0", 2);
  const std::string header = std::string("{") + entry("mask", "BOOL", "[2]", "[14,16]") + "," +
                             entry("q", "F32", "[1,2]", "[0,8]") + ",\"__metadata__\":{\"a\":\"b\"}," +
                             entry("k", "BF16", "[3]", "[8,14]") + "}  ";
  Safetensors tensors;
  ASSERT_TRUE(parse(file(header, data), &tensors).ok());
  EXPECT_EQ(tensors.entries().size(), 3u);
  Array array;
  ASSERT_TRUE(tensors.get("q", &array).ok());
  EXPECT_EQ(values_of<float>(array), (std::vector<float>{1, 2}));
  EXPECT_EQ(array.shape, (std::vector<int64_t>{1, 2}));
  ASSERT_TRUE(tensors.get("k", &array).ok());
  EXPECT_EQ(array.dtype, TW_BFLOAT16);
  EXPECT_EQ(load_element(array.data, TW_BFLOAT16, 2), 3);
  ASSERT_TRUE(tensors.get("mask", &array).ok());
  EXPECT_EQ(array.dtype, TW_BOOL);
  expect_refused(tensors.get("v", &array), {"\"v\""});
}

TEST(Safetensors, CopiesMisalignedTensors) {
  Safetensors tensors;
  ASSERT_TRUE(
      parse(file(std::string("{") + entry("m", "U8", "[1]", "[0,1]") + "," + entry("q", "F32", "[1]", "[1,5]") + "}",
                 std::string("\1") + bytes_of<float>({7})),
            &tensors)
          .ok());
  Array array;
  ASSERT_TRUE(tensors.get("q", &array).ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(array.data) % 4, 0u);
  EXPECT_EQ(values_of<float>(array)[0], 7);
}

TEST(Safetensors, RefusesWrongOffsets) {
  const std::string data(8, '\0');
  const auto one = [&](const std::string& shape, const std::string& offsets) {
    return file(std::string("{") + entry("q", "F32", shape, offsets) + "}", data);
  };
  Safetensors good;
  ASSERT_TRUE(parse(one("[2]", "[0,8]"), &good).ok());
  expect_refused_file(one("[2]", "[8,0]"), {"\"q\"", "begin <= end"});
  expect_refused_file(one("[2]", "[0,12]"), {"<= 8"});
  expect_refused_file(one("[2]", "[-8,0]"), {"data_offsets"});
  expect_refused_file(one("[2]", "[0,8,8]"), {"data_offsets"});
  expect_refused_file(one("[2]", "[0.0,8.0]"), {"data_offsets"});
  expect_refused_file(one("[3]", "[0,8]"), {"F32 [3]", "8 bytes"});
  expect_refused_file(one("[4294967296,4294967296]", "[0,8]"), {"\"q\""});
  expect_refused_file(one("[-2]", "[0,8]"), {"shape"});
  expect_refused_file(one("[1]", "[0,4]"), {"holds 8 bytes", "take 4"});  // trailing garbage
  expect_refused_file(one("[1]", "[4,8]"), {"gap"});
  const auto two = [&](const char* a, const char* b) {
    return file(std::string("{") + entry("a", "U8", "[4]", a) + "," + entry("b", "U8", "[4]", b) + "}", data);
  };
  ASSERT_TRUE(parse(two("[4,8]", "[0,4]"), &good).ok());
  expect_refused_file(two("[0,4]", "[2,6]"), {"\"b\"", "inside"});
  expect_refused_file(two("[0,4]", "[0,4]"), {"inside"});
}

TEST(Safetensors, RefusesBrokenHeaders) {
  const std::string q = entry("q", "F32", "[1]", "[0,4]");
  expect_refused_file("1234567", {"shorter than 8"});
  expect_refused_file(std::string(8, '\xff'), {"18446744073709551615", "at most"});
  expect_refused_file(file(std::string("{") + q + "}", "1234").substr(0, 20), {"ends inside"});
  expect_refused_file(file("", ""), {"'{'"});
  expect_refused_file(file(" {" + q + "}", "1234"), {"'{'"});
  expect_refused_file(file(std::string("{") + q, "1234"), {"JSON"});
  expect_refused_file(file(std::string("{") + q + "}x", "1234"), {"JSON"});
  expect_refused_file(file(std::string("{") + q + "," + q + "}", "1234"), {"\"q\"", "twice"});
  expect_refused_file(
      file("{\"q\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "1234"),
      {"\"dtype\"", "twice"});
  expect_refused_file(file("{\"q\":[[[[[[]]]]]]}", ""), {"deep"});
  expect_refused_file(file("{\"q\":1}", ""), {"\"q\"", "dtype, shape and data_offsets"});
  expect_refused_file(file(std::string("{") + entry("q", "F33", "[1]", "[0,4]") + "}", "1234"), {"F33"});
  expect_refused_file(file("{\"__metadata__\":{\"a\":1}," + q + "}", "1234"), {"__metadata__"});
}

TEST(Safetensors, NamesWhatItCannotHandOut) {
  Safetensors tensors;
  ASSERT_TRUE(
      parse(file(std::string("{") + entry("a", "I8", "[1]", "[0,1]") + "," + entry("b", "U8", "[]", "[1,2]") + "," +
                     entry("c", "U8", "[1,1,1,1,1]", "[2,3]") + "," + entry("d", "U8", "[1]", "[3,4]") + "}",
                 std::string("\1\1\1\7")),
            &tensors)
          .ok());
  Array array;
  expect_refused(tensors.get("a", &array), {"\"a\"", "I8", "BF16"});
  expect_refused(tensors.get("b", &array), {"\"b\"", "[]", "dimensions"});
  expect_refused(tensors.get("c", &array), {"[1, 1, 1, 1, 1]", "dimensions"});
  expect_refused(tensors.get("d", &array), {"7", "0 or 1"});
}

}  // namespace
}  // namespace tilewise::io
