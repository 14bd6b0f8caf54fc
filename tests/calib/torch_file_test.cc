#include "calib/torch_file.h"

#include <cmath>
#include <limits>
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

void ExpectOpenFails(const std::string& bytes, absl::StatusCode code, const std::string& message) {
  const absl::Status status = TorchFile::Open(bytes).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

// The tensor that is the whole file, as floats.
absl::StatusOr<std::vector<float>> Floats(const std::string& bytes) {
  const auto file = TorchFile::Open(bytes);
  if (!file.ok()) return file.status();
  return file->ReadFloats(file->pickle().tensor(file->pickle().root()));
}
absl::StatusOr<std::vector<int64_t>> Integers(const std::string& bytes) {
  const auto file = TorchFile::Open(bytes);
  if (!file.ok()) return file.status();
  return file->ReadIntegers(file->pickle().tensor(file->pickle().root()));
}

TEST(TorchFileTest, EachTypeIsWidened) {
  EXPECT_THAT(*Floats(TorchTensorFile(TorchType::kFloat, {3}, BytesOf<float>({1, -2, 0.5f}))),
              ElementsAre(1, -2, 0.5f));
  EXPECT_THAT(
      *Floats(TorchTensorFile(TorchType::kBFloat16, {2}, BytesOf<uint16_t>({0x3fc0, 0xc000}))),
      ElementsAre(1.5f, -2));
  EXPECT_THAT(*Floats(TorchTensorFile(TorchType::kHalf, {2}, BytesOf<uint16_t>({0x3e00, 0xc000}))),
              ElementsAre(1.5f, -2));
  EXPECT_THAT(*Integers(TorchTensorFile(TorchType::kLong, {2}, BytesOf<int64_t>({-1, 1l << 40}))),
              ElementsAre(-1, 1l << 40));
  EXPECT_THAT(*Integers(TorchTensorFile(TorchType::kInt, {2}, BytesOf<int32_t>({-1, 7}))),
              ElementsAre(-1, 7));
  EXPECT_THAT(*Floats(TorchTensorFile(TorchType::kFloat, {0}, "")), ElementsAre());
}

TEST(TorchFileTest, HalvesAreWidenedExactly) {
  EXPECT_EQ(HalfToFloat(0x0000), 0.0f);
  EXPECT_TRUE(std::signbit(HalfToFloat(0x8000)));
  EXPECT_EQ(HalfToFloat(0x0001), std::ldexp(1.0f, -24));  // The least subnormal.
  EXPECT_EQ(HalfToFloat(0x83ff), -1023 * std::ldexp(1.0f, -24));
  EXPECT_EQ(HalfToFloat(0x0400), std::ldexp(1.0f, -14));  // The least normal.
  EXPECT_EQ(HalfToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(HalfToFloat(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(HalfToFloat(0x7e01)));
}

TEST(TorchFileTest, StridesAndOffsetsAreFollowed) {
  const std::string storage = BytesOf<float>({0, 1, 2, 3, 4, 5, 6});
  const std::string transposed = TorchZip(
      PickleOf(PickledTensor({.elements = 7, .offset = 1, .sizes = {3, 2}, .strides = {1, 3}})),
      {storage});
  EXPECT_THAT(*Floats(transposed), ElementsAre(1, 4, 2, 5, 3, 6));
  const std::string scalar = TorchZip(
      PickleOf(PickledTensor({.elements = 7, .offset = 6, .sizes = {}, .strides = {}})), {storage});
  EXPECT_THAT(*Floats(scalar), ElementsAre(6));
}

TEST(TorchFileTest, OtherTypesAreRefused) {
  EXPECT_THAT(std::string(Floats(TorchTensorFile(TorchType::kDouble, {1}, BytesOf<double>({1})))
                              .status()
                              .message()),
              HasSubstr("Double [1], not of Float"));
  EXPECT_THAT(std::string(Integers(TorchTensorFile(TorchType::kFloat, {1}, BytesOf<float>({1})))
                              .status()
                              .message()),
              HasSubstr("Float [1], not of Long or Int"));
}

TEST(TorchFileTest, AStorageOfAnotherSizeOrNoneIsRefused) {
  const std::string pickle =
      PickleOf(PickledTensor({.elements = 1'000'000'000, .sizes = {4}, .strides = {1}}));
  EXPECT_THAT(std::string(Floats(TorchZip(pickle, {BytesOf<float>({1, 2})})).status().message()),
              HasSubstr("storage '0' has 8 bytes for 1000000000 elements of type Float"));
  EXPECT_THAT(std::string(Floats(TorchZip(pickle, {})).status().message()),
              HasSubstr("no entry 'archive/data/0'"));
}

TEST(TorchFileTest, AFlippedBitOfAStorageIsDataLoss) {
  std::string bytes = TorchTensorFile(TorchType::kFloat, {3}, BytesOf<float>({7, 8, 9}));
  bytes[bytes.find(BytesOf<float>({7, 8, 9}))] ^= 1;
  EXPECT_EQ(Floats(bytes).status().code(), absl::StatusCode::kDataLoss);
}

TEST(TorchFileTest, AStorageIsCheckedOnce) {
  const std::string numbers = BytesOf<float>({7, 8, 9});
  std::string bytes = TorchTensorFile(TorchType::kFloat, {3}, numbers);
  const auto file = TorchFile::Open(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const TorchTensor& tensor = file->pickle().tensor(file->pickle().root());
  EXPECT_THAT(*file->ReadFloats(tensor), ElementsAre(7, 8, 9));
  // Changed under the file, which a second check would find.
  bytes.replace(bytes.find(numbers), numbers.size(), BytesOf<float>({7, 8, 1}));
  const auto again = file->ReadFloats(tensor);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_THAT(*again, ElementsAre(7, 8, 1));
}

TEST(TorchFileTest, AStoragesNameIsEscapedAndCut) {
  const std::string name = "a\n" + std::string(200, 'b');
  ZipWriter zip;
  zip.Add("archive/data.pkl",
          PickleOf(PickledTensor({.storage = name, .elements = 4, .sizes = {4}, .strides = {1}})));
  zip.Add("archive/data/" + name, "few");
  EXPECT_THAT(std::string(Floats(*zip.Finish()).status().message()),
              HasSubstr("storage 'a\\n" + std::string(98, 'b') + "' has 3 bytes"));
}

TEST(TorchFileTest, FilesThatAreNoneArePassedOn) {
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectOpenFails(std::string("\x80\x02\x8a\x0a\x6c\xfc", 6), kInvalid, "before PyTorch 1.6");
  ExpectOpenFails("hello", kInvalid, "not a ZIP file");
  ZipWriter other;
  other.Add("a/b", "x");
  ExpectOpenFails(*other.Finish(), kInvalid, "no FOLDER/data.pkl");
  ZipWriter flat;
  flat.Add("data.pkl", PickleOf("N"));
  ExpectOpenFails(*flat.Finish(), kInvalid, "no FOLDER/data.pkl");
  ZipWriter big_endian;
  big_endian.Add("a/data.pkl", PickleOf("N"));
  big_endian.Add("a/byteorder", "big");
  ExpectOpenFails(*big_endian.Finish(), kInvalid, "byteorder is not little");
  ExpectOpenFails(TorchZip(std::string(TorchFile::kPickleBytesMax + 1, 'N'), {}), kInvalid,
                  "data.pkl has 16777217 bytes");
  ExpectOpenFails(TorchZip("N", {}), kInvalid, "pickle: opcode");
}

TEST(TorchFileWriterTest, WritesThePickleOfPython) {
  // What torch.save gives for {"a": 1, "b": {"c": torch.tensor([1.5])}, 300: {}, -1: "a"}, by the
  // rules of Python's pickler: every text, dict, tuple, global and result goes into the memo.
  TorchFileWriter writer("archive");
  writer.BeginDict(4);
  writer.Text("a");
  writer.Integer(1);
  writer.Text("b");
  writer.BeginDict(1);
  writer.Text("c");
  writer.Tensor(TorchType::kFloat, {1}, BytesOf<float>({1.5f}));
  writer.EndDict(1);
  writer.Integer(300);
  writer.BeginDict(0);
  writer.EndDict(0);
  writer.Integer(-1);
  writer.Text("a");
  writer.EndDict(4);
  const auto bytes = writer.Finish();
  ASSERT_TRUE(bytes.ok());
  const auto zip = ZipReader::Open(*bytes);
  ASSERT_TRUE(zip.ok());
  const char expected[] =
      "\x80\x02}q\x00(X\x01\x00\x00\x00"
      "aq\x01K\x01X\x01\x00\x00\x00"
      "bq\x02}q\x03X\x01\x00\x00"
      "\x00"
      "cq\x04"
      "ctorch._utils\n_rebuild_tensor_v2\nq\x05((X\x07\x00\x00\x00storageq\x06"
      "ctorch\nFloatStorage\nq\x07X\x01\x00\x00\x00"
      "0q\x08X\x03\x00\x00\x00"
      "cpuq\x09K\x01tq\x0a"
      "QK\x00K\x01\x85q\x0bK\x01\x85q\x0c\x89"
      "ccollections\nOrderedDict\nq\x0d)Rq\x0etq\x0f"
      "Rq\x10sM\x2c\x01}q\x11J\xff\xff\xff\xffh\x01u.";
  EXPECT_EQ(*zip->Read("archive/data.pkl"), absl::string_view(expected, sizeof(expected) - 1));
  EXPECT_EQ(*zip->Read("archive/version"), "3\n");
  EXPECT_EQ(*zip->Read("archive/byteorder"), "little");
  EXPECT_EQ(*zip->Read("archive/data/0"), BytesOf<float>({1.5f}));
}

TEST(TorchFileWriterTest, LongMemosAndWideNumbersAreReadBack) {
  TorchFileWriter writer("archive");
  writer.BeginDict(301);
  for (int i = 0; i < 300; ++i) {
    writer.Text(absl::StrCat("key ", i));
    writer.Integer(int64_t{i} << 33);
  }
  writer.Integer(7);
  writer.Text("key 299");
  writer.EndDict(301);
  const auto bytes = writer.Finish();
  const auto file = TorchFile::Open(*bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const Pickle::Node& root = file->pickle().at(file->pickle().root());
  EXPECT_EQ((*file->pickle().Find(root, "key 299"))->number, int64_t{299} << 33);
  EXPECT_EQ(file->pickle().at(root.items.back()).text, "key 299");
}

}  // namespace
}  // namespace okv
