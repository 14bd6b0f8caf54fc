#include "client/sequence.h"

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/prefix.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "tests/support/fixtures.h"

namespace okv {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kQueryHeads = 4;

// Rows of a whole random sequence and the cache's answer to them.
class SequenceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    rotations_ = testing_support::SmallRotations("hadamard", /*clip_rank=*/61);
    format_ = testing_support::SmallFormat(rotations_);
    seed_ = std::random_device{}();
    RecordProperty("seed", absl::StrCat(seed_));
    std::printf("seed %u\n", seed_);
  }

  void MakeRows(uint32_t tokens) {
    std::mt19937 random(seed_);
    std::normal_distribution<float> normal;
    tokens_ = tokens;
    const uint32_t layers = format_.layers_count();
    q_.assign(layers, std::vector<float>(size_t{tokens} * kQueryHeads * 64));
    k_.assign(layers, std::vector<uint16_t>(size_t{tokens} * format_.kv_heads * 64));
    v_ = k_;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      for (float& x : q_[layer]) x = normal(random);
      for (uint16_t& x : k_[layer]) x = FloatToBf16(normal(random));
      for (uint16_t& x : v_[layer]) x = FloatToBf16(normal(random));
    }
  }

  std::unique_ptr<Sequence> MakeSequence(uint32_t tokens_max = 2048) {
    SequenceOptions options{.format = format_,
                            .query_heads = kQueryHeads,
                            .softmax_scale = 0.125f,
                            .tokens_max = tokens_max};
    auto sequence = Sequence::Create(options, &rotations_, &pool_);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }

  // Appends tokens [first, last) of every layer, `chunk` at a time; the outputs land in out.
  absl::Status Feed(Sequence* sequence, uint32_t first, uint32_t last, uint32_t chunk,
                    std::vector<std::vector<float>>* out) {
    out->resize(format_.layers_count());
    for (auto& layer : *out) layer.resize(size_t{tokens_} * kQueryHeads * 64);
    for (uint32_t at = first; at < last; at += chunk) {
      const uint32_t count = std::min(chunk, last - at);
      for (uint32_t layer = 0; layer < format_.layers_count(); ++layer) {
        const size_t kv = size_t{at} * format_.kv_heads * 64;
        const size_t q = size_t{at} * kQueryHeads * 64;
        absl::Status status = sequence->Append({.layer = layer,
                                                .tokens_count = count,
                                                .q = q_[layer].data() + q,
                                                .k = k_[layer].data() + kv,
                                                .v = v_[layer].data() + kv,
                                                .out = (*out)[layer].data() + q});
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  // One page of a layer, straight from the rows, by the scalar reference.
  std::vector<uint8_t> ReferenceBf16Page(const PageLayout& layout, uint32_t layer, uint32_t block) {
    std::vector<uint8_t> page(layout.page_bytes(Codec::kBf16));
    for (uint32_t head = 0; head < format_.kv_heads; ++head) {
      auto* run = reinterpret_cast<uint16_t*>(page.data() + layout.run_bytes(Codec::kBf16) * head);
      for (uint32_t t = 0; t < 64 && block * 64 + t < tokens_; ++t) {
        const size_t row = ((block * 64 + t) * size_t{format_.kv_heads} + head) * 64;
        for (const bool is_value : {false, true}) {
          reference::RotateRows({.x = (is_value ? v_ : k_)[layer].data() + row,
                                 .x_stride = 64,
                                 .r = is_value ? rotations_.RotationV(layer, head)
                                               : rotations_.RotationK(layer, head),
                                 .rows_count = 1,
                                 .dim = 64},
                                run + ((is_value ? 64 : 0) + t) * 64, 64);
        }
      }
    }
    return page;
  }

  std::vector<uint8_t> ReferenceInt2Page(const PageLayout& layout,
                                         const std::vector<uint8_t>& bf16) {
    std::vector<uint8_t> page(layout.page_bytes(Codec::kInt2));
    for (uint32_t head = 0; head < format_.kv_heads; ++head) {
      const auto* run =
          reinterpret_cast<const uint16_t*>(bf16.data() + layout.run_bytes(Codec::kBf16) * head);
      BadRow bad;
      const absl::Status status =
          reference::QuantizeRun({.k = run,
                                  .v = run + 64 * 64,
                                  .row_stride = 64,
                                  .dim = 64,
                                  .group_size = 64,
                                  .clip_rank_k = 61,
                                  .clip_rank_v = 61},
                                 page.data() + layout.run_bytes(Codec::kInt2) * head, &bad);
      EXPECT_TRUE(status.ok()) << status;
    }
    return page;
  }

  ThreadPool pool_{2};
  RotationSet rotations_;
  Format format_;
  unsigned seed_;
  uint32_t tokens_ = 0;
  std::vector<std::vector<float>> q_;
  std::vector<std::vector<uint16_t>> k_, v_;
};

TEST_F(SequenceTest, AnyChunkingGivesTheSameBits) {
  MakeRows(700);
  std::vector<std::vector<float>> whole;
  auto first = MakeSequence();
  ASSERT_TRUE(Feed(first.get(), 0, 700, 700, &whole).ok());
  EXPECT_EQ(first->tokens_count(), 700u);
  for (const uint32_t chunk : {1u, 7u, 64u, 100u, 512u}) {
    std::vector<std::vector<float>> pieces;
    auto sequence = MakeSequence();
    ASSERT_TRUE(Feed(sequence.get(), 0, 700, chunk, &pieces).ok());
    EXPECT_EQ(pieces, whole) << "chunk " << chunk;
    for (uint32_t block = 1; block < 6; ++block) {
      auto a = first->Int2Block(BlockIndex(block));
      auto b = sequence->Int2Block(BlockIndex(block));
      ASSERT_TRUE(a.ok() && b.ok()) << block;
      EXPECT_EQ(*a, *b);
    }
  }
}

// The view, spelled out: precision is a function of position alone.
TEST_F(SequenceTest, EveryQuerySeesTheDesignsView) {
  MakeRows(700);
  std::vector<std::vector<float>> out;
  auto sequence = MakeSequence();
  ASSERT_TRUE(Feed(sequence.get(), 0, 700, 333, &out).ok());
  const PageLayout layout = sequence->layout();
  const uint32_t layer = 1;
  std::vector<std::vector<uint8_t>> bf16, int2;  // Every block in both codecs.
  for (uint32_t block = 0; block < 11; ++block) {
    bf16.push_back(ReferenceBf16Page(layout, layer, block));
    int2.push_back(ReferenceInt2Page(layout, bf16.back()));
  }
  for (const uint32_t position : {0u, 1u, 63u, 64u, 319u, 320u, 383u, 384u, 500u, 699u}) {
    const uint32_t b = position / 64;
    std::vector<AttendBlock> view;
    for (uint32_t j = 0; j <= b; ++j) {
      const bool exact = j < 1 || j + 4 >= b;
      view.push_back(
          {exact ? Codec::kBf16 : Codec::kInt2, exact ? bf16[j].data() : int2[j].data()});
    }
    std::vector<float> expected(kQueryHeads * 64);
    ASSERT_TRUE(reference::Attend({.query_heads = kQueryHeads,
                                   .kv_heads = format_.kv_heads,
                                   .head_dim = 64,
                                   .group_size = 64,
                                   .softmax_scale = 0.125f,
                                   .q = q_[layer].data() + position * expected.size(),
                                   .r_k = rotations_.RotationK(layer, 0),
                                   .r_v = rotations_.RotationV(layer, 0),
                                   .rotation_heads = 1,
                                   .queries_count = 1,
                                   .blocks = view,
                                   .last_block_tokens = position % 64 + 1,
                                   .out = expected.data()})
                    .ok());
    EXPECT_EQ(std::memcmp(expected.data(), out[layer].data() + position * expected.size(),
                          expected.size() * sizeof(float)),
              0)
        << "position " << position;
  }
}

TEST_F(SequenceTest, AResumedSequenceContinuesWithTheSameBits) {
  MakeRows(900);
  std::vector<std::vector<float>> whole;
  auto writer = MakeSequence();
  ASSERT_TRUE(Feed(writer.get(), 0, 900, 900, &whole).ok());
  for (const uint32_t boundary : {1u, 2u, 4u, 5u, 6u, 7u, 13u}) {
    // A writer that has just reached the boundary stores it; a reader starts there.
    std::vector<std::vector<float>> ignored, rest;
    auto storing = MakeSequence();
    ASSERT_TRUE(Feed(storing.get(), 0, boundary * 64, 100, &ignored).ok());
    auto reader = MakeSequence();
    ASSERT_TRUE(reader->StartResume(BlockIndex(boundary)).ok());
    for (const PlannedObject& object : PlanStore(format_, BlockIndex(boundary), false, boundary)) {
      auto payload = MakePayload(*storing, object);
      auto buffer = reader->ResumeBuffer(object.index, object.codec);
      ASSERT_TRUE(payload.ok() && buffer.ok()) << payload.status() << buffer.status();
      std::memcpy(buffer->data(), payload->data(), payload->size());
    }
    ASSERT_TRUE(reader->FinishResume().ok());
    EXPECT_EQ(reader->tokens_count(), boundary * 64);
    ASSERT_TRUE(Feed(reader.get(), boundary * 64, 900, 77, &rest).ok());
    for (uint32_t layer = 0; layer < format_.layers_count(); ++layer) {
      const size_t from = size_t{boundary} * 64 * kQueryHeads * 64;
      EXPECT_EQ(std::memcmp(rest[layer].data() + from, whole[layer].data() + from,
                            (whole[layer].size() - from) * sizeof(float)),
                0)
          << "boundary " << boundary << " layer " << layer;
    }
  }
}

TEST_F(SequenceTest, SealingEarlyGivesTheBytesOfTheLaterDemotion) {
  MakeRows(900);
  std::vector<std::vector<float>> out;
  auto sequence = MakeSequence();
  ASSERT_TRUE(Feed(sequence.get(), 0, 448, 448, &out).ok());
  std::vector<uint8_t> early(sequence->layout().block_bytes(Codec::kInt2));
  ASSERT_TRUE(sequence->SealBlock(BlockIndex(5), absl::MakeSpan(early)).ok());
  EXPECT_EQ(sequence->Int2Block(BlockIndex(5)).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Feed(sequence.get(), 448, 900, 64, &out).ok());
  auto later = sequence->Int2Block(BlockIndex(5));
  ASSERT_TRUE(later.ok());
  EXPECT_EQ(absl::Span<const uint8_t>(early), *later);
}

TEST_F(SequenceTest, ABlockThatLeftTheRingOrIsNotFullIsNotFound) {
  MakeRows(700);
  std::vector<std::vector<float>> out;
  auto sequence = MakeSequence();
  ASSERT_TRUE(Feed(sequence.get(), 0, 700, 700, &out).ok());
  std::vector<uint8_t> payload(sequence->layout().block_bytes(Codec::kBf16));
  const auto code = [&](uint32_t block) {
    return sequence->CopyBf16Block(BlockIndex(block), absl::MakeSpan(payload)).code();
  };
  EXPECT_EQ(code(0), absl::StatusCode::kOk);  // Sink.
  EXPECT_EQ(code(1), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(5), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(6), absl::StatusCode::kOk);
  EXPECT_EQ(code(9), absl::StatusCode::kOk);
  EXPECT_EQ(code(10), absl::StatusCode::kNotFound);  // 700 = 10 * 64 + 60.
}

TEST_F(SequenceTest, NanIsRefusedNamingLayerTokenAndHead) {
  MakeRows(300);
  k_[1][(201 * format_.kv_heads + 1) * 64 + 5] = 0x7fc0;
  std::vector<std::vector<float>> out;
  auto sequence = MakeSequence();
  const absl::Status status = Feed(sequence.get(), 0, 300, 300, &out);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("K of layer 1, token 201, head 1"));
  EXPECT_EQ(Feed(sequence.get(), 0, 1, 1, &out).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SequenceTest, MoreThanTokensMaxIsRefusedAndAppendsNothing) {
  MakeRows(200);
  std::vector<std::vector<float>> out;
  auto sequence = MakeSequence(/*tokens_max=*/150);
  ASSERT_TRUE(Feed(sequence.get(), 0, 100, 100, &out).ok());
  EXPECT_EQ(Feed(sequence.get(), 100, 200, 100, &out).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence->tokens_count(), 100u);
  EXPECT_TRUE(Feed(sequence.get(), 100, 150, 50, &out).ok());
}

TEST_F(SequenceTest, RotationsOfAnotherFormatAreRefusedNamingTheField) {
  Format other = format_;
  other.group_size = 32;
  auto sequence = Sequence::Create(
      {.format = other, .query_heads = kQueryHeads, .softmax_scale = 0.125f, .tokens_max = 100},
      &rotations_, &pool_);
  EXPECT_EQ(sequence.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(sequence.status().message()), HasSubstr("group_size"));
}

TEST(PlanStoreTest, HoldsTheSinkTheHistoryAndTheTail) {
  Format format = testing_support::SmallFormat(testing_support::SmallRotations("none", 0));
  const auto plan = [&](uint32_t boundary, bool whole, uint32_t full) {
    std::string text;
    for (const PlannedObject& object : PlanStore(format, BlockIndex(boundary), whole, full)) {
      absl::StrAppend(&text, object.codec == Codec::kBf16 ? "b" : "i", object.index.value(), " ");
    }
    return text;
  };
  EXPECT_EQ(plan(0, false, 0), "");
  EXPECT_EQ(plan(1, false, 1), "b0 ");
  EXPECT_EQ(plan(3, false, 3), "b0 b1 b2 ");
  EXPECT_EQ(plan(5, false, 5), "b0 b1 b2 b3 b4 ");
  EXPECT_EQ(plan(7, false, 7), "b0 i1 i2 b3 b4 b5 b6 ");
  EXPECT_EQ(plan(7, true, 7), "b0 i1 i2 i3 i4 i5 i6 b3 b4 b5 b6 ");
}

}  // namespace
}  // namespace okv
