#include "calib/published.h"

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

constexpr PublishedVersion kV1 = PublishedVersion::kLayer;
constexpr PublishedVersion kV2 = PublishedVersion::kKvHead;

// An entry of "layers": its key, its fields, and the storages that its tensors name.
using Fields = std::vector<std::pair<std::string, std::string>>;

std::string Rotation(int32_t dim, const std::string& storage = "0") {
  return PickledTensor(
      {.storage = storage, .elements = dim * dim, .sizes = {dim, dim}, .strides = {dim, 1}});
}

std::string FileOf(const Fields& layers, const std::vector<std::string>& storages) {
  return TorchZip(PickleOf(PickledDict({{PickledText("layers"), PickledDict(layers)}})), storages);
}

std::string OneLayer(const Fields& fields, const std::vector<std::string>& storages) {
  return FileOf({{PickledInteger(5), PickledDict(fields)}}, storages);
}

void ExpectFails(const std::string& bytes, const std::string& message) {
  const absl::Status status = ParsePublished(bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

TEST(PublishedTest, Version1IsReadAsItWasWritten) {
  const PublishedRotations expected = RandomPublished({.layer_ids = {3, 7, 300}}, 1);
  const auto bytes = WritePublished(expected, kV1, 2, "k_rotation");
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto read = ParsePublished(*bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, expected);
}

TEST(PublishedTest, Version2IsReadAsItWasWritten) {
  for (const uint32_t heads : {1u, 2u}) {
    const PublishedRotations expected = RandomPublished({.heads = heads, .per_head = true}, 1);
    const auto bytes = WritePublished(expected, kV2, heads, "k_rotation");
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    const auto read = ParsePublished(*bytes);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, expected);
  }
}

TEST(PublishedTest, ARotationALayerIsRepeatedForEachHeadOfVersion2) {
  const PublishedRotations one = RandomPublished({}, 1);
  const auto read = ParsePublished(*WritePublished(one, kV2, 3, "k"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->heads, 3u);
  EXPECT_TRUE(read->eigenvalues.empty());
  for (uint32_t head = 0; head < 3; ++head) {
    EXPECT_TRUE(
        std::equal(one.Rotation(1, 0), one.Rotation(1, 0) + 64 * 64, read->Rotation(1, head)));
  }
}

TEST(PublishedTest, ARotationAHeadIsNotWrittenAsVersion1) {
  const PublishedRotations rotations = RandomPublished({.heads = 2, .per_head = true}, 1);
  EXPECT_EQ(WritePublished(rotations, kV1, 2, "k").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(PublishedTest, VersionsHaveNames) {
  EXPECT_EQ(*ParsePublishedVersion("v1"), kV1);
  EXPECT_EQ(*ParsePublishedVersion("v2"), kV2);
  EXPECT_THAT(std::string(ParsePublishedVersion("v3").status().message()), HasSubstr("'v3'"));
}

TEST(PublishedTest, TextKeysGapsSharedStoragesAndMissingFieldsAreRead) {
  const std::vector<float> numbers = RandomRotation(64, 1);
  // Two layers with one storage, keys as texts, no layer_id, no objective, the order reversed.
  const std::string bytes =
      FileOf({{PickledText("12"), PickledDict({{PickledText("rotation"), Rotation(64)}})},
              {PickledText("3"), PickledDict({{PickledText("rotation"), Rotation(64)}})}},
             {BytesOf(numbers)});
  const auto read = ParsePublished(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT(read->layer_ids, ElementsAre(3, 12));
  EXPECT_EQ(read->objective, "");
  EXPECT_TRUE(read->eigenvalues.empty());
  std::vector<float> twice = numbers;
  twice.insert(twice.end(), numbers.begin(), numbers.end());
  EXPECT_EQ(read->rotations, twice);
}

TEST(PublishedTest, BadLayersAreNamed) {
  const std::string good = BytesOf(RandomRotation(64, 1));
  const std::string rotation = PickledText("rotation");
  const auto layer = [&](const std::string& key) {
    return std::pair(key, PickledDict({{rotation, Rotation(64)}}));
  };
  ExpectFails(FileOf({layer(PickledInteger(3)), layer(PickledText("3"))}, {good}),
              "layer 3: it stands twice");
  ExpectFails(FileOf({layer(PickledInteger(-3))}, {good}), "no layer id: -3");
  ExpectFails(FileOf({layer(PickledText("norm"))}, {good}), "no layer id: 'norm'");
  ExpectFails(FileOf({layer(PickledText("a\n" + std::string(1'000, 'b')))}, {good}),
              "no layer id: 'a\\n" + std::string(98, 'b') + "'");
  ExpectFails(FileOf({}, {}), "'layers' has 0 entries");
  ExpectFails(FileOf({{PickledInteger(5), "N"}}, {}), "layer 5: a None stands where a dict");
  ExpectFails(TorchZip(PickleOf("]"), {}), "a list stands where a dict");
  ExpectFails(TorchZip(PickleOf("}"), {}), "'layers' is missing");
  ExpectFails(OneLayer({}, {}), "layer 5: 'rotation' is missing");
  ExpectFails(OneLayer({{rotation, "N"}}, {}), "layer 5: 'rotation' is a None, not a tensor");
  ExpectFails(OneLayer({{rotation, Rotation(64)}, {rotation, Rotation(64)}}, {good}),
              "layer 5: the key 'rotation' stands twice");
  ExpectFails(
      OneLayer({{PickledText("layer_id"), PickledInteger(4)}, {rotation, Rotation(64)}}, {good}),
      "layer 5: its layer_id is 4");
  ExpectFails(
      OneLayer({{PickledText("layer_id"), PickledText("5")}, {rotation, Rotation(64)}}, {good}),
      "layer 5: its layer_id is a text, not an integer");
  ExpectFails(
      TorchZip(
          PickleOf(PickledDict({{PickledText("objective"), PickledText(std::string(5'000, 'q'))},
                                {PickledText("layers"), PickledDict({layer(PickledInteger(1))})}})),
          {good}),
      "'objective' is longer");
}

TEST(PublishedTest, BadHeadersAreNamed) {
  const std::string layers =
      PickledDict({{PickledInteger(5), PickledDict({{PickledText("rotation"), Rotation(64)}})}});
  const auto file = [&](const std::string& name, const std::string& value) {
    return TorchZip(
        PickleOf(PickledDict({{PickledText(name), value}, {PickledText("layers"), layers}})),
        {BytesOf(RandomRotation(64, 1))});
  };
  EXPECT_TRUE(ParsePublished(file("format_version", PickledInteger(1))).ok());
  EXPECT_TRUE(ParsePublished(file("format_version", PickledInteger(2))).ok());
  ExpectFails(file("format_version", PickledInteger(3)), "'format_version' is 3, not 1 or 2");
  ExpectFails(file("format_version", "\x88"), "'format_version' is a bool, not 1 or 2");
  ExpectFails(file("format_version", PickledText("1")), "'format_version' is a text, not 1 or 2");
  ExpectFails(file("objective", PickledInteger(1)), "'objective' is a integer, not a text");
  ExpectFails(file("objective", "N"), "'objective' is a None, not a text");
}

TEST(PublishedTest, BadShapesAreNamed) {
  const std::string rotation = PickledText("rotation");
  const auto tensor = [&](const RawTorchTensor& raw, size_t bytes) {
    return OneLayer({{rotation, PickledTensor(raw)}}, {std::string(bytes, '\0')});
  };
  ExpectFails(
      tensor({.type = "DoubleStorage", .elements = 64 * 64, .sizes = {64, 64}, .strides = {64, 1}},
             64 * 64 * 8),
      "layer 5: rotation is Double [64, 64], not of Float");
  ExpectFails(tensor({.elements = 64 * 32, .sizes = {64, 32}, .strides = {32, 1}}, 64 * 32 * 4),
              "rotation is Float [64, 32], not [d, d]");
  ExpectFails(tensor({.elements = 64, .sizes = {64}, .strides = {1}}, 256), "not [d, d]");
  ExpectFails(tensor({.elements = 48 * 48, .sizes = {48, 48}, .strides = {48, 1}}, 48 * 48 * 4),
              "not of dimension 64, 128 or 256");
  ExpectFails(tensor({.elements = 0, .sizes = {0, 64, 64}, .strides = {4096, 64, 1}}, 0),
              "not of 1 to 256 KV heads");
  ExpectFails(tensor({.elements = 64 * 64, .sizes = {64, 64}, .strides = {64, 1}}, 12),
              "layer 5: not a PyTorch file: storage '0' has 12 bytes");

  const auto two = [&](const RawTorchTensor& second, size_t bytes) {
    return FileOf({{PickledInteger(5), PickledDict({{rotation, Rotation(64)}})},
                   {PickledInteger(6), PickledDict({{rotation, PickledTensor(second)}})}},
                  {BytesOf(RandomRotation(64, 1)), std::string(bytes, '\0')});
  };
  ExpectFails(two({.storage = "1", .elements = 128 * 128, .sizes = {128, 128}, .strides = {128, 1}},
                  128 * 128 * 4),
              "layer 6: rotation is Float [128, 128], not of the shape of layer 5");
  ExpectFails(
      two({.storage = "1", .elements = 64 * 64, .sizes = {1, 64, 64}, .strides = {4096, 64, 1}},
          64 * 64 * 4),
      "layer 6: rotation is Float [1, 64, 64], not of the shape of layer 5");
}

TEST(PublishedTest, WhatIsNoRotationIsNamed) {
  const auto file = [](const std::vector<float>& numbers) {
    return OneLayer({{PickledText("rotation"), Rotation(64)}}, {BytesOf(numbers)});
  };
  std::vector<float> numbers = RandomRotation(64, 1);
  EXPECT_TRUE(ParsePublished(file(numbers)).ok());
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> changed = numbers;
    changed[64 * 10 + 9] = bad;
    ExpectFails(file(changed), "layer 5: rotation of head 0 has NaN or Inf in row 10, column 9");
  }
  std::vector<float> scaled = numbers;
  for (size_t i = 0; i < 64; ++i) scaled[64 * 7 + i] *= 1.001f;
  ExpectFails(file(scaled), "layer 5: rotation of head 0 is not orthogonal: rows 7 and 7");
  std::vector<float> huge = numbers;
  huge[0] = 3e38f;
  ExpectFails(file(huge), "is not orthogonal");
}

TEST(PublishedTest, BadEigenvaluesAreNamed) {
  const std::string good = BytesOf(RandomRotation(64, 1));
  const auto file = [&](const RawTorchTensor& eigenvalues, const std::string& bytes) {
    return OneLayer({{PickledText("rotation"), Rotation(64)},
                     {PickledText("eigenvalues"), PickledTensor(eigenvalues)}},
                    {good, bytes});
  };
  ExpectFails(
      file({.storage = "1", .elements = 32, .sizes = {32}, .strides = {1}}, std::string(128, '\0')),
      "layer 5: eigenvalues are Float [32], not Float, one a channel");
  std::vector<float> values(64, 1.0f);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  ExpectFails(
      file({.storage = "1", .elements = 64, .sizes = {64}, .strides = {1}}, BytesOf(values)),
      "layer 5: NaN or Inf in its eigenvalues");
  const RawTorchTensor whole = {.storage = "1", .elements = 64, .sizes = {64}, .strides = {1}};
  std::fill(values.begin(), values.end(), 1.0f);
  values[9] = 0.5f;
  ExpectFails(file(whole, BytesOf(values)),
              "layer 5: its eigenvalues do not ascend: 0.5 in place 9 after 1");
  values[9] = 1;
  values[0] = -1e-5f;
  ExpectFails(file(whole, BytesOf(values)), "layer 5: its eigenvalue -1e-05 is negative");
  values[0] = -1e-7f;  // What rounding leaves of 0.
  EXPECT_TRUE(ParsePublished(file(whole, BytesOf(values))).ok());
  std::fill(values.begin(), values.end(), -1.0f);
  ExpectFails(file(whole, BytesOf(values)), "layer 5: its eigenvalue -1 is negative");
  ExpectFails(OneLayer({{PickledText("rotation"), Rotation(64)}, {PickledText("eigenvalues"), "N"}},
                       {good}),
              "layer 5: 'eigenvalues' is a None, not a tensor");
  const std::string with =
      PickledTensor({.storage = "1", .elements = 64, .sizes = {64}, .strides = {1}});
  const std::string plain = PickledDict({{PickledText("rotation"), Rotation(64)}});
  const std::string known =
      PickledDict({{PickledText("rotation"), Rotation(64)}, {PickledText("eigenvalues"), with}});
  const std::vector<std::string> storages = {good, std::string(256, '\0')};
  ExpectFails(FileOf({{PickledInteger(1), plain}, {PickledInteger(2), known}}, storages),
              "layer 2: it has eigenvalues, layers before it have none");
  ExpectFails(FileOf({{PickledInteger(1), known}, {PickledInteger(2), plain}}, storages),
              "layer 2: it has no eigenvalues");
}

TEST(PublishedTest, LayersThatShareAStorageCannotFillTheMemory) {
  const std::string big = PickledTensor(
      {.elements = 256 * 256 * 256, .sizes = {256, 256, 256}, .strides = {256 * 256, 256, 1}});
  Fields layers;
  for (int32_t layer = 0; layer < 5; ++layer) {
    layers.push_back({PickledInteger(layer), PickledDict({{PickledText("rotation"), big}})});
  }
  ExpectFails(FileOf(layers, {}), "layer 0: rotation is Float [256, 256, 256], not small enough");
  layers.pop_back();  // As many as the limit: what is missing now is the storage.
  ExpectFails(FileOf(layers, {}), "layer 0: zip: there is no entry 'archive/data/0'");

  // 4 MiB that 512 layers would make 2 GiB of.
  const std::string small = PickledTensor(
      {.elements = 16 * 256 * 256, .sizes = {16, 256, 256}, .strides = {256 * 256, 256, 1}});
  layers.clear();
  for (int32_t layer = 0; layer < 512; ++layer) {
    layers.push_back({PickledInteger(layer), PickledDict({{PickledText("rotation"), small}})});
  }
  ExpectFails(FileOf(layers, {std::string(4 << 20, '\0')}),
              "layer 0: rotation is Float [16, 256, 256], not small enough for 512 layers");
}

TEST(PublishedTest, AFileOf4GibIsNotWritten) {
  const PublishedRotations one = RandomPublished({}, 1);
  for (const uint32_t heads : {131'073u, UINT32_MAX}) {
    const absl::Status status = WritePublished(one, kV2, heads, "k").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("2 layers of ", heads, " heads of 64 x 64")));
  }
}

}  // namespace
}  // namespace okv
