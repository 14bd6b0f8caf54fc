#include "cache_node/block_pool.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace okv {
namespace {

std::unique_ptr<BlockPool> MakePool(uint64_t arena_bytes) {
  absl::StatusOr<std::unique_ptr<BlockPool>> pool =
      BlockPool::Create({.arena_bytes = arena_bytes, .prefault = true, .progress = {}});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

uint64_t Seed() {
  const char* given = std::getenv("OKV_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device()();
  std::printf("OKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

TEST(BlockPoolTest, AnArenaBelowTheMinimumIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(
      BlockPool::Create({.arena_bytes = 4096, .prefault = false, .progress = {}}).status()));
}

TEST(BlockPoolTest, MemoryThatCannotBeMappedIsResourceExhausted) {
  EXPECT_TRUE(absl::IsResourceExhausted(
      BlockPool::Create({.arena_bytes = uint64_t{1} << 60, .prefault = false, .progress = {}})
          .status()));
}

TEST(BlockPoolTest, PrefaultReportsItsEnd) {
  uint64_t done = 0;
  uint64_t all = 0;
  const auto pool = BlockPool::Create({.arena_bytes = kArenaBytesMin,
                                       .prefault = true,
                                       .progress = [&](uint64_t done_bytes, uint64_t all_bytes) {
                                         done = done_bytes;
                                         all = all_bytes;
                                       }});
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(done, kArenaBytesMin);
  EXPECT_EQ(all, kArenaBytesMin);
}

TEST(BlockPoolTest, NothingAndMoreThanTheArenaAreTheCallersBugs) {
  const auto pool = MakePool(kArenaBytesMin);
  EXPECT_TRUE(absl::IsInvalidArgument(pool->Allocate(0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(pool->Allocate(kArenaBytesMin + 1).status()));
}

TEST(BlockPoolTest, AllocateIsResourceExhaustedUntilAnExtentGoes) {
  const auto pool = MakePool(kArenaBytesMin);
  absl::StatusOr<Extent> all = pool->Allocate(kArenaBytesMin);
  ASSERT_TRUE(all.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(pool->Allocate(1).status()));
  *all = Extent();
  EXPECT_TRUE(pool->Allocate(kArenaBytesMin).ok());
}

TEST(BlockPoolTest, MovingAnExtentKeepsOneOwner) {
  const auto pool = MakePool(kArenaBytesMin);
  Extent first = *pool->Allocate(100);
  uint8_t* const data = first.span().data();
  Extent second = std::move(first);
  EXPECT_FALSE(first.has_memory());
  EXPECT_EQ(second.span().data(), data);
  EXPECT_EQ(second.span().size(), 100u);
  EXPECT_EQ(pool->used_bytes(), 4096u);
  second = *pool->Allocate(5000);
  EXPECT_EQ(pool->used_bytes(), 8192u);
  EXPECT_EQ(pool->extents_count(), 1u);
}

// Every page of the arena has one owner or none, whatever the order of calls.
TEST(BlockPoolTest, RandomCallsAgreeWithAMapOfPages) {
  constexpr size_t kPages = 1024;
  const auto pool = MakePool(kPages * kExtentAlignBytes);
  std::mt19937_64 random(Seed());
  struct Held {
    Extent extent;
    uint64_t mark;
  };
  std::vector<Held> held;
  std::vector<bool> used(kPages, false);
  const auto pages_of = [&](const Extent& extent) {
    const size_t offset = static_cast<size_t>(extent.span().data() - pool->arena().data());
    EXPECT_EQ(offset % kExtentAlignBytes, 0u);
    const size_t count = (extent.span().size() + kExtentAlignBytes - 1) / kExtentAlignBytes;
    return std::pair(offset / kExtentAlignBytes, count);
  };
  const auto largest_hole = [&] {
    size_t best = 0;
    size_t run = 0;
    for (const bool page : used) {
      run = page ? 0 : run + 1;
      best = std::max(best, run);
    }
    return best;
  };
  size_t exhausted_count = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (held.empty() || random() % 100 < 52) {
      const size_t bytes = 1 + random() % (random() % 8 == 0 ? 600'000 : 60'000);
      absl::StatusOr<Extent> extent = pool->Allocate(bytes);
      const size_t pages = (bytes + kExtentAlignBytes - 1) / kExtentAlignBytes;
      ASSERT_EQ(extent.ok(), pages <= largest_hole()) << extent.status();
      if (!extent.ok()) {
        ++exhausted_count;
        ASSERT_TRUE(absl::IsResourceExhausted(extent.status()));
        continue;
      }
      ASSERT_EQ(extent->span().size(), bytes);
      const auto [first, count] = pages_of(*extent);
      for (size_t page = first; page < first + count; ++page) {
        ASSERT_FALSE(used[page]) << "page " << page << " has two owners";
        used[page] = true;
      }
      const uint64_t mark = random();
      extent->span().front() = extent->span().back() = static_cast<uint8_t>(mark);
      held.push_back({.extent = *std::move(extent), .mark = mark});
    } else {
      std::swap(held[random() % held.size()], held.back());
      const Held& gone = held.back();
      ASSERT_EQ(gone.extent.span().front(), static_cast<uint8_t>(gone.mark));
      ASSERT_EQ(gone.extent.span().back(), static_cast<uint8_t>(gone.mark));
      const auto [first, count] = pages_of(gone.extent);
      for (size_t page = first; page < first + count; ++page) used[page] = false;
      held.pop_back();
    }
    size_t holes = 0;
    for (size_t page = 0; page < kPages; ++page) {
      holes += !used[page] && (page == 0 || used[page - 1]);
    }
    ASSERT_EQ(pool->holes_count(), holes) << "neighbours did not coalesce";
    ASSERT_EQ(pool->used_bytes(), kExtentAlignBytes * static_cast<uint64_t>(std::count(
                                                          used.begin(), used.end(), true)));
    ASSERT_EQ(pool->extents_count(), held.size());
  }
  EXPECT_GT(exhausted_count, 0u);
  held.clear();
  EXPECT_EQ(pool->holes_count(), 1u);
  EXPECT_EQ(pool->used_bytes(), 0u);
}

}  // namespace
}  // namespace okv
