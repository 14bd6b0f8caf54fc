#include "control_plane/prefix_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "tests/control_plane/keys.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using testing_support::ChainKeys;
using testing_support::TestKey;

constexpr ScopeId kScope(0);
constexpr PrefixWindows kRecipe = {.sink_blocks = 1, .recent_blocks = 4};

// Puts block i of `keys` in `codec` for every i of from..to-1.
void AddRange(PrefixIndex* index, HolderSlot holder, absl::Span<const BlockKey> keys, Codec codec,
              uint32_t from, uint32_t to) {
  for (uint32_t i = from; i < to; ++i) {
    index->Add(holder, {.scope = kScope, .id = {keys[i], codec}, .payload_bytes = 10});
  }
}

HolderSlot ShownHolder(PrefixIndex* index, uint32_t node) {
  const HolderSlot holder = index->AddHolder(NodeSlot(node));
  index->Show(holder);
  return holder;
}

void CollectAll(PrefixIndex* index) {
  while (index->Collect(1000)) {
  }
}

TEST(PrefixIndexTest, EmptyIndexMatchesNothing) {
  PrefixIndex index;
  const auto keys = ChainKeys(0, 8);
  const PrefixMatch match = index.Match(kScope, keys, kRecipe);
  EXPECT_EQ(match.prefix_blocks, 0u);
  EXPECT_EQ(match.resume_boundary, 0u);
  EXPECT_THAT(match.locations, IsEmpty());
  EXPECT_EQ(index.Match(kScope, {}, kRecipe).prefix_blocks, 0u);
}

TEST(PrefixIndexTest, HoleInTheChainEndsThePrefix) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 64);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  AddRange(&index, holder, keys, Codec::kInt2, 1, 64);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 64u);
  index.Remove(holder, {keys[20], Codec::kInt2});
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 20u);
  index.Remove(holder, {keys[0], Codec::kBf16});
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 0u);
}

TEST(PrefixIndexTest, SinkAsInt2OrHistoryAsBf16IsNoPrefix) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 3);
  AddRange(&index, holder, keys, Codec::kInt2, 0, 3);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 0u);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 3u);
  index.Remove(holder, {keys[1], Codec::kInt2});
  AddRange(&index, holder, keys, Codec::kBf16, 1, 2);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 1u);
}

// What a writer stores for boundary b (DESIGN: resume points), and what is found then.
TEST(PrefixIndexTest, StoredBoundaryIsTheResumePointForEveryShortChain) {
  for (uint32_t b = 0; b <= 12; ++b) {
    PrefixIndex index;
    const HolderSlot holder = ShownHolder(&index, 0);
    const auto keys = ChainKeys(0, 16);
    const uint32_t tail = std::max<uint32_t>(1, b > 4 ? b - 4 : 0);
    AddRange(&index, holder, keys, Codec::kBf16, 0, std::min(b, 1u));
    AddRange(&index, holder, keys, Codec::kInt2, 1, std::min(tail, b));
    AddRange(&index, holder, keys, Codec::kBf16, tail, b);
    EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, b) << "boundary " << b;
  }
}

TEST(PrefixIndexTest, MissingTailObjectMovesTheResumePointBack) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 20);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  AddRange(&index, holder, keys, Codec::kInt2, 1, 20);
  AddRange(&index, holder, keys, Codec::kBf16, 6, 10);   // A tail for boundary 10.
  AddRange(&index, holder, keys, Codec::kBf16, 16, 20);  // A tail for boundary 20.
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, 20u);
  index.Remove(holder, {keys[17], Codec::kBf16});
  PrefixMatch match = index.Match(kScope, keys, kRecipe);
  EXPECT_EQ(match.resume_boundary, 10u);
  EXPECT_EQ(match.prefix_blocks, 20u);
  index.Remove(holder, {keys[0], Codec::kBf16});
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, 0u);
}

TEST(PrefixIndexTest, SinkAloneIsAResumePoint) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 8);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, 1u);
  // bf16 of blocks 1..4 too: boundaries 2..5 need no int2 yet; 6 needs int2 of block 1.
  AddRange(&index, holder, keys, Codec::kBf16, 1, 8);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, 5u);
  AddRange(&index, holder, keys, Codec::kInt2, 1, 2);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).resume_boundary, 6u);
}

TEST(PrefixIndexTest, RecentWindowLongerThanTheChainNeedsNoInt2) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 3);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 3);
  const PrefixWindows wide = {.sink_blocks = 1, .recent_blocks = 0xffffffff};
  EXPECT_EQ(index.Match(kScope, keys, wide).resume_boundary, 3u);
}

TEST(PrefixIndexTest, BoundaryInsideSeveralSinkBlocksIsAResumePoint) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 6);
  const PrefixWindows windows = {.sink_blocks = 3, .recent_blocks = 2};
  AddRange(&index, holder, keys, Codec::kBf16, 0, 2);
  PrefixMatch match = index.Match(kScope, keys, windows);
  EXPECT_EQ(match.prefix_blocks, 2u);
  EXPECT_EQ(match.resume_boundary, 2u);
  AddRange(&index, holder, keys, Codec::kBf16, 2, 5);
  match = index.Match(kScope, keys, windows);
  EXPECT_EQ(match.prefix_blocks, 3u);
  EXPECT_EQ(match.resume_boundary, 5u);
}

TEST(PrefixIndexTest, OtherScopesSeeNothingEvenUnderTheSameKey) {
  PrefixIndex index;
  const HolderSlot a = ShownHolder(&index, 0);
  const HolderSlot b = ShownHolder(&index, 1);
  const ObjectId id = {TestKey(0, 0), Codec::kBf16};
  index.Add(a, {.scope = ScopeId(1), .id = id, .payload_bytes = 1});
  EXPECT_THAT(index.Find(ScopeId(2), id), IsEmpty());
  EXPECT_EQ(index.Match(ScopeId(2), {id.key}, kRecipe).prefix_blocks, 0u);
  index.Add(b, {.scope = ScopeId(2), .id = id, .payload_bytes = 1});
  EXPECT_THAT(index.Find(ScopeId(1), id), ElementsAre(NodeSlot(0)));
  EXPECT_THAT(index.Find(ScopeId(2), id), ElementsAre(NodeSlot(1)));
  index.Remove(b, id);
  EXPECT_THAT(index.Find(ScopeId(1), id), ElementsAre(NodeSlot(0)));
  EXPECT_THAT(index.Find(ScopeId(2), id), IsEmpty());
}

TEST(PrefixIndexTest, ReplicasAreAllNamedAndOneLossLeavesTheOther) {
  PrefixIndex index;
  const HolderSlot a = ShownHolder(&index, 5);
  const HolderSlot b = ShownHolder(&index, 7);
  const auto keys = ChainKeys(0, 2);
  AddRange(&index, a, keys, Codec::kBf16, 0, 2);
  AddRange(&index, b, keys, Codec::kBf16, 0, 2);
  AddRange(&index, b, keys, Codec::kBf16, 0, 2);  // Again: nothing changes.
  EXPECT_EQ(index.objects_count(), 2u);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).locations.size(), 4u);
  index.Drop(a);
  const PrefixMatch match = index.Match(kScope, keys, kRecipe);
  EXPECT_EQ(match.resume_boundary, 2u);
  ASSERT_EQ(match.locations.size(), 2u);
  for (const ObjectLocation& location : match.locations) EXPECT_EQ(location.node, NodeSlot(7));
}

TEST(PrefixIndexTest, DroppedListIsInvisibleAtOnceAndCollectedInSteps) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 10);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 10);
  index.Drop(holder);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 0u);
  EXPECT_THAT(index.Find(kScope, {keys[0], Codec::kBf16}), IsEmpty());
  EXPECT_EQ(index.objects_count(), 10u);
  EXPECT_TRUE(index.Collect(4));
  EXPECT_EQ(index.objects_count(), 6u);
  EXPECT_FALSE(index.Collect(1000));
  EXPECT_EQ(index.objects_count(), 0u);
  EXPECT_EQ(index.AddHolder(NodeSlot(3)), holder) << "its slot is free again";
}

TEST(PrefixIndexTest, HiddenListIsSeenOnceItIsShown) {
  PrefixIndex index;
  const HolderSlot holder = index.AddHolder(NodeSlot(0));
  const auto keys = ChainKeys(0, 2);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 0u);
  index.Show(holder);
  EXPECT_EQ(index.Match(kScope, keys, kRecipe).prefix_blocks, 1u);
}

TEST(PrefixIndexTest, LocationsEndWithTheLongerOfPrefixAndResumePoint) {
  PrefixIndex index;
  const HolderSlot holder = ShownHolder(&index, 0);
  const auto keys = ChainKeys(0, 12);
  AddRange(&index, holder, keys, Codec::kBf16, 0, 1);
  AddRange(&index, holder, keys, Codec::kInt2, 1, 4);
  AddRange(&index, holder, keys, Codec::kBf16, 6, 8);  // Leads nowhere: 4 and 5 are missing.
  const PrefixMatch match = index.Match(kScope, keys, kRecipe);
  EXPECT_EQ(match.prefix_blocks, 4u);
  EXPECT_EQ(match.resume_boundary, 1u);
  ASSERT_EQ(match.locations.size(), 4u);
  EXPECT_EQ(match.locations.back().block, 3u);
}

TEST(PrefixIndexTest, BlockCostsAtMost200Bytes) {
  // 200,000 history blocks on one node, then each in both codecs on two nodes.
  constexpr uint32_t kBlocks = 200'000;
  PrefixIndex index;
  const HolderSlot a = ShownHolder(&index, 0);
  const HolderSlot b = ShownHolder(&index, 1);
  const auto keys = ChainKeys(0, kBlocks);
  AddRange(&index, a, keys, Codec::kInt2, 0, kBlocks);
  const double one = static_cast<double>(index.memory_bytes()) / kBlocks;
  AddRange(&index, a, keys, Codec::kBf16, 0, kBlocks);
  AddRange(&index, b, keys, Codec::kInt2, 0, kBlocks);
  AddRange(&index, b, keys, Codec::kBf16, 0, kBlocks);
  const double four = static_cast<double>(index.memory_bytes()) / kBlocks;
  std::cout << "bytes per block: " << one << " with one object, " << four << " with four\n";
  EXPECT_LE(one, 100);
  EXPECT_LE(four, 200);
}

// The index as a set of facts, and the match as control.proto defines it.
class Model {
 public:
  using Object = std::tuple<uint32_t, ObjectId>;  // Scope, id.

  void Add(uint32_t holder, const Object& object) { held_[holder].insert(object); }
  void Remove(uint32_t holder, const ObjectId& id) {
    for (uint32_t scope = 0; scope < 2; ++scope) held_[holder].erase({scope, id});
  }
  void Show(uint32_t holder) { shown_.insert(holder); }
  void Drop(uint32_t holder) {
    shown_.erase(holder);
    held_.erase(holder);
  }
  bool Holds(uint32_t scope, const ObjectId& id) const {
    return std::any_of(shown_.begin(), shown_.end(), [&](uint32_t holder) {
      const auto held = held_.find(holder);
      return held != held_.end() && held->second.count({scope, id}) > 0;
    });
  }
  size_t Count(uint32_t holder) const {
    const auto held = held_.find(holder);
    return held == held_.end() ? 0 : held->second.size();
  }
  size_t Distinct() const {
    std::set<Object> all;
    for (const auto& [holder, objects] : held_) all.insert(objects.begin(), objects.end());
    return all.size();
  }

  uint32_t Prefix(uint32_t scope, absl::Span<const BlockKey> keys,
                  const PrefixWindows& windows) const {
    uint32_t n = 0;
    while (n < keys.size() &&
           Holds(scope, {keys[n], n < windows.sink_blocks ? Codec::kBf16 : Codec::kInt2})) {
      ++n;
    }
    return n;
  }
  bool IsResumePoint(uint32_t scope, absl::Span<const BlockKey> keys, const PrefixWindows& windows,
                     uint32_t b) const {
    const uint32_t sink = windows.sink_blocks;
    const uint32_t tail = std::max(sink, b > windows.recent_blocks ? b - windows.recent_blocks : 0);
    for (uint32_t i = 0; i < b; ++i) {
      const Codec codec = i < sink || i >= tail ? Codec::kBf16 : Codec::kInt2;
      if (!Holds(scope, {keys[i], codec})) return false;
    }
    return true;
  }
  uint32_t Resume(uint32_t scope, absl::Span<const BlockKey> keys,
                  const PrefixWindows& windows) const {
    for (uint32_t b = static_cast<uint32_t>(keys.size()); b > 0; --b) {
      if (IsResumePoint(scope, keys, windows, b)) return b;
    }
    return 0;
  }

 private:
  std::map<uint32_t, std::set<Object>> held_;
  std::set<uint32_t> shown_;
};

class PrefixIndexRandomTest : public testing::Test {
 protected:
  static constexpr uint32_t kChain = 14;

  uint32_t Random(uint32_t count) { return static_cast<uint32_t>(random_() % count); }
  ObjectId RandomId() { return {keys_[Random(kChain)], Random(2) ? Codec::kInt2 : Codec::kBf16}; }

  void CheckMatch() {
    const uint32_t scope = Random(2);
    const PrefixWindows windows = {.sink_blocks = Random(4), .recent_blocks = Random(6)};
    const absl::Span<const BlockKey> keys = absl::MakeConstSpan(keys_).first(Random(kChain + 1));
    const PrefixMatch match = index_.Match(ScopeId(scope), keys, windows);
    ASSERT_EQ(match.prefix_blocks, model_.Prefix(scope, keys, windows));
    ASSERT_EQ(match.resume_boundary, model_.Resume(scope, keys, windows));
    const uint32_t blocks = std::max(match.prefix_blocks, match.resume_boundary);
    std::set<std::pair<uint32_t, Codec>> located;
    for (const ObjectLocation& location : match.locations) {
      ASSERT_LT(location.block, blocks);
      located.insert({location.block, location.codec});
    }
    for (uint32_t i = 0; i < blocks; ++i) {
      for (const Codec codec : kCodecs) {
        ASSERT_EQ(located.count({i, codec}) > 0, model_.Holds(scope, {keys[i], codec}));
      }
    }
  }

  std::mt19937_64 random_{testing_support::Seed()};
  PrefixIndex index_;
  Model model_;
  std::vector<BlockKey> keys_ = ChainKeys(0, kChain);
};

TEST_F(PrefixIndexRandomTest, AgreesWithTheModel) {
  std::vector<std::pair<HolderSlot, uint32_t>> holders;  // With their names in the model.
  uint32_t next_name = 0;
  for (int step = 0; step < 30'000; ++step) {
    const uint32_t action = Random(100);
    if (holders.empty() || (action < 2 && holders.size() < 4)) {
      holders.push_back({index_.AddHolder(NodeSlot(next_name)), next_name});
      if (Random(4) > 0) {
        index_.Show(holders.back().first);
        model_.Show(next_name);
      }
      ++next_name;
      continue;
    }
    const size_t chosen = Random(static_cast<uint32_t>(holders.size()));
    const auto [slot, name] = holders[chosen];
    if (action < 3) {
      index_.Drop(slot);
      model_.Drop(name);
      holders.erase(holders.begin() + static_cast<ptrdiff_t>(chosen));
    } else if (action < 50) {
      const uint32_t scope = Random(8) == 0 ? 1 : 0;
      const ObjectId id = RandomId();
      // A node has an object once, whatever the scope.
      model_.Remove(name, id);
      index_.Remove(slot, id);
      model_.Add(name, {scope, id});
      index_.Add(slot, {.scope = ScopeId(scope), .id = id, .payload_bytes = 3});
    } else if (action < 65) {
      const ObjectId id = RandomId();
      model_.Remove(name, id);
      index_.Remove(slot, id);
    } else if (action < 70) {
      index_.Collect(Random(5));
    } else {
      ASSERT_NO_FATAL_FAILURE(CheckMatch()) << "step " << step;
    }
    ASSERT_EQ(index_.holder_objects_count(slot),
              action < 3 ? index_.holder_objects_count(slot) : model_.Count(name));
  }
  CollectAll(&index_);
  EXPECT_EQ(index_.objects_count(), model_.Distinct());
}

}  // namespace
}  // namespace okv
