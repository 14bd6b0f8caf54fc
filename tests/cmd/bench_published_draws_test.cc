#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "calib/recover.h"
#include "cmd/bench/published_draws.h"
#include "proto/bf16.h"
#include "tests/calib/torch_data.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing::HasSubstr;
using testing_support::TempDir;
using testing_support::WriteFile;

class PublishedDrawsTest : public testing::Test {
 protected:
  PublishedDrawsTest() {
    WriteFile(k_file_, *WritePublished(k_, PublishedVersion::kLayer, 2, "k"));
    WriteFile(v_file_, *WritePublished(v_, PublishedVersion::kLayer, 2, "v"));
  }

  const PublishedRotations k_ = RandomPublished({}, 1);
  const PublishedRotations v_ = RandomPublished({.objective = "sst_r_h_pbr"}, 9);
  const TempDir directory_;
  const std::string k_file_ = directory_.Path("k.pt");
  const std::string v_file_ = directory_.Path("v.pt");
};

// ||M^T M - C|| / ||C||.
double MomentError(const std::vector<uint16_t>& mix, const Matrix& covariance, uint32_t dim) {
  double error = 0;
  double norm = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      double moment = 0;
      for (uint32_t c = 0; c < dim; ++c) {
        moment += double{Bf16ToFloat(mix[size_t{c} * dim + i])} *
                  double{Bf16ToFloat(mix[size_t{c} * dim + j])};
      }
      const double expected = covariance[size_t{i} * dim + j];
      error += (moment - expected) * (moment - expected);
      norm += expected * expected;
    }
  }
  return std::sqrt(error / norm);
}

TEST_F(PublishedDrawsTest, RowsHaveTheSecondMomentsOfTheLayerAndItsRotations) {
  const auto draws = LoadPublishedDraws({.k_file = k_file_, .v_file = v_file_, .layer = 3});
  ASSERT_TRUE(draws.ok()) << draws.status();
  ASSERT_EQ(draws->head_dim, 64u);
  // bf16 rounds to 2^-9.
  EXPECT_LT(
      MomentError(draws->mix_k, RecoverCovariance(k_.Rotation(1, 0), k_.Eigenvalues(1, 0), 64), 64),
      4e-3);
  EXPECT_LT(
      MomentError(draws->mix_v, RecoverCovariance(v_.Rotation(1, 0), v_.Eigenvalues(1, 0), 64), 64),
      4e-3);
  // Another layer's are not these.
  EXPECT_GT(
      MomentError(draws->mix_k, RecoverCovariance(k_.Rotation(0, 0), k_.Eigenvalues(0, 0), 64), 64),
      0.1);
  ASSERT_EQ(draws->r_k.size(), 64u * 64u);
  for (size_t i = 0; i < draws->r_k.size(); ++i) {
    ASSERT_EQ(draws->r_k[i], FloatToBf16(k_.Rotation(1, 0)[i]));
    ASSERT_EQ(draws->r_v[i], FloatToBf16(v_.Rotation(1, 0)[i]));
  }
}

TEST_F(PublishedDrawsTest, WhatHasNoCovarianceIsRefusedByName) {
  const std::string bad = directory_.Path("bad.pt");
  const auto message = [&](const std::string& v_file, uint32_t layer) {
    const auto draws = LoadPublishedDraws({.k_file = k_file_, .v_file = v_file, .layer = layer});
    EXPECT_EQ(draws.status().code(), absl::StatusCode::kInvalidArgument) << draws.status();
    return std::string(draws.status().message());
  };
  EXPECT_THAT(message(v_file_, 1), HasSubstr("k.pt has no layer 1"));
  WriteFile(bad, "nothing");
  EXPECT_THAT(message(bad, 3), HasSubstr("bad.pt: "));
  WriteFile(bad, *WritePublished(RandomPublished({.objective = "hadamard"}, 1),
                                 PublishedVersion::kLayer, 2, "v"));
  EXPECT_THAT(message(bad, 3), HasSubstr("bad.pt: covariances need eigenvalues"));
  WriteFile(bad, *WritePublished(RandomPublished({.heads = 2, .per_head = true}, 1),
                                 PublishedVersion::kKvHead, 2, "v"));
  EXPECT_THAT(message(bad, 3), HasSubstr("bad.pt: covariances need eigenvalues"));
  WriteFile(bad, *WritePublished(RandomPublished({.head_dim = 128}, 1), PublishedVersion::kLayer, 2,
                                 "v"));
  EXPECT_THAT(message(bad, 3), HasSubstr("differ in head_dim"));
  EXPECT_EQ(
      LoadPublishedDraws({.k_file = directory_.Path("absent"), .v_file = v_file_}).status().code(),
      absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace okv
