// Checksums by warps are those of libxxhash: the order of sums on the CPU, for every size of a run,
// and the kernels on the GPU.
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/verify.h"
#include "kernels/cuda/verify_device.cuh"
#include "proto/object.h"
#include "tests/kernels/cuda/device.h"
#include "tests/kernels/support.h"

namespace okv::cuda_test {
namespace {

using kernels_test::Lcg;
using kernels_test::OneRun;

// Run bytes of every shape and codec, and some more sizes around the algorithm's block of 1,024.
std::vector<uint32_t> RunSizes() {
  std::vector<uint32_t> sizes = {256, 320, 960, 1024, 1088, 2048, 2112};
  for (const uint32_t dim : {64u, 128u, 256u}) {
    sizes.push_back(static_cast<uint32_t>(OneRun(dim, dim).run_bytes(Codec::kBf16)));
    for (uint32_t group = 32; group <= dim; group *= 2) {
      sizes.push_back(static_cast<uint32_t>(OneRun(dim, group).run_bytes(Codec::kInt2)));
    }
  }
  return sizes;
}

std::vector<uint8_t> RandomBytes(Lcg* lcg, size_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(lcg->Next() >> 5);
  return bytes;
}

cuda::xxh3::Pair PairAt(const uint8_t* bytes) {
  cuda::xxh3::Pair pair;
  std::memcpy(&pair, bytes, sizeof(pair));
  return pair;
}

// What the 32 lanes of a warp do, one lane after the other: the sum over the lanes of one pair of
// accumulators is what a warp's shuffles give to each of them.
uint64_t HashByLanes(const std::vector<uint8_t>& run, uint64_t seed) {
  namespace xxh3 = cuda::xxh3;
  uint64_t parts = 0;
  for (uint32_t m = 0; m < 4; ++m) {
    xxh3::Pair accumulators = xxh3::InitialAccumulators(m);
    for (size_t block = 0; block < run.size(); block += xxh3::kBlockBytes) {
      const size_t bytes = std::min<size_t>(xxh3::kBlockBytes, run.size() - block);
      const bool is_last = block + bytes == run.size();
      const uint32_t last_stripe = static_cast<uint32_t>(bytes / xxh3::kStripeBytes) - 1;
      for (uint32_t lane = m; lane < 32; lane += 4) {
        const xxh3::LaneSecrets secrets = xxh3::MakeLaneSecrets(seed, lane);
        xxh3::Pair sums = {0, 0};
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t stripe = lane / 4 + 8 * i;
          if (stripe > last_stripe) continue;
          xxh3::Accumulate(PairAt(&run[block + 512 * i + 16 * lane]),
                           is_last && stripe == last_stripe ? secrets.last : secrets.stripe[i],
                           &sums);
        }
        accumulators = xxh3::AddPairs(accumulators, sums);
      }
      if (!is_last) {
        accumulators = xxh3::Scramble(accumulators, xxh3::MakeLaneSecrets(seed, m).scramble);
      }
    }
    parts += xxh3::FinalPart(accumulators, seed, m);
  }
  return xxh3::Finish(parts, run.size());
}

TEST(VerifyOrderTest, SumsOfLanesAreTheHashOfLibxxhash) {
  Lcg lcg(1);
  for (const uint32_t size : RunSizes()) {
    const std::vector<uint8_t> run = RandomBytes(&lcg, size);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{lcg.Next()} << 33 | lcg.Next(),
                                ~uint64_t{0}, uint64_t{1} << 63}) {
      EXPECT_EQ(HashByLanes(run, seed), XXH3_64bits_withSeed(run.data(), size, seed))
          << size << " bytes, seed " << seed;
    }
  }
}

TEST(VerifyOrderTest, TheSeedIsTheHashOfThePlace) {
  Lcg lcg(2);
  for (int i = 0; i < 100; ++i) {
    std::vector<uint8_t> place = RandomBytes(&lcg, 41);
    uint64_t key[4];
    uint32_t layer;
    uint32_t head;
    std::memcpy(key, place.data(), 32);
    std::memcpy(&layer, &place[33], 4);
    std::memcpy(&head, &place[37], 4);
    EXPECT_EQ(cuda::xxh3::RunSeed(key, place[32], layer, head), XXH3_64bits(place.data(), 41));
  }
}

// Blocks of random bytes in a pool, in slots of a table, of which one is left out.
struct Blocks {
  Blocks(Codec block_codec, const PageLayout& block_layout, uint64_t seed)
      : codec(block_codec), layout(block_layout), table({5, 0, -1, 3}) {
    Lcg lcg(seed);
    pool = RandomBytes(&lcg, 6 * layout.block_bytes(codec));
    for (size_t b = 0; b < table.size(); ++b) {
      const std::vector<uint8_t> key = RandomBytes(&lcg, 32);
      const absl::string_view view(reinterpret_cast<const char*>(key.data()), 32);
      ids.push_back({.key = *BlockKey::FromBytes(view), .codec = codec});
      keys.insert(keys.end(), key.begin(), key.end());
    }
  }
  size_t RunAt(size_t block, uint32_t layer, uint32_t head) const {
    return static_cast<size_t>(table[block]) * layout.block_bytes(codec) +
           layout.run_offset(codec, layer, head);
  }
  // Of layers [first_layer, ..) and heads [first_head, ..); `left_out` for the block without a
  // slot.
  std::vector<uint32_t> Checksums(uint32_t first_layer, uint32_t first_head,
                                  uint32_t left_out) const {
    std::vector<uint32_t> checksums;
    for (size_t b = 0; b < table.size(); ++b) {
      for (uint32_t l = first_layer; l < layout.layers_count; ++l) {
        for (uint32_t h = first_head; h < layout.kv_heads; ++h) {
          checksums.push_back(table[b] < 0
                                  ? left_out
                                  : RunChecksum(ids[b], l, h,
                                                absl::MakeConstSpan(&pool[RunAt(b, l, h)],
                                                                    layout.run_bytes(codec))));
        }
      }
    }
    return checksums;
  }

  Codec codec;
  PageLayout layout;
  std::vector<int32_t> table;
  std::vector<uint8_t> pool;
  std::vector<ObjectId> ids;
  std::vector<uint8_t> keys;
};

class VerifyCudaTest : public CudaTest {};

cuda::RunSet RunsOf(const Blocks& blocks, const OnDevice<uint8_t>& keys,
                    const OnDevice<uint8_t>& pool, const OnDevice<int32_t>& table) {
  const auto stride = [](size_t bytes) { return static_cast<int64_t>(bytes); };
  return {.blocks_count = static_cast<uint32_t>(blocks.table.size()),
          .layers_count = blocks.layout.layers_count,
          .kv_heads = blocks.layout.kv_heads,
          .first_layer = 0,
          .first_head = 0,
          .run_bytes = static_cast<uint32_t>(blocks.layout.run_bytes(blocks.codec)),
          .codec = static_cast<uint8_t>(blocks.codec),
          .keys = reinterpret_cast<const uint64_t*>(keys.get()),
          .pages = {.base = pool.get(),
                    .block_stride = stride(blocks.layout.block_bytes(blocks.codec)),
                    .layer_stride = stride(blocks.layout.page_bytes(blocks.codec)),
                    .head_stride = stride(blocks.layout.run_bytes(blocks.codec)),
                    .table = table.get()}};
}

TEST_F(VerifyCudaTest, ChecksumsAreThoseOfTheCpuForEveryShape) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      for (const Codec codec : kCodecs) {
        const Blocks blocks(
            codec, {.layers_count = 3, .kv_heads = 5, .head_dim = dim, .group_size = group},
            dim + group);
        const OnDevice<uint8_t> keys(blocks.keys), pool(blocks.pool);
        const OnDevice<int32_t> table(blocks.table);
        const OnDevice<uint32_t> checksums(std::vector<uint32_t>(4 * 15, 7));
        ASSERT_CUDA_OK(
            cuda::ChecksumRuns(RunsOf(blocks, keys, pool, table), checksums.get(), stream_));
        Wait();
        EXPECT_EQ(checksums.Read(), blocks.Checksums(0, 0, 7)) << dim << " " << group;
      }
    }
  }
}

TEST_F(VerifyCudaTest, ARanksLayersAndHeadsKeepTheirNumbers) {
  const Blocks blocks(Codec::kInt2,
                      {.layers_count = 4, .kv_heads = 8, .head_dim = 128, .group_size = 128}, 3);
  const OnDevice<uint8_t> keys(blocks.keys), pool(blocks.pool);
  const OnDevice<int32_t> table(blocks.table);
  const OnDevice<uint32_t> checksums(std::vector<uint32_t>(4 * 3 * 2, 7));
  cuda::RunSet runs = RunsOf(blocks, keys, pool, table);
  runs.layers_count = 3;
  runs.kv_heads = 2;
  runs.first_layer = 1;
  runs.first_head = 6;
  runs.pages.base += blocks.layout.run_offset(Codec::kInt2, 1, 6);
  ASSERT_CUDA_OK(cuda::ChecksumRuns(runs, checksums.get(), stream_));
  Wait();
  EXPECT_EQ(checksums.Read(), blocks.Checksums(1, 6, 7));
}

// Verifies what is in *pool; the failed runs, in order.
std::vector<uint32_t> FailedRuns(const Blocks& blocks, const std::vector<uint8_t>& pool_bytes,
                                 const std::vector<uint8_t>& key_bytes, cudaStream_t stream) {
  const OnDevice<uint8_t> keys(key_bytes), pool(pool_bytes);
  const OnDevice<int32_t> table(blocks.table);
  const std::vector<uint32_t> checksums = blocks.Checksums(0, 0, 7);
  const OnDevice<uint32_t> expected(checksums);
  const OnDevice<uint32_t> count({99});
  const OnDevice<uint32_t> bits(std::vector<uint32_t>((checksums.size() + 31) / 32, ~0u));
  EXPECT_CUDA_OK(cuda::VerifyRuns(RunsOf(blocks, keys, pool, table), expected.get(),
                                  {.count = count.get(), .bits = bits.get()}, stream));
  EXPECT_CUDA_OK(cudaStreamSynchronize(stream));
  std::vector<uint32_t> failed;
  const std::vector<uint32_t> words = bits.Read();
  for (uint32_t r = 0; r < words.size() * 32; ++r) {
    if ((words[r / 32] >> (r % 32) & 1) != 0) failed.push_back(r);
  }
  EXPECT_EQ(count.Read()[0], failed.size());
  return failed;
}

TEST_F(VerifyCudaTest, EveryFlippedByteFailsItsRunAlone) {
  const Blocks blocks(Codec::kInt2,
                      {.layers_count = 2, .kv_heads = 3, .head_dim = 64, .group_size = 32}, 4);
  EXPECT_TRUE(FailedRuns(blocks, blocks.pool, blocks.keys, stream_).empty());
  const size_t run_bytes = blocks.layout.run_bytes(Codec::kInt2);
  for (size_t at = 0; at < run_bytes; at += at < run_bytes - 64 ? 61 : 1) {
    std::vector<uint8_t> pool = blocks.pool;
    pool[blocks.RunAt(3, 1, 2) + at] ^= 1 << (at % 8);
    pool[blocks.RunAt(0, 1, 0) + at] ^= 0x80;
    // Slots of nobody: nothing looks at them.
    pool[1 * blocks.layout.block_bytes(Codec::kInt2) + at] ^= 1;
    EXPECT_EQ(FailedRuns(blocks, pool, blocks.keys, stream_), (std::vector<uint32_t>{3, 23})) << at;
  }
}

TEST_F(VerifyCudaTest, ARunThatIsRightElsewhereFails) {
  const Blocks blocks(Codec::kBf16,
                      {.layers_count = 2, .kv_heads = 2, .head_dim = 64, .group_size = 64}, 5);
  const size_t run_bytes = blocks.layout.run_bytes(Codec::kBf16);
  std::vector<uint8_t> pool = blocks.pool;
  std::swap_ranges(&pool[blocks.RunAt(0, 0, 0)], &pool[blocks.RunAt(0, 0, 0)] + run_bytes,
                   &pool[blocks.RunAt(0, 1, 0)]);
  EXPECT_EQ(FailedRuns(blocks, pool, blocks.keys, stream_), (std::vector<uint32_t>{0, 2}));
  std::vector<uint8_t> keys = blocks.keys;
  keys[32 + 7] ^= 4;  // Block 1 is then of another key.
  EXPECT_EQ(FailedRuns(blocks, blocks.pool, keys, stream_), (std::vector<uint32_t>{4, 5, 6, 7}));
}

// More runs than the device has warps at a time: a warp has several.
TEST_F(VerifyCudaTest, ManyRunsAreAllLookedAt) {
  const PageLayout layout = {.layers_count = 64, .kv_heads = 64, .head_dim = 64, .group_size = 64};
  Blocks blocks(Codec::kInt2, layout, 6);
  std::vector<uint8_t> pool = blocks.pool;
  std::vector<uint32_t> flipped;
  Lcg lcg(7);
  for (uint32_t i = 0; i < 200; ++i) {
    const uint32_t run = lcg.Next() % (2 * 4096);
    flipped.push_back(run);
    pool[blocks.RunAt(run / 4096, run / 64 % 64, run % 64) + lcg.Next() % 2560] += 1;
  }
  std::sort(flipped.begin(), flipped.end());
  flipped.erase(std::unique(flipped.begin(), flipped.end()), flipped.end());
  EXPECT_EQ(FailedRuns(blocks, pool, blocks.keys, stream_), flipped);
}

TEST_F(VerifyCudaTest, WhatIsNotSupportedIsRefused) {
  const Blocks blocks(Codec::kInt2, OneRun(64, 64), 8);
  const OnDevice<uint8_t> keys(blocks.keys), pool(blocks.pool);
  const OnDevice<int32_t> table(blocks.table);
  const OnDevice<uint32_t> checksums(std::vector<uint32_t>(4));
  const cuda::RunSet good = RunsOf(blocks, keys, pool, table);
  const auto refused = [&](auto change) {
    cuda::RunSet runs = good;
    change(&runs);
    return cuda::ChecksumRuns(runs, checksums.get(), stream_) == cudaErrorInvalidValue;
  };
  EXPECT_FALSE(refused([](cuda::RunSet*) {}));
  EXPECT_TRUE(refused([](cuda::RunSet* r) { r->run_bytes = 2568; }));
  EXPECT_TRUE(refused([](cuda::RunSet* r) { r->run_bytes = 192; }));
  EXPECT_TRUE(refused([](cuda::RunSet* r) { r->keys = nullptr; }));
  EXPECT_TRUE(refused([](cuda::RunSet* r) { r->pages.base += 8; }));
  EXPECT_TRUE(refused([](cuda::RunSet* r) { r->pages.head_stride = 2568; }));
  EXPECT_EQ(cuda::VerifyRuns(good, nullptr, {}, stream_), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace okv::cuda_test
