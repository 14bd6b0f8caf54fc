#include "proto/safetensors.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/fields.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::StatusIs;
using Tensors = std::map<std::string, Safetensors::Tensor>;

std::string File(absl::string_view header, absl::string_view data) {
  std::string bytes;
  AppendU64(&bytes, header.size());
  return absl::StrCat(bytes, header, data);
}

absl::Status ParseStatus(absl::string_view bytes) { return Safetensors::Parse(bytes).status(); }

auto Invalid(const std::string& why) { return StatusIs(absl::StatusCode::kInvalidArgument, why); }
auto Lost(const std::string& why) { return StatusIs(absl::StatusCode::kDataLoss, why); }

Tensors Samples() {
  return {{"b.weight", {"BF16", {2, 3}, "0123456789ab"}},
          {"a", {"U8", {3}, "xyz"}},
          {"scalar", {"F64", {}, "12345678"}},
          {"empty", {"F32", {4, 0}, ""}}};
}
const std::map<std::string, std::string> kMetadata = {{"format", "pt"},
                                                      {"quote", "\"\\\n\xc3\xa9"}};

TEST(SafetensorsTest, ParseReadsWhatWriteWrote) {
  const std::string bytes = WriteSafetensors(Samples(), kMetadata);
  const auto file = Safetensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors(), Samples());
  EXPECT_EQ(file->metadata(), kMetadata);
  ASSERT_NE(file->Find("a"), nullptr);
  EXPECT_EQ(*file->Find("a"), Samples()["a"]);
  EXPECT_EQ(file->Find("none"), nullptr);
}

TEST(SafetensorsTest, TensorsAreViewsOfTheBytesGiven) {
  const std::string bytes = WriteSafetensors(Samples(), {});
  const auto file = Safetensors::Parse(bytes);
  ASSERT_TRUE(file.ok());
  const absl::string_view data = file->Find("a")->data;
  EXPECT_GE(data.data(), bytes.data());
  EXPECT_LE(data.data() + data.size(), bytes.data() + bytes.size());
}

TEST(SafetensorsTest, EveryDtypeHasItsSize) {
  const std::map<std::string, uint64_t> sizes = {{"U8", 1},  {"I8", 1},  {"BF16", 2}, {"F16", 2},
                                                 {"F32", 4}, {"U32", 4}, {"I32", 4},  {"F64", 8},
                                                 {"U64", 8}, {"I64", 8}};
  for (const auto& [dtype, size] : sizes) {
    const std::string data(3 * size, 'd');
    const std::string bytes = WriteSafetensors({{"t", {dtype, {3}, data}}}, {});
    EXPECT_TRUE(ParseStatus(bytes).ok()) << dtype;
    const auto wrong = absl::StrCat("{\"t\":{\"dtype\":\"", dtype,
                                    "\",\"shape\":[3],\"data_offsets\":[0,", 3 * size + 1, "]}}");
    EXPECT_THAT(ParseStatus(File(wrong, data + "d")), Invalid("do not fit its data_offsets"));
  }
}

TEST(SafetensorsTest, WriteIsDeterministicSortedAndAligned) {
  const std::string bytes =
      WriteSafetensors({{"b", {"U8", {1}, "B"}}, {"a", {"U8", {2}, "AA"}}}, {{"k", "v"}});
  const std::string header =
      "{\"__metadata__\":{\"k\":\"v\"},"
      "\"a\":{\"data_offsets\":[0,2],\"dtype\":\"U8\",\"shape\":[2]},"
      "\"b\":{\"data_offsets\":[2,3],\"dtype\":\"U8\",\"shape\":[1]}}";
  const size_t padded = (header.size() + 7) / 8 * 8;
  EXPECT_EQ(bytes, File(header + std::string(padded - header.size(), ' '), "AAB"));
  for (size_t name_size = 1; name_size < 10; ++name_size) {
    const std::string file =
        WriteSafetensors({{std::string(name_size, 'n'), {"U8", {1}, "x"}}}, {});
    EXPECT_EQ((file.size() - 1) % 8, 0u);
  }
}

// Tensors in the order of their definition, spaces behind the header: what other writers make.
TEST(SafetensorsTest, ParseReadsFilesOfOtherWriters) {
  const std::string bytes = File(
      "{\"__metadata__\": {\"format\": \"pt\"}, "
      "\"z\": {\"dtype\": \"F32\", \"shape\": [1, 2], \"data_offsets\": [0, 8]}, "
      "\"a\": {\"dtype\": \"I64\", \"shape\": [1], \"data_offsets\": [8, 16]}}     ",
      "zzzzzzzzaaaaaaaa");
  const auto file = Safetensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Find("z")->data, "zzzzzzzz");
  EXPECT_EQ(file->Find("a")->data, "aaaaaaaa");
  EXPECT_EQ(file->metadata().at("format"), "pt");
}

TEST(SafetensorsTest, AFileWithoutTensorsIsOne) {
  const auto file = Safetensors::Parse(File("{}", ""));
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->tensors().empty());
  EXPECT_TRUE(ParseStatus(WriteSafetensors({}, {})).ok());
}

TEST(SafetensorsTest, EveryTruncationIsDataLoss) {
  const std::string bytes = WriteSafetensors(Samples(), kMetadata);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(ParseStatus(absl::string_view(bytes).substr(0, size)), Lost("truncated")) << size;
  }
}

TEST(SafetensorsTest, TrailingBytesAreInvalid) {
  EXPECT_THAT(ParseStatus(WriteSafetensors(Samples(), {}) + "x"),
              Invalid("1 bytes behind the last tensor"));
}

TEST(SafetensorsTest, AHeaderLengthIsBounded) {
  std::string bytes;
  AppendU64(&bytes, 100'000'001);
  EXPECT_THAT(ParseStatus(bytes + "{}"), Invalid("header of 100000001 bytes"));
  bytes.clear();
  AppendU64(&bytes, UINT64_MAX);
  EXPECT_THAT(ParseStatus(bytes + "{}"), Invalid("header of"));
  bytes.clear();
  AppendU64(&bytes, 99'000'000);
  EXPECT_THAT(ParseStatus(bytes + "{}"), Lost("truncated in its header"));
}

TEST(SafetensorsTest, AHeaderThatIsNoJsonObjectIsInvalid) {
  for (const char* header : {"", "[]", "null", "{", " {}", "{}x", "{\"a\":}", "{\"a\xff\":1}"}) {
    EXPECT_THAT(ParseStatus(File(header, "")), Invalid("not a JSON object")) << header;
  }
}

TEST(SafetensorsTest, ADeeplyNestedHeaderIsInvalidAndHarmless) {
  const std::string open = "{\"a\":" + std::string(1'000'000, '[');
  EXPECT_THAT(ParseStatus(File(open, "")), Invalid("not a JSON object"));
  EXPECT_THAT(ParseStatus(File(open + std::string(1'000'000, ']') + "}", "")),
              Invalid("has no proper dtype"));
}

TEST(SafetensorsTest, ANameThatStandsTwiceIsInvalid) {
  const std::string entry = "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
  EXPECT_TRUE(ParseStatus(File("{\"a\":" + entry + "}", "x")).ok());
  EXPECT_THAT(ParseStatus(File("{\"a\":" + entry + ",\"a\":" + entry + "}", "x")),
              Invalid("stands twice"));
  EXPECT_THAT(ParseStatus(File("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", "")),
              Invalid("stands twice"));
  EXPECT_THAT(ParseStatus(File("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],"
                               "\"data_offsets\":[0,1]}}",
                               "x")),
              Invalid("stands twice"));
  // The same name in two objects is none.
  EXPECT_TRUE(ParseStatus(File("{\"dtype\":" + entry + "}", "x")).ok());
}

TEST(SafetensorsTest, AnImproperEntryIsInvalid) {
  for (const char* entry :
       {"1", "{}", "{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[\"0\",1]}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,18446744073709551616]}",
        "{\"dtype\":\"U8\",\"shape\":[1]}", "{\"shape\":[1],\"data_offsets\":[0,1]}"}) {
    EXPECT_THAT(ParseStatus(File(absl::StrCat("{\"t\":", entry, "}"), "x")),
                Invalid("tensor 't' has no proper dtype"))
        << entry;
  }
  EXPECT_THAT(
      ParseStatus(File("{\"t\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,1]}}", "x")),
      Invalid("tensor 't' has the unknown dtype Q4"));
  EXPECT_THAT(ParseStatus(File("{\"__metadata__\":[]}", "")), Invalid("__metadata__"));
  EXPECT_THAT(ParseStatus(File("{\"__metadata__\":{\"a\":1}}", "")), Invalid("__metadata__ 'a'"));
}

std::string TwoTensors(const std::string& first_offsets, const std::string& second_offsets,
                       const std::string& data) {
  return File("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" + first_offsets +
                  "},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":" + second_offsets +
                  "}}",
              data);
}

TEST(SafetensorsTest, HolesOverlapsAndReversedOffsetsAreInvalid) {
  EXPECT_TRUE(ParseStatus(TwoTensors("[0,2]", "[2,4]", "1234")).ok());
  EXPECT_TRUE(ParseStatus(TwoTensors("[2,4]", "[0,2]", "1234")).ok());
  EXPECT_THAT(ParseStatus(TwoTensors("[0,2]", "[3,5]", "12345")), Invalid("'b' overlaps"));
  EXPECT_THAT(ParseStatus(TwoTensors("[0,2]", "[1,3]", "123")), Invalid("'b' overlaps"));
  EXPECT_THAT(ParseStatus(TwoTensors("[0,2]", "[0,2]", "12")), Invalid("overlaps"));
  EXPECT_THAT(ParseStatus(TwoTensors("[1,3]", "[3,5]", "12345")), Invalid("'a' overlaps"));
  EXPECT_THAT(ParseStatus(TwoTensors("[2,0]", "[2,4]", "1234")), Invalid("'a': dtype and shape"));
  EXPECT_THAT(ParseStatus(TwoTensors("[0,2]", "[18446744073709551614,0]", "12")),
              Invalid("'b': dtype and shape"));
}

TEST(SafetensorsTest, AShapeThatOverflowsIsInvalid) {
  // 2^32 * 2^32 * 4 bytes is 0 modulo 2^64.
  for (const char* shape : {"[4294967296,4294967296]", "[4611686018427387904]",
                            "[18446744073709551615,18446744073709551615]"}) {
    EXPECT_THAT(ParseStatus(File(absl::StrCat("{\"t\":{\"dtype\":\"F32\",\"shape\":", shape,
                                              ",\"data_offsets\":[0,0]}}"),
                                 "")),
                Invalid("tensor 't': dtype and shape"))
        << shape;
  }
}

TEST(SafetensorsTest, OffsetsBeyondTheBytesAreDataLoss) {
  EXPECT_THAT(ParseStatus(TwoTensors("[0,2]", "[2,4]", "123")),
              Lost("truncated in tensor 'b': 3 data bytes, 4 needed"));
}

TEST(SafetensorsTest, RandomChangesNeverCrash) {
  std::mt19937_64 random(examples::Seed());
  const std::string bytes = WriteSafetensors(Samples(), kMetadata);
  for (int i = 0; i < 20000; ++i) {
    std::string changed = bytes;
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      static constexpr char kLikely[] = "{}[]\",:0123456789 \\-.e\xff";
      const uint64_t pick = random() % (sizeof(kLikely) + 1);
      changed[random() % changed.size()] =
          pick < sizeof(kLikely) ? kLikely[pick] : static_cast<char>(random());
    }
    const auto file = Safetensors::Parse(changed);
    if (file.ok()) {
      for (const auto& [name, tensor] : file->tensors()) {
        EXPECT_LE(tensor.data.data() + tensor.data.size(), changed.data() + changed.size());
      }
    } else {
      EXPECT_THAT(file.status().code(),
                  testing::AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kDataLoss));
    }
  }
}

TEST(SafetensorsTest, MetadataThatIsNotUtf8IsWrittenWithReplacements) {
  const std::string bytes = WriteSafetensors({}, {{"host",
                                                   "a\xff"
                                                   "b"}});
  const auto file = Safetensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("host"),
            "a\xef\xbf\xbd"
            "b");
}

TEST(SafetensorsDeathTest, WritingWhatDoesNotFitIsABrokenInvariant) {
  EXPECT_DEATH(WriteSafetensors({{"t", {"F32", {2}, "1234567"}}}, {}), "OKV_CHECK failed");
  EXPECT_DEATH(WriteSafetensors({{"t", {"F4", {}, ""}}}, {}), "OKV_CHECK failed");
  EXPECT_DEATH(WriteSafetensors({{"__metadata__", {"U8", {1}, "1"}}}, {}), "OKV_CHECK failed");
  EXPECT_DEATH(WriteSafetensors({{"\xff", {"U8", {1}, "1"}}}, {}), "OKV_CHECK failed");
}

}  // namespace
}  // namespace okv
