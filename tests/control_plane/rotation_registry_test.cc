#include "control_plane/rotation_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/bf16.h"
#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing_support::IsStatus;
using testing_support::MemoryState;
using testing_support::SmallFormat;
using testing_support::SmallRotations;

class RotationRegistryTest : public testing::Test {
 protected:
  RotationRegistryTest() { Reopen(); }

  void Reopen() {
    auto registry = RotationRegistry::Open(&state_, &clock_);
    ASSERT_TRUE(registry.ok()) << registry.status();
    registry_ = *std::move(registry);
  }
  // What Publish says to a file that must not be taken; checks that nothing was kept.
  absl::Status Refused(const std::string& file) {
    const auto published = registry_->Publish(file);
    EXPECT_FALSE(published.ok());
    EXPECT_EQ(registry_->rotations_count(), 0u);
    Reopen();
    EXPECT_EQ(registry_->rotations_count(), 0u);
    return published.status();
  }

  MemoryState state_;
  FakeClock clock_;
  std::unique_ptr<RotationRegistry> registry_;
};

TEST_F(RotationRegistryTest, PublishedSetIsGivenBackByteForByteAlsoAfterAReopen) {
  const RotationSet set = SmallRotations("hadamard", 2);
  const std::string file = set.Serialize();
  const auto published = registry_->Publish(file);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->hash, set.hash());
  EXPECT_FALSE(published->already_known);
  for (int life = 0; life < 2; ++life) {
    const auto got = registry_->Get(set.hash());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, file);
    const auto list = registry_->List("");
    ASSERT_EQ(list.size(), 1u);
    EXPECT_EQ(list[0].hash, set.hash());
    EXPECT_EQ(list[0].method, "hadamard");
    EXPECT_EQ(list[0].layers_count, 2u);
    EXPECT_EQ(list[0].kv_heads, 2u);
    EXPECT_EQ(list[0].head_dim, 64u);
    EXPECT_EQ(list[0].group_size, 64u);
    EXPECT_EQ(list[0].file_bytes, file.size());
    EXPECT_EQ(list[0].published_wall_us, clock_.WallMicros());
    Reopen();
  }
}

TEST_F(RotationRegistryTest, PublishingTheSameSetAgainIsAlreadyKnown) {
  RotationSet set = SmallRotations("hadamard", 2);
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  set.provenance["date"] = "another day";  // Not part of its identity.
  const auto again = registry_->Publish(set.Serialize());
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->already_known);
  Reopen();
  EXPECT_TRUE(registry_->Publish(set.Serialize())->already_known);
  EXPECT_EQ(registry_->rotations_count(), 1u);
}

TEST_F(RotationRegistryTest, ALaterPromiseForTheSameRotationsTakesTheEarliersPlace) {
  RotationSet set = SmallRotations("hadamard", 2);
  const std::string silent = set.Serialize();
  ASSERT_TRUE(registry_->Publish(silent).ok());
  set.promised_error_k = set.promised_error_v = {0.25f, 0.5f};
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  set.promised_error_k = {0.125f, 0.5f};
  const std::string last = set.Serialize();
  EXPECT_TRUE(registry_->Publish(last)->already_known);
  EXPECT_TRUE(registry_->Publish(silent)->already_known);  // Takes no promise away.
  for (int life = 0; life < 2; ++life) {
    const auto got = registry_->Get(set.hash());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, last);
    EXPECT_EQ(registry_->List("")[0].file_bytes, last.size());
    Reopen();
  }
  EXPECT_EQ(registry_->rotations_count(), 1u);
}

TEST_F(RotationRegistryTest, ListIsByModelInOrderOfPublication) {
  RotationSet set = SmallRotations("none", 0);
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  clock_.AdvanceNanos(1'000'000);
  ASSERT_TRUE(registry_->Publish(SmallRotations("hadamard", 0).Serialize()).ok());
  set.model = "large";
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  const auto small = registry_->List("small");
  ASSERT_EQ(small.size(), 2u);
  EXPECT_EQ(small[0].method, "none");
  EXPECT_EQ(small[1].method, "hadamard");
  EXPECT_EQ(registry_->List("").size(), 3u);
  EXPECT_TRUE(registry_->List("unknown").empty());
}

TEST_F(RotationRegistryTest, UnknownSetIsNotFound) {
  EXPECT_THAT(registry_->Get(RotationHash()).status(),
              IsStatus(StatusCode::kNotFound, RotationHash().Hex()));
}

TEST_F(RotationRegistryTest, GarbageIsRefused) {
  EXPECT_EQ(Refused("").code(), StatusCode::kDataLoss);  // Cut short of its header.
  EXPECT_EQ(Refused("not a safetensors file at all").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Refused(std::string(1 << 16, '\xff')).code(), StatusCode::kInvalidArgument);
}

TEST_F(RotationRegistryTest, TruncatedFileIsDataLoss) {
  const std::string file = SmallRotations("hadamard", 2).Serialize();
  EXPECT_EQ(Refused(file.substr(0, file.size() - 1)).code(), StatusCode::kDataLoss);
  EXPECT_EQ(Refused(file.substr(0, file.size() / 2)).code(), StatusCode::kDataLoss);
}

TEST_F(RotationRegistryTest, FlippedBitIsDataLoss) {
  std::string file = SmallRotations("hadamard", 2).Serialize();
  file[file.size() - 3] ^= 1;  // A clip rank's, or a rotation's: the sets stay valid.
  const absl::Status status = Refused(file);
  EXPECT_TRUE(status.code() == StatusCode::kDataLoss ||
              status.code() == StatusCode::kInvalidArgument)
      << status;
}

TEST_F(RotationRegistryTest, NanInfAndNonOrthogonalRotationsAreRefused) {
  RotationSet set = SmallRotations("hadamard", 2);
  set.r_k[5] = 0x7fc0;
  EXPECT_EQ(Refused(set.Serialize()).code(), StatusCode::kInvalidArgument);
  set = SmallRotations("hadamard", 2);
  set.r_v[7] = 0x7f80;
  EXPECT_EQ(Refused(set.Serialize()).code(), StatusCode::kInvalidArgument);
  set = SmallRotations("hadamard", 2);
  set.r_k[0] = FloatToBf16(0.5f);
  EXPECT_EQ(Refused(set.Serialize()).code(), StatusCode::kInvalidArgument);
}

TEST_F(RotationRegistryTest, ClipRankBeyondTheRowIsRefused) {
  RotationSet set = SmallRotations("hadamard", 2);
  set.clip_rank_v[3] = 64;
  EXPECT_EQ(Refused(set.Serialize()).code(), StatusCode::kInvalidArgument);
}

TEST_F(RotationRegistryTest, FullDiskPublishesNothing) {
  state_.FailWrites(true);
  const std::string file = SmallRotations("hadamard", 2).Serialize();
  EXPECT_EQ(Refused(file).code(), StatusCode::kUnavailable);
  state_.FailWrites(false);
  EXPECT_FALSE(registry_->Publish(file)->already_known);
}

TEST_F(RotationRegistryTest, DamagedSetInTheStateIsNamedAtStart) {
  const RotationSet set = SmallRotations("hadamard", 2);
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  ASSERT_TRUE(
      state_.Put(absl::StrCat("rotation/", set.hash().Hex()), set.Serialize().substr(0, 5000))
          .ok());
  EXPECT_THAT(RotationRegistry::Open(&state_, &clock_).status(),
              IsStatus(StatusCode::kDataLoss, set.hash().Hex()));
}

TEST_F(RotationRegistryTest, FormatIsFoundByItsIdAlsoAfterAReopen) {
  const RotationSet set = SmallRotations("hadamard", 2);
  ASSERT_TRUE(registry_->Publish(set.Serialize()).ok());
  const Format format = SmallFormat(set);
  EXPECT_THAT(registry_->FindFormat(format.id()).status(),
              IsStatus(StatusCode::kFailedPrecondition, "open a session first"));
  const auto id = registry_->RegisterFormat(format.Canonical());
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_EQ(*id, format.id());
  for (int life = 0; life < 2; ++life) {
    const auto found = registry_->FindFormat(*id);
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(**found, format);
    EXPECT_EQ(registry_->formats_count(), 1u);
    EXPECT_TRUE(registry_->RegisterFormat(format.Canonical()).ok());
    Reopen();
  }
}

}  // namespace
}  // namespace okv
