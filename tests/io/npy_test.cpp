#include "io/npy.h"

#include <cstdio>
#include <filesystem>

#include "io_test.h"

namespace tilewise::io {
namespace {

std::string file(const std::string& header, const std::string& data, int major = 1) {
  std::string text = header + "\n";
  std::string out = "\x93NUMPY";
  out += static_cast<char>(major);
  out += '\0';
  for (int n = 0; n < (major == 1 ? 2 : 4); ++n) out += static_cast<char>(text.size() >> (8 * n) & 0xff);
  return out + text + data;
}

std::string header(const std::string& descr, const std::string& shape, const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

Status parse(const std::string& bytes, Array* out) { return parse_npy("x.npy", buffer_of(bytes), out); }

void expect_refused_file(const std::string& bytes, std::initializer_list<const char*> words) {
  Array array;
  const Status status = parse(bytes, &array);
  expect_refused(status, words);
  EXPECT_EQ(status.message().rfind("x.npy: ", 0), 0u) << status.message();
}

TEST(Npy, ReadsEveryDtype) {
  const struct {
    const char* descr;
    int32_t dtype;
    size_t size;
  } kinds[] = {{"<f4", TW_FLOAT32, 4}, {"<f2", TW_FLOAT16, 2}, {"<f8", TW_FLOAT64, 8}, {"<i4", TW_INT32, 4},
               {"<i8", TW_INT64, 8},   {"|b1", TW_BOOL, 1},    {"|u1", TW_BOOL, 1}};
  for (const auto& kind : kinds) {
    std::string data;
    for (size_t n = 0; n < 6 * kind.size; ++n) data += static_cast<char>(kind.dtype == TW_BOOL ? n % 2 : n);
    Array array;
    ASSERT_TRUE(parse(file(header(kind.descr, "(2, 3)"), data), &array).ok()) << kind.descr;
    EXPECT_EQ(array.dtype, kind.dtype);
    EXPECT_EQ(array.shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(array.data), array.bytes()), data);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array.data) % kind.size, 0u);  // although the header's length is odd
  }
}

TEST(Npy, BringsFortranOrderIntoCOrder) {
  // x[i][j][l] = 100 i + 10 j + l, first index fastest in the file
  std::vector<float> data;
  for (int l = 0; l < 4; ++l)
    for (int j = 0; j < 3; ++j)
      for (int i = 0; i < 2; ++i) data.push_back(static_cast<float>(100 * i + 10 * j + l));
  Array array;
  ASSERT_TRUE(parse(file(header("<f4", "(2, 3, 4)", "True"), bytes_of(data)), &array).ok());
  std::vector<float> expected;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j)
      for (int l = 0; l < 4; ++l) expected.push_back(static_cast<float>(100 * i + 10 * j + l));
  EXPECT_EQ(values_of<float>(array), expected);
}

TEST(Npy, TakesKeysInAnyOrderVersionsAndEmptyArrays) {
  const std::string data = bytes_of<float>({1, 2, 3});
  Array array;
  EXPECT_TRUE(parse(file("{'shape':(3,),'fortran_order':False,'descr':'<f4'}", data), &array).ok());
  EXPECT_TRUE(parse(file(header("<f4", "(3,)"), data, 2), &array).ok());
  EXPECT_TRUE(parse(file(header("<f4", "(3,)"), data, 3), &array).ok());
  ASSERT_TRUE(parse(file(header("<f4", "(2, 0, 5)"), ""), &array).ok());
  EXPECT_EQ(array.count(), 0);
}

TEST(Npy, RefusesWrongSizes) {
  const std::string data = bytes_of<float>({1, 2, 3});
  expect_refused_file(file(header("<f4", "(4,)"), data), {"12 bytes", "f32 [4]", "16"});
  expect_refused_file(file(header("<f4", "(3,)"), data + "x"), {"13 bytes", "12"});  // trailing garbage
  expect_refused_file(file(header("<f4", "(4294967296, 4294967296, 4)"), ""), {"2^63"});
  expect_refused_file(file(header("<f4", "(0, 4294967296, 4294967296)"), ""), {"2^63"});  // its strides would overflow
  expect_refused_file(file(header("<f4", "(99999999999999999999,)"), ""), {"size"});
  expect_refused_file(file(header("<f4", "(-1,)"), ""), {"size"});
}

TEST(Npy, RefusesWhatItCannotHold) {
  expect_refused_file(file(header(">f4", "(1,)"), "1234"), {"big-endian", ">f4"});
  expect_refused_file(file(header("<f16", "(1,)"), ""), {"<f16", "float32"});
  expect_refused_file(file(header("|V2", "(1,)"), "12"), {"|V2", "safetensors"});
  expect_refused_file(file(header("|i1", "(1,)"), "1"), {"|i1"});
  expect_refused_file(file("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (1,), }", "1234"),
                      {"structured"});
  expect_refused_file(file(header("<f4", "()"), "1234"), {"()", "dimensions"});
  expect_refused_file(file(header("<f4", "(1, 1, 1, 1, 1)"), "1234"), {"dimensions"});
  expect_refused_file(file(header("|u1", "(3,)"), std::string("\0\1\2", 3)), {"mask", "2", "0 or 1"});
}

TEST(Npy, RefusesBrokenHeaders) {
  expect_refused_file("", {"no .npy"});
  expect_refused_file("PK\3\4 a zip file", {"no .npy"});
  expect_refused_file(std::string("\x93NUMPY\x04\0\x01\0 ", 11), {"version 4.0"});
  expect_refused_file(file(header("<f4", "(1,)"), "1234").substr(0, 40), {"ends inside"});
  expect_refused_file(std::string("\x93NUMPY\x02\0\xff\xff\xff\xff", 12), {"header of 4294967295"});
  const std::string good = header("<f4", "(1,)");
  for (const std::string& bad : {std::string("[]"), good + "}", good.substr(0, good.size() - 1),
                                 std::string("{'descr': '<f4', 'fortran_order': False}"),
                                 std::string("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"),
                                 std::string("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}"),
                                 std::string("{'descr': '<f4', 'fortran_order': False, 'shape': 1}"),
                                 std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}")}) {
    Array array;
    EXPECT_FALSE(parse(file(bad, "1234"), &array).ok()) << bad;
  }
}

TEST(Npy, WritesWhatItReads) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{7}, {2, 3}, {1, 2, 3, 4}, {0, 3}}) {
    Array array = make_array(TW_FLOAT32, shape);
    for (int64_t n = 0; n < array.count(); ++n) store_element(array.data, TW_FLOAT32, n, static_cast<double>(n) / 3);
    const std::string head = npy_header(array.dtype, array.shape);
    EXPECT_EQ(head.size() % 64, 0u);
    Array again;
    ASSERT_TRUE(parse(head + std::string(reinterpret_cast<const char*>(array.data), array.bytes()), &again).ok());
    EXPECT_EQ(again.shape, shape);
    EXPECT_EQ(values_of<float>(again), values_of<float>(array));
  }
  EXPECT_NE(npy_header(TW_FLOAT32, std::vector<int64_t>{3}).find("'shape': (3,), }"), std::string::npos);
}

TEST(Npy, ReadsFiles) {
  Array array;
  expect_refused(read_npy("/nonexistent/x.npy", &array), {"/nonexistent/x.npy", "No such file"});
  expect_refused(read_npy(std::filesystem::temp_directory_path().string(), &array), {"regular file"});
}

TEST(Convert, RoundsAndChecks) {
  Array doubles = make_array(TW_FLOAT64, {3});
  for (int n = 0; n < 3; ++n) store_element(doubles.data, TW_FLOAT64, n, 1.0 / (n + 3));
  Array halves;
  ASSERT_TRUE(convert(doubles, TW_BFLOAT16, &halves).ok());
  for (int n = 0; n < 3; ++n)
    EXPECT_EQ(load_element(halves.data, TW_BFLOAT16, n),
              bf16_to_float(float_to_bf16(static_cast<float>(1.0 / (n + 3)))));

  Array longs = make_array(TW_INT64, {2}), ints;
  store_element(longs.data, TW_INT64, 0, 2147483647);
  store_element(longs.data, TW_INT64, 1, -5);
  ASSERT_TRUE(convert(longs, TW_INT32, &ints).ok());
  EXPECT_EQ(values_of<int32_t>(ints), (std::vector<int32_t>{2147483647, -5}));
  reinterpret_cast<int64_t*>(longs.data)[1] = int64_t{1} << 31;
  expect_refused(convert(longs, TW_INT32, &ints), {"2147483648", "int32"});
  expect_refused(convert(doubles, TW_INT32, &ints), {"f64", "i32"});
  expect_refused(convert(longs, TW_FLOAT32, &ints), {"i64", "float"});
}

}  // namespace
}  // namespace tilewise::io
