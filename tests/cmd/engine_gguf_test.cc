#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "cmd/engine/gguf.h"
#include "cmd/engine/weights.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::BytesOf;
using testing_support::GgufWriter;
using testing_support::MakeTinyModel;
using testing_support::TinyModel;
using testing_support::WriteTempFile;

absl::Status OpenBytes(const std::string& bytes) {
  return GgufFile::Open(WriteTempFile("gguf_test.gguf", bytes)).status();
}

void ExpectError(const std::string& bytes, absl::StatusCode code, const std::string& what) {
  const absl::Status status = OpenBytes(bytes);
  EXPECT_EQ(status.code(), code) << status;
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr(what));
  EXPECT_THAT(message, HasSubstr("gguf_test.gguf"));
}

TEST(GgufFileTest, ReadsBackMetadataOfEveryType) {
  GgufWriter writer;
  writer.Raw("u8", GgufType::kUint8, BytesOf(uint8_t{200}))
      .Raw("i8", GgufType::kInt8, BytesOf(int8_t{-3}))
      .Raw("u16", GgufType::kUint16, BytesOf(uint16_t{60000}))
      .Raw("i16", GgufType::kInt16, BytesOf(int16_t{300}))
      .Uint32("u32", 4000000000u)
      .Raw("i32", GgufType::kInt32, BytesOf(int32_t{7}))
      .Raw("u64", GgufType::kUint64, BytesOf(uint64_t{1} << 60))
      .Raw("i64", GgufType::kInt64, BytesOf(int64_t{5}))
      .Float32("f32", 0.25f)
      .Raw("f64", GgufType::kFloat64, BytesOf(0.1))
      .Bool("yes", true)
      .String("text", "words")
      .Strings("texts", {"a", "", "bc"})
      .Int32s("ints", {1, -2, 3})
      // [[1, 2], []]: checked, and of no use to anyone.
      .Raw("nested", GgufType::kArray,
           BytesOf(uint32_t{9}) + BytesOf(uint64_t{2}) + BytesOf(uint32_t{0}) +
               BytesOf(uint64_t{2}) + "\x01\x02" + BytesOf(uint32_t{0}) + BytesOf(uint64_t{0}));
  const auto file = GgufFile::Open(WriteTempFile("types.gguf", writer.Finish()));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->Uint("u8").value(), 200u);
  EXPECT_EQ((*file)->Uint("u16").value(), 60000u);
  EXPECT_EQ((*file)->Uint("i16").value(), 300u);
  EXPECT_EQ((*file)->Uint("u32").value(), 4000000000u);
  EXPECT_EQ((*file)->Uint("i32").value(), 7u);
  EXPECT_EQ((*file)->Uint("u64").value(), uint64_t{1} << 60);
  EXPECT_EQ((*file)->Uint("i64").value(), 5u);
  EXPECT_EQ((*file)->Float("f32").value(), 0.25);
  EXPECT_EQ((*file)->Float("f64").value(), 0.1);
  EXPECT_TRUE((*file)->Bool("yes").value());
  EXPECT_EQ((*file)->String("text").value(), "words");
  EXPECT_EQ(**(*file)->Strings("texts"), (std::vector<absl::string_view>{"a", "", "bc"}));
  EXPECT_EQ((*file)->Ints("ints").value(), (std::vector<int32_t>{1, -2, 3}));
  EXPECT_TRUE((*file)->Has("nested"));

  EXPECT_EQ((*file)->Uint("i8").status().code(), absl::StatusCode::kInvalidArgument);  // Negative.
  EXPECT_EQ((*file)->Uint("text").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Strings("ints").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Float("missing").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Tensor("missing").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(GgufFileTest, EveryPrefixOfAFileIsDataLoss) {
  GgufWriter writer;
  writer.Uint32("number", 1).Strings("texts", {"a", "bc"}).Int32s("ints", {1, 2, 3});
  writer.Tensor("first", {3, 2}, 0, std::string(24, 'x'));
  writer.Tensor("second", {32}, 3, std::string(20, 'y'));
  std::string bytes = writer.Finish();
  while (bytes.back() == '\0') bytes.pop_back();  // Padding behind the last tensor is no loss.
  ASSERT_TRUE(OpenBytes(bytes).ok()) << OpenBytes(bytes);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const absl::Status status = OpenBytes(bytes.substr(0, size));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << size << ": " << status;
  }
}

TEST(GgufFileTest, TruncatedModelNamesTheTensorThatIsCut) {
  const TinyModel model = MakeTinyModel({});
  ExpectError(model.bytes.substr(0, model.bytes.size() - 200), absl::StatusCode::kDataLoss,
              "output_norm.weight");
}

TEST(GgufFileTest, NamesWhatIsWrongWithAForeignFile) {
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectError("PK\x03\x04 this is a zip file", kInvalid, "not a GGUF file");
  ExpectError(GgufWriter("GGML").Finish(), kInvalid, "not a GGUF file");
  ExpectError(GgufWriter("GGUF", 2).Finish(), kInvalid, "version 2");
  ExpectError(GgufWriter().Uint32("k", 1).Uint32("k", 2).Finish(), kInvalid, "'k' is there twice");
  ExpectError(GgufWriter().Raw("k", static_cast<GgufType>(13), "").Finish(), kInvalid,
              "unknown type 13");
  ExpectError(GgufWriter().Uint32("general.alignment", 24).Finish(), kInvalid,
              "general.alignment is 24");
  ExpectError(GgufWriter().Tensor("t", {32}, 2, std::string(18, 'x')).Finish(), kInvalid,
              "'t' has type 2");
  ExpectError(GgufWriter().Tensor("t", {33}, 3, std::string(40, 'x')).Finish(), kInvalid,
              "rows of 33");
  ExpectError(GgufWriter().Tensor("t", {0}, 0, "").Finish(), kInvalid, "impossible size 0");
  ExpectError(GgufWriter().Tensor("t", {1, 1, 1, 1, 1}, 0, "xxxx").Finish(), kInvalid,
              "5 dimensions");
  ExpectError(GgufWriter().Tensor("t", {1}, 0, "xxxx").Tensor("t", {1}, 0, "xxxx").Finish(),
              kInvalid, "'t' is there twice");
  EXPECT_EQ(GgufFile::Open("/nonexistent/model.gguf").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open("/proc").status().code(), kInvalid);
}

TEST(GgufFileTest, HugeCountsAreRefusedBeforeAnythingIsRead) {
  const std::string huge = BytesOf(~uint64_t{0});
  const auto array_of = [&](uint32_t type) { return BytesOf(type) + huge; };
  for (const uint32_t type : {0u, 6u, 8u, 9u, 10u}) {
    ExpectError(GgufWriter().Raw("k", GgufType::kArray, array_of(type)).Finish(),
                absl::StatusCode::kDataLoss, "'k'");
  }
  ExpectError(GgufWriter().Raw("k", GgufType::kString, huge).Finish(), absl::StatusCode::kDataLoss,
              "'k'");
  ExpectError(GgufWriter().Tensor("t", {uint64_t{1} << 40, uint64_t{1} << 40}, 0, "").Finish(),
              absl::StatusCode::kInvalidArgument, "impossible size");
  ExpectError(GgufWriter().Tensor("t", {1 << 24, 1}, 0, "").Finish(), absl::StatusCode::kDataLoss,
              "'t'");
  std::string nested = BytesOf(uint32_t{0}) + BytesOf(uint64_t{0});
  for (int depth = 0; depth < 6; ++depth) {
    nested = BytesOf(uint32_t{9}) + BytesOf(uint64_t{1}) + nested;
  }
  ExpectError(GgufWriter().Raw("k", GgufType::kArray, nested).Finish(),
              absl::StatusCode::kInvalidArgument, "nests arrays");
}

TEST(GgufFileTest, RandomDamageGivesAStatusAndNeverACrash) {
  const TinyModel model = MakeTinyModel({});
  const size_t header = model.bytes.find("output_norm.weight") + 64;
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  ThreadPool pool(1);
  for (int round = 0; round < 300; ++round) {
    std::string bytes = model.bytes;
    for (int i = 0; i < 4; ++i) bytes[random() % header] = static_cast<char>(random());
    const auto loaded = Model::Load(WriteTempFile("damaged.gguf", bytes), &pool);
    if (!loaded.ok()) {
      EXPECT_FALSE(loaded.status().message().empty());
    }
  }
}

TEST(DequantizeRowTest, GivesTheValuesOfEveryType) {
  const TinyModel model = MakeTinyModel({.seed = 3});
  const auto file = GgufFile::Open(WriteTempFile("dequantize.gguf", model.bytes));
  ASSERT_TRUE(file.ok()) << file.status();
  for (const GgufTensor& tensor : (*file)->tensors()) {
    const std::vector<float>& expected = model.tensors.at(tensor.name);
    std::vector<float> row(tensor.columns);
    for (uint64_t i = 0; i < tensor.rows; ++i) {
      DequantizeRow(tensor, i, absl::MakeSpan(row));
      for (uint64_t j = 0; j < tensor.columns; ++j) {
        ASSERT_EQ(row[j], expected[i * tensor.columns + j]) << tensor.name << " " << i << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace okv
