#include "client/drift.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "kernels/thread_pool.h"
#include "proto/bf16.h"
#include "tests/support/fixtures.h"

namespace okv {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kQueryHeads = 4;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kDim = 64;
constexpr uint32_t kClipRank = 55;
// Tokens 0 to 699 are blocks 0 to 10; the sink's block and the last five are not demoted.
constexpr uint32_t kTokens = 700;
constexpr uint32_t kDemotedBlocks = 5;

// Rows of one sequence by layer: [tokens, heads, dim].
struct Rows {
  std::vector<std::vector<uint16_t>> k, v;
};

// What the scalar codec does to one row.
struct RowFigures {
  uint32_t clipped = 0;
  double squared_error = 0;
  double squared_norm = 0;
};

class DriftTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rotations_ = testing_support::SmallRotations("hadamard", kClipRank);
    seed_ = std::random_device{}();
    RecordProperty("seed", absl::StrCat(seed_));
    std::printf("seed %u\n", seed_);
    random_.seed(seed_);
  }

  // Normal rows around 20 e, e the unit vector `direction`: the transform makes a constant of
  // vector 0, which costs a group nothing but its offset, and two far ends of any other.
  Rows MakeRows(uint32_t direction = 0) {
    std::normal_distribution<float> normal;
    Rows rows;
    for (auto* tensor : {&rows.k, &rows.v}) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        tensor->emplace_back();
        for (uint32_t i = 0; i < kTokens * kHeads * kDim; ++i) {
          tensor->back().push_back(
              FloatToBf16(normal(random_) + (i % kDim == direction ? 20.0f : 0.0f)));
        }
      }
    }
    return rows;
  }

  absl::StatusOr<std::unique_ptr<Sequence>> MakeSequence(DriftMonitor* drift, uint64_t salt,
                                                         ThreadPool* pool) {
    return Sequence::Create({.format = testing_support::SmallFormat(rotations_),
                             .query_heads = kQueryHeads,
                             .softmax_scale = 0.125f,
                             .tokens_max = kTokens,
                             .drift = drift,
                             .drift_salt = salt},
                            &rotations_, pool);
  }

  // Appends tokens [first, last) of both layers, `chunk` at a time.
  static absl::Status Feed(Sequence* sequence, const Rows& rows, uint32_t first, uint32_t last,
                           uint32_t chunk) {
    const std::vector<float> q(size_t{chunk} * kQueryHeads * kDim, 0.5f);
    std::vector<float> out(q.size());
    for (uint32_t at = first; at < last; at += chunk) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const absl::Status status =
            sequence->Append({.layer = layer,
                              .tokens_count = std::min(chunk, last - at),
                              .q = q.data(),
                              .k = rows.k[layer].data() + size_t{at} * kHeads * kDim,
                              .v = rows.v[layer].data() + size_t{at} * kHeads * kDim,
                              .out = out.data()});
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  // A whole sequence's status and statistics.
  absl::Status Run(const Rows& rows, DriftMonitor* drift, uint32_t chunk = kTokens,
                   uint64_t salt = 0) {
    ThreadPool pool(1);
    auto sequence = MakeSequence(drift, salt, &pool);
    if (!sequence.ok()) return sequence.status();
    return Feed(sequence->get(), rows, 0, kTokens, chunk);
  }

  DriftStats Sample(const Rows& rows, uint32_t rows_per_sample, uint32_t chunk = kTokens,
                    uint64_t salt = 0) {
    DriftMonitor drift(&rotations_, {.rows_per_sample = rows_per_sample});
    const absl::Status status = Run(rows, &drift, chunk, salt);
    EXPECT_TRUE(status.ok()) << status;
    return drift.Stats();
  }

  // Row `row` = token * kHeads + head of one tensor, all by the scalar reference.
  RowFigures Reference(const std::vector<uint16_t>& tensor, const uint16_t* r, uint32_t row) {
    std::vector<uint16_t> y(size_t{64} * kDim);  // The row 64 times: the codec takes no fewer.
    reference::RotateRows(
        {.x = &tensor[size_t{row} * kDim], .x_stride = kDim, .r = r, .rows_count = 1, .dim = kDim},
        y.data(), kDim);
    for (uint32_t t = 1; t < 64; ++t) std::copy_n(y.begin(), kDim, y.begin() + t * kDim);
    std::vector<uint8_t> run(2560);
    BadRow bad;
    EXPECT_TRUE(reference::QuantizeRun({.k = y.data(),
                                        .v = y.data(),
                                        .row_stride = kDim,
                                        .dim = kDim,
                                        .group_size = kDim,
                                        .clip_rank_k = kClipRank,
                                        .clip_rank_v = kClipRank},
                                       run.data(), &bad)
                    .ok());
    std::vector<float> k(y.size()), v(y.size());
    reference::DequantizeRunF32({.run = run.data(), .dim = kDim, .group_size = kDim}, k.data(),
                                v.data());
    RowFigures figures;
    std::vector<float> magnitudes;
    for (uint32_t c = 0; c < kDim; ++c) magnitudes.push_back(std::fabs(Bf16ToFloat(y[c])));
    std::sort(magnitudes.begin(), magnitudes.end());
    for (uint32_t c = 0; c < kDim; ++c) {
      const double exact = Bf16ToFloat(y[c]);
      if (magnitudes[c] > magnitudes[kClipRank]) ++figures.clipped;
      figures.squared_error += (k[c] - exact) * (k[c] - exact);
      figures.squared_norm += exact * exact;
    }
    return figures;
  }

  static double Error(const DriftTensor& sums) { return sums.squared_error / sums.squared_norm; }

  RotationSet rotations_;
  unsigned seed_ = 0;
  std::mt19937 random_;
};

void ExpectSums(const DriftTensor& sums, const std::vector<RowFigures>& rows) {
  RowFigures all;
  for (const RowFigures& row : rows) {
    all.clipped += row.clipped;
    all.squared_error += row.squared_error;
    all.squared_norm += row.squared_norm;
  }
  EXPECT_EQ(sums.rows, rows.size());
  EXPECT_EQ(sums.elements, rows.size() * kDim);
  EXPECT_EQ(sums.clipped_elements, all.clipped);
  EXPECT_NEAR(sums.squared_error, all.squared_error, 1e-12 * all.squared_error);
  EXPECT_NEAR(sums.squared_norm, all.squared_norm, 1e-12 * all.squared_norm);
}

TEST_F(DriftTest, EveryDemotedRowsFiguresAreTheScalarReferences) {
  const Rows rows = MakeRows(5);
  const DriftStats stats = Sample(rows, /*rows_per_sample=*/1);
  ASSERT_EQ(stats.layers.size(), 2u);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    std::vector<RowFigures> k, v;
    for (uint32_t row = 64 * kHeads; row < (1 + kDemotedBlocks) * 64 * kHeads; ++row) {
      k.push_back(Reference(rows.k[layer], rotations_.RotationK(layer, row % kHeads), row));
      v.push_back(Reference(rows.v[layer], rotations_.RotationV(layer, row % kHeads), row));
    }
    EXPECT_EQ(stats.layers[layer].layer_id, layer);
    ExpectSums(stats.layers[layer].k, k);
    ExpectSums(stats.layers[layer].v, v);
  }
}

// A block has 128 rows here: of each block's one is measured.
TEST_F(DriftTest, ASampleIsOneWholeRowAndAnySaltsRowMayBeAnother) {
  const Rows rows = MakeRows();
  std::vector<RowFigures> k_rows, v_rows;  // Of block 1.
  for (uint32_t row = 64 * kHeads; row < 2 * 64 * kHeads; ++row) {
    k_rows.push_back(Reference(rows.k[0], rotations_.RotationK(0, 0), row));
    v_rows.push_back(Reference(rows.v[0], rotations_.RotationV(0, 0), row));
  }
  std::set<size_t> rows_seen;
  for (uint64_t salt = 0; salt < 40; ++salt) {
    DriftMonitor drift(&rotations_, {.rows_per_sample = 64 * kHeads});
    ThreadPool pool(1);
    auto sequence = MakeSequence(&drift, salt, &pool);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    // Token 384 opens block 6: block 1 is demoted, and no other.
    ASSERT_TRUE(Feed(sequence->get(), rows, 0, 385, 385).ok());
    const DriftTensor k = drift.Stats().layers[0].k;
    const DriftTensor v = drift.Stats().layers[0].v;
    ASSERT_EQ(k.rows, 1u);
    size_t row = 0;
    while (row < k_rows.size() && k_rows[row].squared_norm != k.squared_norm) ++row;
    ASSERT_LT(row, k_rows.size()) << "no row of the block has this norm";
    ExpectSums(k, {k_rows[row]});
    ExpectSums(v, {v_rows[row]});
    rows_seen.insert(row);
  }
  // 40 draws of 128 are 34 different rows on average.
  EXPECT_GT(rows_seen.size(), 25u);
  const auto of_head_1 = [](size_t row) { return row % kHeads == 1; };
  EXPECT_GT(std::count_if(rows_seen.begin(), rows_seen.end(), of_head_1), 5);
}

TEST_F(DriftTest, OneOfSoManyRowsIsMeasuredWhateverTheChunks) {
  const Rows rows = MakeRows();
  for (const uint32_t rows_per_sample : {1u, 3u, 5u, 128u, 4096u}) {
    const DriftStats whole = Sample(rows, rows_per_sample);
    for (const DriftLayer& layer : whole.layers) {
      // The first and the last stretch may lie half outside.
      EXPECT_NEAR(layer.k.rows, 1.0 * kDemotedBlocks * 64 * kHeads / rows_per_sample, 1);
      EXPECT_EQ(layer.k.rows, layer.v.rows);
    }
    for (const uint32_t chunk : {7u, 64u, 512u}) {
      EXPECT_EQ(Sample(rows, rows_per_sample, chunk).layers, whole.layers)
          << "chunk " << chunk << ", one of " << rows_per_sample;
    }
  }
}

TEST_F(DriftTest, ARateOfZeroMeasuresNothing) {
  const DriftStats stats = Sample(MakeRows(), /*rows_per_sample=*/0);
  for (const DriftLayer& layer : stats.layers) {
    EXPECT_EQ(layer.k.rows, 0u);
    EXPECT_EQ(layer.v.rows, 0u);
    EXPECT_EQ(layer.k.squared_norm, 0);
  }
}

TEST_F(DriftTest, DataThatTheRotationsWereNotFittedToErrsMoreThanPromised) {
  DriftStats stats = Sample(MakeRows(0), 1);
  for (const DriftLayer& layer : stats.layers) {
    EXPECT_FALSE(layer.k.promised_error.has_value());
    rotations_.promised_error_k.push_back(static_cast<float>(Error(layer.k)));
    rotations_.promised_error_v.push_back(static_cast<float>(Error(layer.v)));
  }
  const DriftStats same = Sample(MakeRows(0), 16);
  const DriftStats other = Sample(MakeRows(5), 16);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (const auto tensor : {&DriftLayer::k, &DriftLayer::v}) {
      const DriftTensor& fitted = same.layers[layer].*tensor;
      const DriftTensor& stale = other.layers[layer].*tensor;
      ASSERT_TRUE(fitted.promised_error.has_value());
      EXPECT_NEAR(Error(fitted), *fitted.promised_error, 0.3 * *fitted.promised_error);
      EXPECT_GT(Error(stale), 2 * *stale.promised_error);
      // 8 of 64 elements lie behind rank 55; those equal to the 55th do not count.
      EXPECT_EQ(fitted.promised_clip_rate, 8 / 64.0);
      EXPECT_NEAR(1.0 * fitted.clipped_elements / fitted.elements, 8 / 64.0, 0.02);
    }
  }
}

TEST_F(DriftTest, ClipRanksOfAHeadThatAreOffPromiseNothingClipped) {
  rotations_.clip_rank_v = {0, kClipRank, 0, 0};
  const DriftStats stats = Sample(MakeRows(), 1);
  EXPECT_EQ(stats.layers[0].v.promised_clip_rate, 4 / 64.0);
  EXPECT_EQ(stats.layers[1].v.promised_clip_rate, 0);
  EXPECT_GT(stats.layers[0].v.clipped_elements, 0u);
  EXPECT_EQ(stats.layers[1].v.clipped_elements, 0u);
}

TEST_F(DriftTest, ARowThatTheCodecRefusesGivesTheSameErrorWhenItIsSampled) {
  for (const bool is_nan : {true, false}) {
    rotations_ = testing_support::SmallRotations("none", 0);
    Rows rows = MakeRows();
    uint16_t* const row = &rows.k[1][(201 * kHeads + 1) * kDim];
    if (is_nan) {
      row[5] = 0x7fc0;
    } else {  // Finite, but their difference is not: refused when block 3 is demoted.
      row[5] = FloatToBf16(3e38f);
      row[6] = FloatToBf16(-3e38f);
    }
    DriftMonitor drift(&rotations_, {.rows_per_sample = 1});
    const absl::Status status = Run(rows, &drift);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("K of layer 1, token 201, head 1"));
    EXPECT_EQ(Run(rows, nullptr), status);
    const DriftStats stats = drift.Stats();
    EXPECT_EQ(stats.layers[1].k.rows, is_nan ? 0 : 2 * 64 * kHeads);
    EXPECT_TRUE(std::isfinite(stats.layers[1].k.squared_error));
  }
}

TEST_F(DriftTest, ABlockThatIsSealedEarlyCountsOnceWhenItIsDemoted) {
  const Rows rows = MakeRows();
  DriftMonitor drift(&rotations_, {.rows_per_sample = 1});
  ThreadPool pool(1);
  auto sequence = MakeSequence(&drift, 0, &pool);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ASSERT_TRUE(Feed(sequence->get(), rows, 0, 448, 448).ok());
  std::vector<uint8_t> payload((*sequence)->layout().block_bytes(Codec::kInt2));
  ASSERT_TRUE((*sequence)->SealBlock(BlockIndex(5), absl::MakeSpan(payload)).ok());
  ASSERT_TRUE(Feed(sequence->get(), rows, 448, kTokens, 64).ok());
  EXPECT_EQ(drift.Stats().layers, Sample(rows, 1).layers);
}

TEST_F(DriftTest, AMonitorOfOtherRotationsIsRefused) {
  const RotationSet others = rotations_;
  DriftMonitor drift(&others, {});
  ThreadPool pool(1);
  const auto sequence = MakeSequence(&drift, 0, &pool);
  EXPECT_EQ(sequence.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(sequence.status().message()), HasSubstr("drift"));
}

TEST_F(DriftTest, SequencesOfSeveralThreadsAddUpWhileSomebodyLooks) {
  constexpr uint32_t kThreads = 4;
  const Rows rows = MakeRows();
  DriftMonitor drift(&rotations_, {.rows_per_sample = 16});
  std::vector<std::thread> threads;
  std::vector<absl::Status> statuses(kThreads);
  for (uint32_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { statuses[i] = Run(rows, &drift, 100, /*salt=*/i); });
  }
  uint64_t seen = 0;
  for (int i = 0; i < 100; ++i) {
    const uint64_t now = drift.Stats().layers[1].k.rows;
    EXPECT_GE(now, seen);
    seen = now;
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  // 16 divides a block's 128 rows: the count does not depend on the salt.
  EXPECT_EQ(drift.Stats().layers[1].k.rows, kThreads * kDemotedBlocks * 64 * kHeads / 16);
}

}  // namespace
}  // namespace okv
