// What a dump may be like that no other test looks at: directions without variance, layers with
// gaps or twice.

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/dump.h"
#include "calib/fit.h"
#include "calib/report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Fits and reports a dump of one layer; both must end well.
void ExpectUsable(const LayerDump& layer) {
  const TempDirectory directory;
  WriteFile(directory.Path("layer_0.safetensors"),
            RawSafetensors(LayerMetadata(0, "0"), RawTensors(layer)));
  const auto dump = DumpReader::Open(directory.path());
  ASSERT_TRUE(dump.ok()) << dump.status();
  ThreadPool pool(2);
  const auto fitted = FitRotations(*dump, Quick(), &pool, nullptr);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_TRUE(fitted->rotations.Validate().ok());
  EXPECT_LT(fitted->layers[0].orthogonality_error, 1.0 / 64);
  const auto report =
      MeasureReport(*dump, nullptr, {{"mine", fitted->rotations}}, {}, &pool, nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  for (const VariantMeasures& one : report->layers[0].variants) {
    EXPECT_TRUE(std::isfinite(one.layer.attention.output.ratio())) << one.name;
    EXPECT_TRUE(std::isfinite(one.layer.k.importance_ratio)) << one.name;
  }
}

const SyntheticShape kShape = {.sequence_lengths = std::vector<uint32_t>(4, 400)};

TEST(BadInputTest, DirectionsWithoutVarianceHaveARotationAllTheSame) {
  LayerDump layer = SyntheticLayer(kShape, 21);
  for (std::vector<float>* tensor : {&layer.q, &layer.k, &layer.v}) {
    for (size_t row = 0; row < tensor->size(); row += 64) {
      // Channels 3 to 12 are nothing, and 20 is 21: eleven directions without variance.
      std::fill_n(tensor->begin() + static_cast<ptrdiff_t>(row) + 3, 10, 0.0f);
      (*tensor)[row + 20] = (*tensor)[row + 21];
    }
  }
  ExpectUsable(layer);
}

TEST(BadInputTest, RowsThatAreAllTheSameHaveARotation) {
  LayerDump layer = SyntheticLayer(kShape, 22);
  for (std::vector<float>* tensor : {&layer.q, &layer.k, &layer.v}) {
    for (size_t i = 64; i < tensor->size(); ++i) (*tensor)[i] = (*tensor)[i % 64];
  }
  ExpectUsable(layer);
}

TEST(BadInputTest, LayersMayHaveGapsButNoneMayBeMissing) {
  const TempDirectory directory;
  const std::string path = directory.Path("dump");
  WriteDump(path, {3, 7, 11}, {}, 1);
  ThreadPool pool(2);
  {
    const auto dump = DumpReader::Open(path);
    ASSERT_TRUE(dump.ok()) << dump.status();
    FitOptions options = Quick();
    options.method = Method::kHadamard;
    const auto fitted = FitRotations(*dump, options, &pool, nullptr);
    ASSERT_TRUE(fitted.ok()) << fitted.status();
    EXPECT_THAT(fitted->rotations.layer_ids, ElementsAre(3, 7, 11));
  }
  std::filesystem::remove(path + "/layer_7.safetensors");
  const absl::Status status = DumpReader::Open(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(status.message(), HasSubstr("layer 7"));
}

TEST(BadInputTest, ALayerThatStandsTwiceIsRefused) {
  const TempDirectory directory;
  const LayerDump layer = SyntheticLayer({}, 1);
  WriteFile(directory.Path("layer_1.safetensors"),
            RawSafetensors(LayerMetadata(1, "1"), RawTensors(layer)));
  WriteFile(directory.Path("layer_01.safetensors"),
            RawSafetensors(LayerMetadata(1, "1"), RawTensors(layer)));
  absl::Status status = DumpReader::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("layer_01"));

  std::filesystem::remove(directory.Path("layer_01.safetensors"));
  WriteFile(directory.Path("layer_1.safetensors"),
            RawSafetensors(LayerMetadata(1, "1,1"), RawTensors(layer)));
  status = DumpReader::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("not ascending"));
}

}  // namespace
}  // namespace okv
