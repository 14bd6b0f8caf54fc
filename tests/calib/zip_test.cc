#include "calib/zip.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/fields.h"

namespace okv {
namespace {

using testing::HasSubstr;

void ExpectOpenFails(const std::string& bytes, absl::StatusCode code, const std::string& message) {
  const absl::Status status = ZipReader::Open(bytes).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

std::string TwoEntries() {
  ZipWriter writer;
  writer.Add("a/first", "hello");
  writer.Add("a/second", std::string(1000, 'x'));
  return *writer.Finish();
}

// Where the directory's record `index` of TwoEntries begins.
size_t RecordAt(const std::string& bytes, int index) {
  size_t at = std::string::npos;
  for (int i = 0; i <= index; ++i) at = bytes.find("PK\x01\x02", at + 1);
  return at;
}

void Put(std::string* bytes, size_t at, uint64_t value, size_t width) {
  for (size_t i = 0; i < width; ++i) (*bytes)[at + i] = static_cast<char>(value >> (8 * i));
}

TEST(Crc32Test, IsThatOfTheStandardCheck) {
  EXPECT_EQ(Crc32("123456789"), 0xcbf43926u);
  EXPECT_EQ(Crc32(""), 0u);
  EXPECT_EQ(Crc32(std::string(32, '\0')), 0x190a55adu);
}

TEST(ZipTest, WhatIsWrittenIsRead) {
  const std::string bytes = TwoEntries();
  const auto zip = ZipReader::Open(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(zip->first_name(), "a/first");
  EXPECT_TRUE(zip->Contains("a/second"));
  EXPECT_FALSE(zip->Contains("a"));
  EXPECT_EQ(*zip->Read("a/first"), "hello");
  EXPECT_EQ(*zip->Read("a/second"), std::string(1000, 'x'));
  EXPECT_EQ(*zip->Size("a/second"), 1000u);
  EXPECT_EQ(TwoEntries(), bytes);
}

TEST(ZipTest, MoreEntriesThanAPlainFileHoldsAreNotWritten) {
  ZipWriter writer;
  for (int i = 0; i < 65'535; ++i) writer.Add(absl::StrCat(i), "");
  const absl::Status status = writer.Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("65535 entries"));
}

TEST(ZipTest, DataIsAlignedTo64Bytes) {
  const std::string bytes = TwoEntries();
  EXPECT_EQ(bytes.find("hello") % 64, 0u);
  EXPECT_EQ(bytes.find("xxxx") % 64, 0u);
}

TEST(ZipTest, AnEntryThatIsNotThereIsInvalid) {
  const std::string bytes = TwoEntries();
  const auto zip = ZipReader::Open(bytes);
  EXPECT_THAT(std::string(zip->Read("b").status().message()), HasSubstr("no entry 'b'"));
  EXPECT_THAT(std::string(zip->Size("b").status().message()), HasSubstr("no entry 'b'"));
}

TEST(ZipTest, AFlippedBitOfDataIsDataLoss) {
  std::string bytes = TwoEntries();
  bytes[bytes.find("hello")] ^= 1;
  const auto zip = ZipReader::Open(bytes);
  ASSERT_TRUE(zip.ok());
  EXPECT_EQ(zip->Read("a/first").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(zip->Read("a/first").status().message()), HasSubstr("'a/first'"));
  EXPECT_TRUE(zip->Read("a/second").ok());
}

TEST(ZipTest, EveryTruncationIsAnError) {
  const std::string bytes = TwoEntries();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(ZipReader::Open(bytes.substr(0, size)).ok()) << size << " of " << bytes.size();
  }
  ExpectOpenFails(bytes.substr(0, 500), absl::StatusCode::kDataLoss, "no directory");
  ExpectOpenFails(bytes.substr(0, bytes.size() - 1), absl::StatusCode::kDataLoss, "end record");
  ExpectOpenFails("", absl::StatusCode::kInvalidArgument, "not a ZIP file");
}

TEST(ZipTest, EachBadFieldIsNamed) {
  struct Case {
    int record;  // -1: the end record.
    size_t at;
    uint64_t value;
    size_t width;
    const char* message;
  };
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  for (const Case& one : {
           Case{0, 10, 8, 2, "entry 'a/first' is compressed (method 8)"},
           Case{1, 8, 1, 2, "entry 'a/second' is encrypted"},
           Case{0, 20, 4, 4, "entry 'a/first' is compressed"},
           Case{0, 42, 0xfffffff0, 4, "entry 'a/first' begins beyond the file"},
           Case{0, 42, 1, 4, "entry 'a/first' has no header"},
           Case{1, 42, 0, 4, "entry 'a/second' has another name"},
           Case{0, 0, 0, 4, "holds no entry"},
           Case{0, 28, 0xffff, 2, "reaches beyond its directory"},
           Case{-1, 4, 1, 2, "several disks"},
           Case{-1, 10, 3, 2, "several disks"},
           Case{-1, 16, 0xfffffff0, 4, "directory reaches beyond the file"},
           Case{-1, 12, 0xfffffff0, 4, "directory reaches beyond the file"},
       }) {
    std::string bytes = TwoEntries();
    const size_t base = one.record < 0 ? bytes.size() - 22 : RecordAt(bytes, one.record);
    Put(&bytes, base + one.at, one.value, one.width);
    ExpectOpenFails(bytes, kInvalid, one.message);
  }
  // Sizes that agree with each other and not with the file.
  std::string bytes = TwoEntries();
  Put(&bytes, RecordAt(bytes, 1) + 20, 0x7fffffff, 4);
  Put(&bytes, RecordAt(bytes, 1) + 24, 0x7fffffff, 4);
  ExpectOpenFails(bytes, kInvalid, "entry 'a/second' reaches beyond the file");
  // One entry fewer than the directory holds, and one more.
  for (const uint64_t count : {1, 3}) {
    bytes = TwoEntries();
    Put(&bytes, bytes.size() - 22 + 8, count, 2);
    Put(&bytes, bytes.size() - 22 + 10, count, 2);
    ExpectOpenFails(bytes, kInvalid, count == 1 ? "more than its entries" : "holds no entry");
  }
}

TEST(ZipTest, ANameThatStandsTwiceIsRefused) {
  ZipWriter writer;
  writer.Add("a", "1");
  writer.Add("a", "2");
  ExpectOpenFails(*writer.Finish(), absl::StatusCode::kInvalidArgument, "'a' stands twice");
}

// TwoEntries with a ZIP64 end record before the plain one, as PyTorch writes it.
std::string WithWideEnd(uint64_t entries_count, uint64_t directory_offset_error) {
  std::string bytes = TwoEntries();
  const std::string end = bytes.substr(bytes.size() - 22);
  bytes.resize(bytes.size() - 22);
  const uint64_t directory_at = RecordAt(bytes, 0);
  const uint64_t directory_bytes = bytes.size() - directory_at;
  const uint64_t record_at = bytes.size();
  absl::StrAppend(&bytes, absl::string_view("PK\x06\x06", 4));
  AppendU64(&bytes, 44);
  AppendU32(&bytes, 0x002d031e);
  AppendU64(&bytes, 0);  // Disks.
  AppendU64(&bytes, entries_count);
  AppendU64(&bytes, entries_count);
  AppendU64(&bytes, directory_bytes);
  AppendU64(&bytes, directory_at + directory_offset_error);
  absl::StrAppend(&bytes, absl::string_view("PK\x06\x07", 4));
  AppendU32(&bytes, 0);
  AppendU64(&bytes, record_at);
  AppendU32(&bytes, 1);
  return bytes + end;
}

TEST(ZipTest, Zip64EndRecordsAreRead) {
  const std::string bytes = WithWideEnd(2, 0);
  const auto zip = ZipReader::Open(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(*zip->Read("a/first"), "hello");
  // The plain record may leave it to the ZIP64 record.
  std::string unknown = bytes;
  const size_t end = unknown.size() - 22;
  Put(&unknown, end + 8, 0xffff, 2);
  Put(&unknown, end + 10, 0xffff, 2);
  Put(&unknown, end + 12, 0xffffffff, 4);
  Put(&unknown, end + 16, 0xffffffff, 4);
  const auto wide = ZipReader::Open(unknown);
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_EQ(*wide->Read("a/first"), "hello");
}

TEST(ZipTest, BadZip64EndRecordsAreRefused) {
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectOpenFails(WithWideEnd(3, 0), kInvalid, "end records disagree");
  ExpectOpenFails(WithWideEnd(2, 1), kInvalid, "end records disagree");
  std::string bytes = WithWideEnd(2, 0);
  const size_t locator = bytes.size() - 22 - 20;
  std::string far = bytes;
  Put(&far, locator + 8, ~uint64_t{0}, 8);
  ExpectOpenFails(far, kInvalid, "ZIP64 end record lies beyond");
  std::string none = bytes;
  Put(&none, locator + 8, 0, 8);
  ExpectOpenFails(none, kInvalid, "no ZIP64 end record");
  std::string cut = bytes;
  Put(&cut, locator + 8, locator, 8);
  ExpectOpenFails(cut, kInvalid, "no ZIP64 end record");
  // More entries than any file of PyTorch has, all other fields agreeing.
  std::string many = WithWideEnd(1'000'000'000, 0);
  Put(&many, many.size() - 22 + 8, 0xffff, 2);
  Put(&many, many.size() - 22 + 10, 0xffff, 2);
  ExpectOpenFails(many, kInvalid, "1000000000 entries");
}

TEST(ZipTest, Zip64SizesOfAnEntryAreRead) {
  // One entry by hand: sizes and offset are in the extra field.
  std::string bytes;
  const auto common = [&](uint32_t size, uint16_t extra_bytes) {
    AppendU32(&bytes, 0x0000002d);
    AppendU32(&bytes, 0);
    bytes.append(2, '\0');
    AppendU32(&bytes, Crc32("hello"));
    AppendU32(&bytes, size);
    AppendU32(&bytes, size);
    Put(&bytes, (bytes.resize(bytes.size() + 4), bytes.size() - 4),
        1u | uint32_t{extra_bytes} << 16, 4);
  };
  bytes = std::string("PK\x03\x04", 4);
  common(5, 0);
  absl::StrAppend(&bytes, "n", "hello");
  const size_t directory_at = bytes.size();
  absl::StrAppend(&bytes, absl::string_view("PK\x01\x02\x2d\x00", 6));
  common(0xffffffff, 28);
  bytes.append(10, '\0');
  AppendU32(&bytes, 0xffffffff);
  bytes += "n";
  AppendU32(&bytes, 1u | 24u << 16);
  AppendU64(&bytes, 5);
  AppendU64(&bytes, 5);
  AppendU64(&bytes, 0);
  const size_t directory_bytes = bytes.size() - directory_at;
  absl::StrAppend(&bytes, absl::string_view("PK\x05\x06\0\0\0\0\1\0\1\0", 12));
  AppendU32(&bytes, static_cast<uint32_t>(directory_bytes));
  AppendU32(&bytes, static_cast<uint32_t>(directory_at));
  bytes.append(2, '\0');
  const auto zip = ZipReader::Open(bytes);
  ASSERT_TRUE(zip.ok()) << zip.status();
  EXPECT_EQ(*zip->Read("n"), "hello");

  std::string short_extra = bytes;  // The field ends before the offset.
  Put(&short_extra, directory_at + 46 + 1 + 2, 16, 2);
  ExpectOpenFails(short_extra, absl::StatusCode::kInvalidArgument, "'n' has no ZIP64 size");
}

}  // namespace
}  // namespace okv
