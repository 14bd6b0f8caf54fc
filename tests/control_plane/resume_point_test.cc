// The resume points of DESIGN's table, spelled out object by object.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control_plane/prefix_index.h"
#include "tests/control_plane/keys.h"

namespace okv {
namespace {

using testing_support::ChainKeys;

constexpr ScopeId kScope(0);

// What boundary `boundary` needs: bf16 of the sink and of max(S, b - W)..b-1, int2 between.
std::vector<ObjectId> Needs(absl::Span<const BlockKey> keys, const PrefixWindows& windows,
                            uint32_t boundary) {
  const uint32_t sink = windows.sink_blocks;
  const uint32_t recent = windows.recent_blocks;
  const uint32_t tail = std::max(sink, boundary > recent ? boundary - recent : 0);
  std::vector<ObjectId> ids;
  for (uint32_t i = 0; i < boundary; ++i) {
    ids.push_back({keys[i], i < sink || i >= tail ? Codec::kBf16 : Codec::kInt2});
  }
  return ids;
}

uint32_t ResumeOf(absl::Span<const ObjectId> ids, absl::Span<const BlockKey> keys,
                  const PrefixWindows& windows) {
  PrefixIndex index;
  const HolderSlot holder = index.AddHolder(NodeSlot(0));
  index.Show(holder);
  for (const ObjectId& id : ids) {
    index.Add(holder, {.scope = kScope, .id = id, .payload_bytes = 1});
  }
  return index.Match(kScope, keys, windows).resume_boundary;
}

class ResumePointTest : public testing::TestWithParam<PrefixWindows> {
 protected:
  static constexpr uint32_t kChain = 14;
  const std::vector<BlockKey> keys_ = ChainKeys(0, kChain);
};

TEST_P(ResumePointTest, WhatABoundaryNeedsMakesItTheResumePoint) {
  for (uint32_t b = 0; b <= kChain; ++b) {
    EXPECT_EQ(ResumeOf(Needs(keys_, GetParam(), b), keys_, GetParam()), b) << "boundary " << b;
  }
}

TEST_P(ResumePointTest, EveryObjectIsNeeded) {
  for (uint32_t b = 1; b <= kChain; ++b) {
    const std::vector<ObjectId> all = Needs(keys_, GetParam(), b);
    for (size_t missing = 0; missing < all.size(); ++missing) {
      std::vector<ObjectId> ids = all;
      ids.erase(ids.begin() + static_cast<ptrdiff_t>(missing));
      EXPECT_LT(ResumeOf(ids, keys_, GetParam()), b) << "boundary " << b << " less " << missing;
    }
  }
}

TEST_P(ResumePointTest, TheOtherCodecIsNoSubstitute) {
  for (uint32_t b = 1; b <= kChain; ++b) {
    const std::vector<ObjectId> all = Needs(keys_, GetParam(), b);
    for (size_t swapped = 0; swapped < all.size(); ++swapped) {
      std::vector<ObjectId> ids = all;
      ids[swapped].codec = ids[swapped].codec == Codec::kInt2 ? Codec::kBf16 : Codec::kInt2;
      EXPECT_LT(ResumeOf(ids, keys_, GetParam()), b) << "boundary " << b << " at " << swapped;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, ResumePointTest,
                         testing::Values(PrefixWindows{.sink_blocks = 1, .recent_blocks = 4},
                                         PrefixWindows{.sink_blocks = 2, .recent_blocks = 4},
                                         PrefixWindows{.sink_blocks = 1, .recent_blocks = 0},
                                         PrefixWindows{.sink_blocks = 2, .recent_blocks = 0},
                                         PrefixWindows{.sink_blocks = 0, .recent_blocks = 3},
                                         PrefixWindows{.sink_blocks = 0, .recent_blocks = 0}),
                         [](const testing::TestParamInfo<PrefixWindows>& info) {
                           return absl::StrCat("Sink", info.param.sink_blocks, "Recent",
                                               info.param.recent_blocks);
                         });

}  // namespace
}  // namespace okv
