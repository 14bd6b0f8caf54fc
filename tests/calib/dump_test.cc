#include "calib/dump.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/thread_pool.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

DumpInfo Info(std::vector<uint32_t> layer_ids) {
  return {.model = "synthetic",
          .weights_revision = "r1",
          .text_source = "random numbers",
          .layer_ids = std::move(layer_ids),
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 64};
}

TEST(DumpTest, WhatIsWrittenIsRead) {
  const TempDirectory directory;
  const SyntheticShape shape = {.sequence_lengths = {100, 1, 60}};
  WriteDump(directory.path(), {3, 7, 11}, shape, 1);
  const auto reader = DumpReader::Open(directory.path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->info(), Info({3, 7, 11}));
  EXPECT_EQ(reader->tokens_count(), 161u);
  EXPECT_THAT(reader->sequence_lengths(), ElementsAre(100, 1, 60));
  for (uint32_t position = 0; position < 3; ++position) {
    const auto layer = reader->ReadLayer(position);
    ASSERT_TRUE(layer.ok()) << layer.status();
    const LayerDump expected = SyntheticLayer(shape, 1 + position);
    EXPECT_EQ(layer->layer_id, 3 + 4 * position);
    EXPECT_EQ(layer->q, expected.q);
    EXPECT_EQ(layer->k, expected.k);
    EXPECT_EQ(layer->v, expected.v);
  }
  EXPECT_THAT(ListDirectory(directory.path()),
              ElementsAre("layer_11.safetensors", "layer_3.safetensors", "layer_7.safetensors"));
}

TEST(DumpTest, Float32TensorsAndWideLengthsAreRead) {
  const TempDirectory directory;
  const LayerDump expected = SyntheticLayer({}, 5);
  WriteFile(directory.Path("layer_0.safetensors"),
            RawSafetensors(LayerMetadata(0, "0"), RawTensors(expected)));
  const auto reader = DumpReader::Open(directory.path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto layer = reader->ReadLayer(0);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->q, expected.q);
  EXPECT_EQ(layer->v, expected.v);
  EXPECT_THAT(layer->sequence_lengths, ElementsAre(100, 60));
}

TEST(DumpTest, ALayerIsReadByThreadsIntoAnothersMemory) {
  const TempDirectory directory;
  const SyntheticShape shape = {.sequence_lengths = {9000}};  // 2.3 M numbers of q: three pieces.
  WriteDump(directory.path(), {0, 1}, shape, 1);
  const auto reader = DumpReader::Open(directory.path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  ThreadPool pool(3);
  LayerDump layer = SyntheticLayer({.sequence_lengths = {9, 2}, .layer_id = 5}, 7);
  for (uint32_t position = 0; position < 2; ++position) {
    const float* const memory = layer.q.data();
    ASSERT_TRUE(reader->ReadLayer(position, &pool, &layer).ok());
    if (position > 0) {
      EXPECT_EQ(layer.q.data(), memory);
    }
    const LayerDump expected = SyntheticLayer(shape, 1 + position);
    EXPECT_EQ(layer.layer_id, position);
    EXPECT_THAT(layer.sequence_lengths, ElementsAre(9000));
    EXPECT_EQ(layer.q, expected.q);
    EXPECT_EQ(layer.k, expected.k);
    EXPECT_EQ(layer.v, expected.v);
  }
}

TEST(DumpTest, OfSeveralBadNumbersTheFirstIsNamed) {
  const TempDirectory directory;
  LayerDump bad = SyntheticLayer({.sequence_lengths = {9000}}, 1);
  const size_t token = size_t{bad.query_heads} * bad.head_dim;
  for (const size_t at : {8999 * token, 5000 * token, 4999 * token}) bad.q[at] = std::nanf("");
  WriteFile(directory.Path("layer_0.safetensors"),
            RawSafetensors(LayerMetadata(0, "0"), RawTensors(bad)));
  const auto reader = DumpReader::Open(directory.path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  ThreadPool pool(3);
  LayerDump layer;
  EXPECT_THAT(std::string(reader->ReadLayer(0, &pool, &layer).message()),
              HasSubstr("q of layer 0, token 4999, head 0"));
}

TEST(DumpWriterTest, AnUnfinishedDumpLeavesNothingBehind) {
  const TempDirectory directory;
  {
    auto writer = DumpWriter::Create(directory.path(), Info({0}));
    ASSERT_TRUE(writer.ok());
    const std::vector<float> q(4 * 64);
    const std::vector<uint16_t> kv(2 * 64);
    ASSERT_TRUE(
        (*writer)
            ->Append({.layer = 0, .tokens_count = 1, .q = q.data(), .k = kv.data(), .v = kv.data()})
            .ok());
    EXPECT_FALSE(ListDirectory(directory.path()).empty());
  }
  EXPECT_TRUE(ListDirectory(directory.path()).empty());
}

TEST(DumpWriterTest, LayersWithDifferentTokensAreRefused) {
  const TempDirectory directory;
  auto writer = DumpWriter::Create(directory.path(), Info({0, 1}));
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ((*writer)->Finish().code(), absl::StatusCode::kFailedPrecondition);  // No tokens.
  const std::vector<float> q(4 * 64);
  const std::vector<uint16_t> kv(2 * 64);
  ASSERT_TRUE(
      (*writer)
          ->Append({.layer = 0, .tokens_count = 1, .q = q.data(), .k = kv.data(), .v = kv.data()})
          .ok());
  const absl::Status status = (*writer)->EndSequence();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1 has 0 tokens"));
}

TEST(DumpWriterTest, AnExistingDumpIsNotOverwritten) {
  const TempDirectory directory;
  WriteDump(directory.path(), {0}, {}, 1);
  EXPECT_EQ(DumpWriter::Create(directory.path(), Info({0})).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(DumpWriterTest, BadInfoAndBadDirectoriesAreRefused) {
  const TempDirectory directory;
  EXPECT_EQ(DumpWriter::Create(directory.path(), Info({2, 1})).status().code(),
            absl::StatusCode::kInvalidArgument);
  WriteFile(directory.Path("file"), "x");
  EXPECT_FALSE(DumpWriter::Create(directory.Path("file/dump"), Info({0})).ok());
}

TEST(DumpReaderTest, MissingDirectoriesAndLayersAreNotFound) {
  const TempDirectory directory;
  EXPECT_EQ(DumpReader::Open(directory.Path("absent")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(DumpReader::Open(directory.path()).status().code(), absl::StatusCode::kNotFound);
  WriteDump(directory.path(), {0, 1, 2}, {}, 1);
  std::filesystem::remove(directory.Path("layer_1.safetensors"));
  const absl::Status status = DumpReader::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1"));
}

TEST(DumpReaderTest, EveryTruncationIsAnError) {
  const TempDirectory directory;
  WriteDump(directory.path(), {0}, {}, 1);
  const std::string path = directory.Path("layer_0.safetensors");
  const std::string whole = ReadFile(path);
  for (const size_t bytes :
       {size_t{0}, size_t{4}, size_t{8}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    WriteFile(path, whole.substr(0, bytes));
    const absl::Status status = DumpReader::Open(directory.path()).status();
    EXPECT_FALSE(status.ok()) << bytes << " of " << whole.size() << " bytes";
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer_0.safetensors"));
  }
  // Data cut off behind a whole header.
  WriteFile(path, whole.substr(0, whole.size() - 1));
  EXPECT_EQ(DumpReader::Open(directory.path()).status().code(), absl::StatusCode::kDataLoss);
}

// Layer 0 and 1 are good but for what `change` does to layer 1.
struct BadLayer {
  std::map<std::string, std::string> metadata = LayerMetadata(1, "0,1");
  LayerDump layer = SyntheticLayer({}, 2);
  std::vector<RawTensor> tensors = RawTensors(layer);
};

struct BadCase {
  const char* name;
  std::function<void(BadLayer*)> change;
  absl::StatusCode code;
  const char* message;
};

class DumpReaderBadLayerTest : public testing::TestWithParam<BadCase> {};

TEST_P(DumpReaderBadLayerTest, IsRefusedByName) {
  const TempDirectory directory;
  WriteFile(directory.Path("layer_0.safetensors"),
            RawSafetensors(LayerMetadata(0, "0,1"), RawTensors(SyntheticLayer({}, 1))));
  BadLayer bad;
  GetParam().change(&bad);
  WriteFile(directory.Path("layer_1.safetensors"), RawSafetensors(bad.metadata, bad.tensors));
  const absl::Status status = DumpReader::Open(directory.path()).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer_1.safetensors"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kDiffers = absl::StatusCode::kFailedPrecondition;

// What a layer of another shape would hold.
void Reshape(const SyntheticShape& shape, BadLayer* bad) {
  bad->tensors = RawTensors(SyntheticLayer(shape, 2));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DumpReaderBadLayerTest,
    testing::Values(
        BadCase{"NoV", [](BadLayer* bad) { bad->tensors.erase(bad->tensors.begin() + 2); },
                kInvalid, "tensor v is missing"},
        BadCase{"NoLengths", [](BadLayer* bad) { bad->tensors.pop_back(); }, kInvalid,
                "seq_lens is missing"},
        BadCase{"Float16",
                [](BadLayer* bad) {
                  bad->tensors[1].dtype = "F16";
                  bad->tensors[1].bytes.resize(bad->tensors[1].bytes.size() / 2);
                },
                kInvalid, "tensor k has dtype F16"},
        BadCase{"FlatQ",
                [](BadLayer* bad) {
                  bad->tensors[0].shape = {160, 256};
                },
                kInvalid, "tensor q has shape [160, 256]"},
        BadCase{"OtherTokensInV",
                [](BadLayer* bad) {
                  bad->tensors[2].shape[0] = 159;
                  bad->tensors[2].bytes.resize(159 * 2 * 64 * 4);
                },
                kInvalid, "shapes do not fit together"},
        BadCase{"HeadsThatDoNotDivide",
                [](BadLayer* bad) { Reshape({.query_heads = 3, .kv_heads = 2}, bad); }, kInvalid,
                "3 query heads do not divide over 2 KV heads"},
        BadCase{"HeadDim96", [](BadLayer* bad) { Reshape({.head_dim = 96}, bad); }, kInvalid,
                "head_dim is 96"},
        BadCase{"NoTokens", [](BadLayer* bad) { Reshape({.sequence_lengths = {}}, bad); }, kInvalid,
                "no tokens"},
        BadCase{"LengthsThatDoNotSum", [](BadLayer* bad) { bad->tensors[3].bytes[8] = 59; },
                kInvalid, "seq_lens sum to 159"},
        BadCase{"NegativeLength",
                [](BadLayer* bad) { bad->tensors[3].bytes.replace(8, 8, 8, '\xff'); }, kInvalid,
                "seq_lens[1] is -1"},
        BadCase{"LengthsAsFloats",
                [](BadLayer* bad) {
                  bad->tensors[3].dtype = "F32";
                  bad->tensors[3].bytes.resize(8);
                },
                kInvalid, "seq_lens has dtype F32"},
        BadCase{"NoModel", [](BadLayer* bad) { bad->metadata.erase("model"); }, kInvalid,
                "no model"},
        BadCase{"OtherLayer", [](BadLayer* bad) { bad->metadata["layer"] = "5"; }, kInvalid,
                "says layer 5"},
        BadCase{"LayerIsNoNumber", [](BadLayer* bad) { bad->metadata["layer"] = "one"; }, kInvalid,
                "'one' is not a layer id"},
        BadCase{"OtherModel", [](BadLayer* bad) { bad->metadata["model"] = "else"; }, kDiffers,
                "model else"},
        BadCase{"OtherRevision", [](BadLayer* bad) { bad->metadata["weights_revision"] = "r2"; },
                kDiffers, "weights_revision r2"},
        BadCase{"OtherTokens", [](BadLayer* bad) { Reshape({.sequence_lengths = {100}}, bad); },
                kDiffers, "tokens 100, not 160"},
        BadCase{"OtherSequences",
                [](BadLayer* bad) {
                  Reshape({.sequence_lengths = {60, 100}}, bad);
                },
                kDiffers, "other sequence lengths"},
        BadCase{"OtherHeads", [](BadLayer* bad) { Reshape({.query_heads = 8}, bad); }, kDiffers,
                "query heads 8, not 4"},
        BadCase{"OtherHeadDim", [](BadLayer* bad) { Reshape({.head_dim = 128}, bad); }, kDiffers,
                "head_dim 128, not 64"},
        BadCase{"OtherLayerIds", [](BadLayer* bad) { bad->metadata["layer_ids"] = "0,1,2"; },
                kDiffers, "other layer_ids"}),
    [](const testing::TestParamInfo<BadCase>& info) { return info.param.name; });

TEST(DumpReaderTest, NanAndInfNameLayerTokenAndHead) {
  struct Case {
    size_t tensor;
    uint32_t token;
    uint32_t head;
    float value;
    const char* message;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Case& one : {Case{0, 159, 3, nan, "q of layer 9, token 159, head 3"},
                          Case{1, 17, 1, -infinity, "k of layer 9, token 17, head 1"},
                          Case{2, 0, 0, infinity, "v of layer 9, token 0, head 0"}}) {
    const TempDirectory directory;
    LayerDump layer = SyntheticLayer({.layer_id = 9}, 1);
    std::vector<float>* tensors[] = {&layer.q, &layer.k, &layer.v};
    const uint32_t heads = one.tensor == 0 ? layer.query_heads : layer.kv_heads;
    (*tensors[one.tensor])[(one.token * heads + one.head) * layer.head_dim + 5] = one.value;
    WriteFile(directory.Path("layer_9.safetensors"),
              RawSafetensors(LayerMetadata(9, "9"), RawTensors(layer)));
    const auto reader = DumpReader::Open(directory.path());
    ASSERT_TRUE(reader.ok()) << reader.status();
    const absl::Status status = reader->ReadLayer(0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.message));
  }
}

}  // namespace
}  // namespace okv
