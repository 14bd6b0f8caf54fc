#include "proto/fields.h"

#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(FieldsTest, AFieldIsTagLengthBytes) {
  std::string bytes;
  FieldWriter writer(&bytes);
  writer.Bytes(7, "ab");
  writer.U32(8, 0x01020304);
  writer.U64(9, 0x0102030405060708);
  writer.Double(10, 1.0);
  EXPECT_EQ(bytes, std::string("\x07\x02\0\0\0ab"
                               "\x08\x04\0\0\0\x04\x03\x02\x01"
                               "\x09\x08\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01"
                               "\x0a\x08\0\0\0\0\0\0\0\0\0\xf0\x3f",
                               42));
  FieldReader reader(bytes);
  EXPECT_EQ(reader.Bytes(7, 2), "ab");
  EXPECT_EQ(reader.U32(8), 0x01020304u);
  EXPECT_EQ(reader.U64(9), 0x0102030405060708u);
  EXPECT_FALSE(reader.done());
  EXPECT_EQ(reader.Double(10), 1.0);
  EXPECT_TRUE(reader.done());
}

TEST(FieldsTest, WhatDoesNotFitFailsForGood) {
  std::string bytes;
  FieldWriter(&bytes).Bytes(1, "abc");
  FieldWriter(&bytes).U32(2, 5);
  for (const bool wrong_tag : {true, false}) {
    FieldReader reader(bytes);
    EXPECT_EQ(wrong_tag ? reader.Bytes(9, 100) : reader.Bytes(1, 2), "");
    EXPECT_FALSE(reader.ok());
    EXPECT_EQ(reader.U32(2), 0u);
    EXPECT_EQ(reader.Take(1), "");
    EXPECT_FALSE(reader.done());
  }
}

TEST(FieldsTest, ANumberOfTheWrongLengthFails) {
  std::string bytes;
  FieldWriter(&bytes).Bytes(1, "abc");
  FieldReader reader(bytes);
  EXPECT_EQ(reader.U32(1), 0u);
  EXPECT_FALSE(reader.ok());
}

TEST(FieldsTest, EveryTruncationFails) {
  std::string bytes;
  FieldWriter(&bytes).U64(3, 77);
  for (size_t size = 0; size < bytes.size(); ++size) {
    FieldReader reader(absl::string_view(bytes).substr(0, size));
    EXPECT_EQ(reader.U64(3), 0u) << size;
    EXPECT_FALSE(reader.ok()) << size;
  }
}

}  // namespace
}  // namespace okv
