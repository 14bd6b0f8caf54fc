// The layouts of a dump that are read and not written: PyTorch's and numpy's.

#include <filesystem>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "calib/dump.h"
#include "calib/dump_layer.h"
#include "calib/fit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"
#include "tests/calib/torch_data.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const DumpNames kNames = {.model = "synthetic", .weights_revision = "r1"};
constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

std::string Bf16Bytes(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), FloatToBf16);
  return BytesOf(bits);
}

void WriteInto(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  WriteFile(path, bytes);
}

// Rows of tokens [first, first + count), each `row` numbers.
std::vector<float> Slice(const std::vector<float>& rows, size_t row, uint32_t first,
                         uint32_t count) {
  const auto begin = rows.begin() + static_cast<ptrdiff_t>(row * first);
  return std::vector<float>(begin, begin + static_cast<ptrdiff_t>(row * count));
}

// A layer as the published engine dumps it: each batch holds whole sequences.
void WriteTorchLayer(const std::string& directory, const LayerDump& layer,
                     const std::vector<std::vector<int32_t>>& batches, uint32_t first_number = 0) {
  uint32_t token = 0;
  for (uint32_t i = 0; i < batches.size(); ++i) {
    const uint32_t count =
        static_cast<uint32_t>(std::accumulate(batches[i].begin(), batches[i].end(), 0));
    const auto path = [&](const char* name) {
      return absl::StrCat(directory, "/layer_", layer.layer_id, "/", name, "/", first_number + i,
                          ".pt");
    };
    const auto write = [&](const char* name, const std::vector<float>& rows, uint32_t heads) {
      WriteInto(
          path(name),
          TorchTensorFile(TorchType::kBFloat16, {count, heads, layer.head_dim},
                          Bf16Bytes(Slice(rows, size_t{heads} * layer.head_dim, token, count))));
    };
    write("q", layer.q, layer.query_heads);
    write("k", layer.k, layer.kv_heads);
    write("v", layer.v, layer.kv_heads);
    WriteInto(path("seq_lens"),
              TorchTensorFile(TorchType::kInt, {batches[i].size()}, BytesOf(batches[i])));
    token += count;
  }
}

void WriteNumpyLayer(const std::string& directory, const LayerDump& layer) {
  const auto write = [&](const char* name, const std::vector<float>& rows, uint32_t heads) {
    WriteInto(absl::StrCat(directory, "/layer_", layer.layer_id, "_", name, ".npy"),
              NpyFile(absl::StrCat("{'descr': '<f4', 'fortran_order': False, 'shape': (",
                                   layer.tokens_count, ", ", heads, ", ", layer.head_dim, "), }"),
                      BytesOf(rows)));
  };
  write("q", layer.q, layer.query_heads);
  write("k", layer.k, layer.kv_heads);
  write("v", layer.v, layer.kv_heads);
  const std::vector<int64_t> lengths(layer.sequence_lengths.begin(), layer.sequence_lengths.end());
  WriteInto(directory + "/seq_lens.npy",
            NpyFile(absl::StrCat("{'descr': '<i8', 'fortran_order': False, 'shape': (",
                                 lengths.size(), ",), }"),
                    BytesOf(lengths)));
}

void ExpectFails(const std::string& directory, absl::StatusCode code, const std::string& message) {
  const absl::Status status = DumpReader::Open(directory, kNames).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(message));
}

void ExpectLayer(const DumpReader& dump, uint32_t position, const LayerDump& expected) {
  const auto layer = dump.ReadLayer(position);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->layer_id, expected.layer_id);
  EXPECT_EQ(layer->sequence_lengths, expected.sequence_lengths);
  EXPECT_EQ(layer->q, expected.q);
  EXPECT_EQ(layer->k, expected.k);
  EXPECT_EQ(layer->v, expected.v);
}

// Two layers in two batches, sequences of 6, 40, 60 and 50 tokens.
class TorchDumpTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const LayerDump& layer : layers_) {
      WriteTorchLayer(directory_.path(), layer, {{6, 40}, {60, 50}});
    }
  }
  std::string Path(const std::string& name) const { return directory_.Path(name); }
  // Puts a tensor in the place of layer 7's.
  void Replace(const std::string& name, TorchType type, const std::vector<uint64_t>& sizes,
               const std::string& data) {
    WriteFile(Path("layer_7/" + name), TorchTensorFile(type, sizes, data));
  }
  void ExpectOpenFails(absl::StatusCode code, const std::string& message) const {
    ExpectFails(directory_.path(), code, message);
  }

  const TempDirectory directory_;
  const std::vector<LayerDump> layers_ = {
      SyntheticLayer({.sequence_lengths = {6, 40, 60, 50}, .layer_id = 3}, 1),
      SyntheticLayer({.sequence_lengths = {6, 40, 60, 50}, .layer_id = 7}, 2)};
};

TEST_F(TorchDumpTest, FilesAreJoinedAndSequencesKept) {
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_EQ(dump->info().model, "synthetic");
  EXPECT_EQ(dump->info().weights_revision, "r1");
  EXPECT_THAT(dump->info().layer_ids, ElementsAre(3, 7));
  EXPECT_EQ(dump->info().query_heads, 4u);
  EXPECT_EQ(dump->info().kv_heads, 2u);
  EXPECT_EQ(dump->info().head_dim, 64u);
  EXPECT_EQ(dump->tokens_count(), 156u);
  EXPECT_THAT(dump->sequence_lengths(), ElementsAre(6, 40, 60, 50));
  ExpectLayer(*dump, 0, layers_[0]);
  ExpectLayer(*dump, 1, layers_[1]);
}

TEST_F(TorchDumpTest, EqualsTheSameRowsInOurOwnLayout) {
  const TempDirectory ours;
  WriteDump(ours.path(), {3, 7}, {.sequence_lengths = {6, 40, 60, 50}}, 1);
  const auto one = DumpReader::Open(ours.path(), kNames);
  const auto other = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE(other.ok()) << other.status();
  ThreadPool pool(1);
  const FitOptions options = {.method = Method::kHadamard, .measure_tokens = 0};
  const auto fit = [&](const DumpReader& dump) {
    return FitRotations(dump, options, &pool, [](const LayerReport&) {});
  };
  const auto ours_fit = fit(*one);
  const auto torch_fit = fit(*other);
  ASSERT_TRUE(ours_fit.ok()) << ours_fit.status();
  ASSERT_TRUE(torch_fit.ok()) << torch_fit.status();
  EXPECT_EQ(ours_fit->rotations.hash(), torch_fit->rotations.hash());
}

TEST_F(TorchDumpTest, NumbersMayBeginAfterAWarmUpAndTypesMayDiffer) {
  const TempDirectory directory;
  WriteTorchLayer(directory.path(), layers_[0], {{6, 40}, {60, 50}}, 1);
  const std::vector<float> rows = Slice(layers_[0].q, 256, 0, 46);
  WriteFile(directory.Path("layer_3/q/1.pt"),
            TorchTensorFile(TorchType::kFloat, {46, 4, 64}, BytesOf(rows)));
  WriteFile(directory.Path("layer_3/seq_lens/2.pt"),
            TorchTensorFile(TorchType::kLong, {2}, BytesOf<int64_t>({60, 50})));
  WriteFile(directory.Path("layer_3/notes.txt"), "ignored");
  const auto dump = DumpReader::Open(directory.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  ExpectLayer(*dump, 0, layers_[0]);
}

TEST_F(TorchDumpTest, MissingPartsAreNotFound) {
  constexpr absl::StatusCode kNone = absl::StatusCode::kNotFound;
  std::filesystem::remove(Path("layer_7/v/1.pt"));
  ExpectOpenFails(kNone, "layer_7: file 1 is in only one of q and v");
  std::filesystem::remove_all(Path("layer_7/v"));
  ExpectOpenFails(kNone, "layer_7/v");
  std::filesystem::remove(Path("layer_7/q/0.pt"));
  std::filesystem::remove(Path("layer_7/q/1.pt"));
  ExpectOpenFails(kNone, "no <n>.pt in");
  const TempDirectory gap;
  WriteTorchLayer(gap.path(), layers_[0], {{6}, {40}, {60, 50}});
  for (const char* name : {"q", "k", "v", "seq_lens"}) {
    std::filesystem::remove(gap.Path(absl::StrCat("layer_3/", name, "/1.pt")));
  }
  ExpectFails(gap.path(), kNone, "layer_3/q/1.pt is missing");
}

TEST_F(TorchDumpTest, NamesThatAreNoNumbersOrStandTwiceAreRefused) {
  std::filesystem::copy(Path("layer_7/q/1.pt"), Path("layer_7/q/01.pt"));
  ExpectOpenFails(kInvalid, "layer_7/q/01.pt: '01' is not the number of a file");
  std::filesystem::remove(Path("layer_7/q/01.pt"));
  std::filesystem::create_directory(Path("layer_07"));
  ExpectOpenFails(kInvalid, "layer_07: '07' is not a layer id");
  std::filesystem::remove(Path("layer_07"));
  std::filesystem::create_directory(Path("layer_x"));
  ExpectOpenFails(kInvalid, "layer_x: 'x' is not a layer id");
}

TEST_F(TorchDumpTest, BadTensorsAreNamedByFile) {
  const std::string rows = Bf16Bytes(Slice(layers_[1].k, 128, 46, 110));
  Replace("k/1.pt", TorchType::kDouble, {1, 2, 64}, std::string(1024, '\0'));
  ExpectOpenFails(kInvalid, "layer_7/k/1.pt: tensor is Double [1, 2, 64], not of Float");
  Replace("k/1.pt", TorchType::kBFloat16, {110, 128}, rows);
  ExpectOpenFails(kInvalid, "layer_7/k/1.pt: tensor k has shape [110, 128]");
  Replace("k/1.pt", TorchType::kBFloat16, {110, 4, 32}, rows);
  ExpectOpenFails(kInvalid, "layer_7/k/1.pt: shape [110, 4, 32] differs in heads or head_dim");
  Replace("k/1.pt", TorchType::kBFloat16, {109, 2, 64}, rows.substr(0, 109 * 256));
  ExpectOpenFails(kInvalid, "layer_7: file 1 has 110 tokens of q, 109 of k, 110 of v");
  Replace("k/1.pt", TorchType::kBFloat16, {110, 2, 64}, rows);
  Replace("seq_lens/0.pt", TorchType::kInt, {2}, BytesOf<int32_t>({6, 39}));
  ExpectOpenFails(kInvalid, "layer_7/seq_lens/0.pt: seq_lens sum to 45, the tensors have 46");
  Replace("seq_lens/0.pt", TorchType::kInt, {2}, BytesOf<int32_t>({-6, 52}));
  ExpectOpenFails(kInvalid, "layer_7/seq_lens/0.pt: seq_lens[0] is -6");
  Replace("seq_lens/0.pt", TorchType::kFloat, {2}, BytesOf<float>({6, 40}));
  ExpectOpenFails(kInvalid, "layer_7/seq_lens/0.pt: a tensor is Float [2], not of Long or Int");
  Replace("seq_lens/0.pt", TorchType::kInt, {1, 2}, BytesOf<int32_t>({6, 40}));
  ExpectOpenFails(kInvalid, "layer_7/seq_lens/0.pt: seq_lens is not one-dimensional");
  WriteFile(Path("layer_7/seq_lens/0.pt"), TorchZip(PickleOf("}"), {}));
  ExpectOpenFails(kInvalid, "layer_7/seq_lens/0.pt: it holds a dict, not a tensor");
  WriteFile(Path("layer_7/q/0.pt"), "nothing");
  ExpectOpenFails(kInvalid, "layer_7/q/0.pt: zip: not a ZIP file");
  WriteFile(Path("layer_7/q/0.pt"), TorchZip(PickleOf(PickledTensor({.type = "BFloat16Storage",
                                                                     .elements = 1'000'000'000,
                                                                     .sizes = {1'000'000, 4, 64},
                                                                     .strides = {256, 64, 1}})),
                                             {"few"}));
  ExpectOpenFails(kInvalid, "layer_7/q/0.pt: not a PyTorch file: storage '0' has 3 bytes");
}

TEST_F(TorchDumpTest, TruncationIsDataLoss) {
  const std::string path = Path("layer_7/v/1.pt");
  const std::string whole = ReadFile(path);
  WriteFile(path, whole.substr(0, whole.size() / 2));
  ExpectOpenFails(absl::StatusCode::kDataLoss, "layer_7/v/1.pt: zip: the file ends");
}

TEST_F(TorchDumpTest, AFlippedBitOfTheRowsIsDataLossWhenTheyAreRead) {
  const std::string path = Path("layer_7/v/1.pt");
  std::string bytes = ReadFile(path);
  bytes[bytes.size() / 2] ^= 1;
  WriteFile(path, bytes);
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_TRUE(dump->ReadLayer(0).ok());
  const absl::Status status = dump->ReadLayer(1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer_7/v/1.pt"));
}

TEST_F(TorchDumpTest, NanNamesLayerTokenAndHead) {
  std::vector<float> rows = Slice(layers_[1].k, 128, 46, 110);
  rows[17 * 128 + 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  Replace("k/1.pt", TorchType::kBFloat16, {110, 2, 64}, Bf16Bytes(rows));
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  const absl::Status status = dump->ReadLayer(1).status();
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("NaN or Inf in k of layer 7, token 63, head 1"));
}

TEST_F(TorchDumpTest, LayersOfOneDumpAgree) {
  constexpr absl::StatusCode kDiffers = absl::StatusCode::kFailedPrecondition;
  std::filesystem::remove_all(Path("layer_7"));
  WriteTorchLayer(directory_.path(), layers_[1], {{6, 40}, {50, 60}});
  ExpectOpenFails(kDiffers, "layer_7 has other sequence lengths");
  std::filesystem::remove_all(Path("layer_7"));
  WriteTorchLayer(directory_.path(), layers_[1], {{6, 40}});
  ExpectOpenFails(kDiffers, "layer_7 has tokens 46, not 156");
  std::filesystem::remove_all(Path("layer_7"));
  WriteTorchLayer(directory_.path(),
                  SyntheticLayer({.sequence_lengths = {6}, .query_heads = 3, .layer_id = 7}, 1),
                  {{6}});
  ExpectOpenFails(kInvalid, "layer_7: 3 query heads do not divide over 2 KV heads");
}

TEST_F(TorchDumpTest, NamesAreNeeded) {
  for (const DumpNames& names : {DumpNames{}, DumpNames{.model = "m", .weights_revision = ""},
                                 DumpNames{.model = "", .weights_revision = "r"}}) {
    const absl::Status status = DumpReader::Open(directory_.path(), names).status();
    EXPECT_EQ(status.code(), kInvalid);
    EXPECT_THAT(std::string(status.message()), HasSubstr("model and weights_revision"));
  }
}

TEST_F(TorchDumpTest, AFileThatChangesAfterOpenIsNoticed) {
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok());
  std::filesystem::remove_all(Path("layer_7"));
  WriteTorchLayer(directory_.path(), layers_[1], {{6, 40}});
  EXPECT_EQ(dump->ReadLayer(1).status().code(), absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove_all(Path("layer_7"));
  EXPECT_EQ(dump->ReadLayer(1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TorchDumpTest, AFileThatChangesUnderAnOpenLayerIsNoticed) {
  const DumpLayerSource source = {
      .directory = directory_.path(), .listing = *ListDump(directory_.path()), .names = kNames};
  const auto layer = OpenTorchLayer(source, 7);
  ASSERT_TRUE(layer.ok()) << layer.status();
  ThreadPool pool(1);
  std::vector<float> rows;
  ASSERT_TRUE((*layer)->Read(1, &pool, &rows).ok());
  EXPECT_EQ(rows.size(), layers_[1].k.size());
  Replace("k/1.pt", TorchType::kFloat, {1, 2, 64}, std::string(512, '\0'));
  EXPECT_THAT(std::string((*layer)->Read(1, &pool, &rows).message()),
              HasSubstr("layer_7/k/1.pt: it has changed"));
}

TEST(DumpNamesTest, OfADumpThatSaysThemMustBeTheSame) {
  const TempDirectory directory;
  WriteDump(directory.path(), {0}, {}, 1);
  EXPECT_TRUE(DumpReader::Open(directory.path(), kNames).ok());
  EXPECT_TRUE(DumpReader::Open(directory.path()).ok());
  const absl::Status model = DumpReader::Open(directory.path(), {"other", ""}).status();
  EXPECT_EQ(model.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(model.message()), HasSubstr("model synthetic, not other"));
  EXPECT_THAT(std::string(DumpReader::Open(directory.path(), {"", "r2"}).status().message()),
              HasSubstr("weights_revision r1, not r2"));
}

class NumpyDumpTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const LayerDump& layer : layers_) WriteNumpyLayer(directory_.path(), layer);
  }
  void ExpectOpenFails(absl::StatusCode code, const std::string& message) const {
    ExpectFails(directory_.path(), code, message);
  }

  const TempDirectory directory_;
  const std::vector<LayerDump> layers_ = {SyntheticLayer({.layer_id = 3}, 1),
                                          SyntheticLayer({.layer_id = 7}, 2)};
};

TEST_F(NumpyDumpTest, ArraysAreRead) {
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_THAT(dump->info().layer_ids, ElementsAre(3, 7));
  EXPECT_THAT(dump->sequence_lengths(), ElementsAre(100, 60));
  ExpectLayer(*dump, 0, layers_[0]);
  ExpectLayer(*dump, 1, layers_[1]);
}

TEST_F(NumpyDumpTest, BadArraysAreNamedByFile) {
  const std::string k = directory_.Path("layer_7_k.npy");
  const std::string whole = ReadFile(k);
  WriteFile(k, whole.substr(0, whole.size() - 1));
  ExpectOpenFails(absl::StatusCode::kDataLoss, "layer_7_k.npy: npy: it has");
  WriteFile(k, NpyFile("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 1, 1), }", "0123"));
  ExpectOpenFails(kInvalid, "layer_7_k.npy: type '<i4' is not of float32");
  WriteFile(k, NpyFile("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1), }", "0123"));
  ExpectOpenFails(kInvalid, "layer_7_k.npy: tensor k has shape [1, 1]");
  WriteFile(k, NpyFile("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1), }", "0123"));
  ExpectOpenFails(kInvalid, "layer_7_q.npy: shapes do not fit together");
  std::filesystem::remove(k);
  ExpectOpenFails(absl::StatusCode::kNotFound, "layer_7_k.npy");
}

TEST_F(NumpyDumpTest, ALayerIsNotLostWithOneOfItsFiles) {
  for (const char* name : {"q", "k", "v"}) {
    const TempDirectory directory;
    for (const LayerDump& layer : layers_) WriteNumpyLayer(directory.path(), layer);
    std::filesystem::remove(directory.Path(absl::StrCat("layer_7_", name, ".npy")));
    EXPECT_THAT(ListDump(directory.path())->layer_ids, ElementsAre(3, 7));
    ExpectFails(directory.path(), absl::StatusCode::kNotFound,
                absl::StrCat("layer_7_", name, ".npy"));
  }
}

TEST_F(NumpyDumpTest, BadLengthsAreNamed) {
  const std::string path = directory_.Path("seq_lens.npy");
  const auto with = [&](const std::string& shape, const std::string& data,
                        const std::string& type = "<i4") {
    WriteFile(path, NpyFile(absl::StrCat("{'descr': '", type,
                                         "', 'fortran_order': False, 'shape': ", shape, ", }"),
                            data));
  };
  with("(2,)", BytesOf<int32_t>({100, 61}));
  ExpectOpenFails(kInvalid, "seq_lens.npy: seq_lens[1] is 61 with 60 tokens left");
  with("(1,)", BytesOf<int32_t>({100}));
  ExpectOpenFails(kInvalid, "seq_lens.npy: seq_lens sum to 100");
  with("(1, 2)", BytesOf<int32_t>({100, 60}));
  ExpectOpenFails(kInvalid, "seq_lens.npy: it is not one-dimensional");
  with("(2,)", BytesOf<float>({100, 60}), "<f4");
  ExpectOpenFails(kInvalid, "seq_lens.npy: type '<f4' is not of int32");
  std::filesystem::remove(path);
  ExpectOpenFails(absl::StatusCode::kNotFound, "seq_lens.npy");
}

TEST_F(NumpyDumpTest, NanNamesLayerTokenAndHead) {
  LayerDump layer = layers_[1];
  layer.q[(30 * 4 + 2) * 64] = std::numeric_limits<float>::infinity();
  WriteNumpyLayer(directory_.path(), layer);
  const auto dump = DumpReader::Open(directory_.path(), kNames);
  ASSERT_TRUE(dump.ok()) << dump.status();
  EXPECT_THAT(std::string(dump->ReadLayer(1).status().message()),
              HasSubstr("NaN or Inf in q of layer 7, token 30, head 2"));
}

TEST_F(NumpyDumpTest, ADumpOfTwoLayoutsIsRefused) {
  WriteTorchLayer(directory_.path(), SyntheticLayer({.layer_id = 9}, 1), {{100, 60}});
  ExpectOpenFails(kInvalid, "layers of two layouts");
}

}  // namespace
}  // namespace okv
