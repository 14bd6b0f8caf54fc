#include "calib/npy.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/torch_data.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Header(const std::string& type, const std::string& shape) {
  return absl::StrCat("{'descr': '", type, "', 'fortran_order': False, 'shape': ", shape, ", }");
}

void ExpectFails(const std::string& bytes, absl::StatusCode code, const std::string& message) {
  const absl::Status status = NpyArray::Parse(bytes).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(NpyTest, EachTypeIsWidened) {
  const auto floats = [](const std::string& type, const std::string& data) {
    const std::string bytes = NpyFile(Header(type, "(2,)"), data);
    const auto array = NpyArray::Parse(bytes);
    EXPECT_TRUE(array.ok()) << array.status();
    EXPECT_TRUE(array->HasFloats());
    return *array->ReadFloats();
  };
  EXPECT_THAT(floats("<f4", BytesOf<float>({1.5f, -2})), ElementsAre(1.5f, -2));
  EXPECT_THAT(floats("<f2", BytesOf<uint16_t>({0x3e00, 0xc000})), ElementsAre(1.5f, -2));
  EXPECT_THAT(floats("|V2", BytesOf<uint16_t>({0x3fc0, 0xc000})), ElementsAre(1.5f, -2));
  EXPECT_THAT(floats("<V2", BytesOf<uint16_t>({0x3fc0, 0xc000})), ElementsAre(1.5f, -2));
  const auto integers = [](const std::string& type, const std::string& data) {
    const std::string bytes = NpyFile(Header(type, "(2,)"), data);
    const auto array = NpyArray::Parse(bytes);
    EXPECT_TRUE(array.ok()) << array.status();
    EXPECT_FALSE(array->HasFloats());
    return *array->ReadIntegers();
  };
  EXPECT_THAT(integers("<i4", BytesOf<int32_t>({-1, 7})), ElementsAre(-1, 7));
  EXPECT_THAT(integers("<u4", BytesOf<uint32_t>({0xffffffff, 7})), ElementsAre(0xffffffff, 7));
  EXPECT_THAT(integers("<i8", BytesOf<int64_t>({-1, 1l << 40})), ElementsAre(-1, 1l << 40));
}

TEST(NpyTest, ShapesAreRead) {
  const auto shape = [](const std::string& text, size_t elements) {
    const std::string bytes =
        NpyFile(Header("<f4", text), BytesOf(std::vector<float>(elements, 1.0f)));
    const auto array = NpyArray::Parse(bytes);
    EXPECT_TRUE(array.ok()) << array.status();
    return array->shape;
  };
  EXPECT_THAT(shape("(2, 3, 4)", 24), ElementsAre(2, 3, 4));
  EXPECT_THAT(shape("(5,)", 5), ElementsAre(5));
  EXPECT_THAT(shape("()", 1), ElementsAre());
  EXPECT_THAT(shape("(0, 3)", 0), ElementsAre(0, 3));
}

TEST(NpyTest, WideHeadersOfVersion2AreRead) {
  std::string bytes = NpyFile(Header("<f4", "(1,)"), BytesOf<float>({2}));
  bytes[6] = 2;
  bytes.insert(10, 2, '\0');
  const auto array = NpyArray::Parse(bytes);
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(*array->ReadFloats(), ElementsAre(2));
}

TEST(NpyTest, EverythingElseIsRefused) {
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  const std::string one = BytesOf<float>({1});
  ExpectFails("", kInvalid, "does not begin as one");
  ExpectFails("PK\x03\x04", kInvalid, "does not begin as one");
  ExpectFails(NpyFile(Header("<f8", "(1,)"), BytesOf<double>({1})), kInvalid, "type '<f8'");
  ExpectFails(NpyFile(Header(">f4", "(1,)"), one), kInvalid, "type '>f4'");
  ExpectFails(NpyFile(Header("|O", "(1,)"), one), kInvalid, "type '|O'");
  ExpectFails(NpyFile("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", one),
              kInvalid, "type is not a plain one");
  ExpectFails(NpyFile("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }", one), kInvalid,
              "column-major");
  ExpectFails(NpyFile("{'descr': '<f4', 'fortran_order': False, }", one), kInvalid,
              "its header has no shape");
  for (const char* shape : {"(1", "1", "(x,)", "(-1,)", "(1,1,1,1,1,1,1,1,1)",
                            "(4294967296, 4294967296, 4294967296)"}) {
    ExpectFails(NpyFile(Header("<f4", shape), one), kInvalid, "its shape");
  }
  ExpectFails(NpyFile(Header("<f4", "(1,)"), one + "x"), kInvalid, "bytes stand behind");
  std::string version = NpyFile(Header("<f4", "(1,)"), one);
  version[6] = 4;
  ExpectFails(version, kInvalid, "version 4");
  const std::string floats = NpyFile(Header("<f4", "(1,)"), one);
  EXPECT_THAT(std::string(NpyArray::Parse(floats)->ReadIntegers().status().message()),
              HasSubstr("'<f4' is not of int32"));
  const std::string integers = NpyFile(Header("<i4", "(1,)"), one);
  EXPECT_THAT(std::string(NpyArray::Parse(integers)->ReadFloats().status().message()),
              HasSubstr("'<i4' is not of float32"));
}

TEST(NpyTest, EveryTruncationIsAnError) {
  const std::string bytes = NpyFile(Header("<f4", "(3,)"), BytesOf<float>({1, 2, 3}));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(NpyArray::Parse(bytes.substr(0, size)).ok()) << size;
  }
  ExpectFails(bytes.substr(0, bytes.size() - 1), absl::StatusCode::kDataLoss, "12 needed");
  ExpectFails(bytes.substr(0, 40), absl::StatusCode::kDataLoss, "ends in its header");
  // A header of 4 GiB that is not there, and numbers that are not.
  ExpectFails(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12), absl::StatusCode::kDataLoss,
              "ends in its header");
  ExpectFails(NpyFile(Header("<f4", "(4000000000,)"), ""), absl::StatusCode::kDataLoss,
              "16000000000 needed");
}

}  // namespace
}  // namespace okv
