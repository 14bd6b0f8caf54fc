// A launch with early inputs begins while the kernel in front still runs: what that one reads must
// not change under it, and what is older than that one must be there.
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/quantize.h"
#include "tests/kernels/cuda/device.h"
#include "tests/kernels/support.h"

namespace okv::cuda_test {
namespace {

using kernels_test::Lcg;
using kernels_test::OneRun;
using kernels_test::RandomBf16;

constexpr uint32_t kHeads = 8;
constexpr uint32_t kBlocks = 256;
constexpr int kRepeats = 10;

using Rows = OnDevice<uint16_t>;  // [tokens, heads, dim]
using Runs = OnDevice<uint8_t>;   // [blocks, heads] runs

// A block's other end of the pool.
std::vector<int32_t> Backwards(uint32_t blocks) {
  std::vector<int32_t> table;
  for (uint32_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(blocks - 1 - b));
  return table;
}

// Launches over the blocks of one layer. What is written lies in the opposite order of what is
// read: a launch begins to write where the one in front of it, which reads there, is at its end.
class Launches {
 public:
  Launches(uint32_t dim, uint32_t blocks, cudaStream_t stream)
      : dim_(dim),
        blocks_(blocks),
        stream_(stream),
        table_(Backwards(blocks)),
        bad_row_({cuda::kNoBadRow}) {}

  size_t elements() const { return size_t{blocks_} * 64 * kHeads * dim_; }
  Rows RandomRows(uint64_t seed) const {
    Lcg lcg(seed);
    return Rows(RandomBf16(&lcg, elements(), 1.0f));
  }
  Rows NoRows() const { return Rows(std::vector<uint16_t>(elements())); }
  Runs NoPages() const { return Runs(std::vector<uint8_t>(blocks_ * block_bytes())); }

  // The rows as K and as V.
  cudaError_t Quantize(const Rows& rows, const Runs& pages, bool early) const {
    const cuda::ConstPagedRows from = PlainRows(AsBf16(rows), blocks_ * 64, kHeads, dim_);
    return cuda::QuantizePages({.layers_count = 1,
                                .kv_heads = kHeads,
                                .head_dim = dim_,
                                .group_size = dim_,
                                .blocks_count = blocks_,
                                .tokens_count = nullptr,
                                .k = from,
                                .v = from,
                                .tokens = {},
                                .rotations = {},
                                .clip_rank_k = nullptr,
                                .clip_rank_v = nullptr,
                                .pages = {.base = pages.get(),
                                          .block_stride = static_cast<int64_t>(block_bytes()),
                                          .layer_stride = 0,
                                          .head_stride = static_cast<int64_t>(run_bytes()),
                                          .table = table_.get()},
                                .bad_row = bad_row_.get(),
                                .early_inputs = early},
                               stream_);
  }
  cudaError_t Dequantize(const Runs& pages, const Rows& k, const Rows& v, bool early) const {
    cuda::PagedRows to = PlainRows(AsMutableBf16(k), blocks_ * 64, kHeads, dim_);
    to.page_tokens = 64;
    to.token_stride = to.page_stride;
    to.page_stride *= 64;
    cuda::PagedRows to_v = to;
    to_v.base = AsMutableBf16(v);
    return cuda::DequantizePages({.layers_count = 1,
                                  .kv_heads = kHeads,
                                  .head_dim = dim_,
                                  .group_size = dim_,
                                  .blocks_count = blocks_,
                                  .pages = {.base = pages.get(),
                                            .block_stride = static_cast<int64_t>(block_bytes()),
                                            .layer_stride = 0,
                                            .head_stride = static_cast<int64_t>(run_bytes()),
                                            .table = nullptr},
                                  .rotations = {},
                                  .k = to,
                                  .v = to_v,
                                  .tokens = {.slots = nullptr, .pages = table_.get()},
                                  .early_inputs = early},
                                 stream_);
  }

 private:
  size_t run_bytes() const { return OneRun(dim_, dim_).run_bytes(Codec::kInt2); }
  size_t block_bytes() const { return run_bytes() * kHeads; }

  const uint32_t dim_;
  const uint32_t blocks_;
  const cudaStream_t stream_;
  OnDevice<int32_t> table_;
  OnDevice<uint64_t> bad_row_;
};

// Two sets of rows, and what comes out of their pages.
struct TwoSets {
  explicit TwoSets(const Launches& launches)
      : rows{launches.RandomRows(1), launches.RandomRows(2)},
        pages(launches.NoPages()),
        k(launches.NoRows()),
        v(launches.NoRows()) {
    for (const int i : {0, 1}) {
      EXPECT_CUDA_OK(launches.Quantize(rows[i], pages, false));
      EXPECT_CUDA_OK(launches.Dequantize(pages, k, v, false));
      EXPECT_CUDA_OK(cudaDeviceSynchronize());
      expected[i] = k.Read();
    }
    EXPECT_NE(expected[0], expected[1]);
  }

  Rows rows[2];
  Runs pages;  // Of rows[1] at first.
  Rows k;
  Rows v;
  std::vector<uint16_t> expected[2];
};

class EarlyInputsCudaTest : public CudaTest {};

TEST_F(EarlyInputsCudaTest, PagesThatAreReadInFrontAreNotQuantizedInto) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    SCOPED_TRACE(dim);
    const Launches launches(dim, kBlocks, stream_);
    const TwoSets sets(launches);
    const auto& [rows, pages, k, v, expected] = sets;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      ASSERT_CUDA_OK(launches.Dequantize(pages, k, v, false));
      ASSERT_CUDA_OK(launches.Quantize(rows[repeat % 2], pages, true));
      Wait();
      ASSERT_EQ(k.Read(), expected[1 - repeat % 2]);
      ASSERT_EQ(v.Read(), expected[1 - repeat % 2]);
    }
  }
}

TEST_F(EarlyInputsCudaTest, RowsThatAreReadInFrontAreNotDequantizedInto) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    SCOPED_TRACE(dim);
    const Launches launches(dim, kBlocks, stream_);
    const Runs pages[] = {launches.NoPages(), launches.NoPages()};
    const Rows rows = launches.NoRows();
    const Rows others = launches.NoRows();
    const Runs out = launches.NoPages();
    std::vector<uint8_t> expected[2];
    for (const int i : {0, 1}) {
      ASSERT_CUDA_OK(launches.Quantize(launches.RandomRows(dim + i), pages[i], false));
      ASSERT_CUDA_OK(launches.Dequantize(pages[i], rows, others, false));
      ASSERT_CUDA_OK(launches.Quantize(rows, out, false));
      Wait();
      expected[i] = out.Read();
    }
    ASSERT_NE(expected[0], expected[1]);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      ASSERT_CUDA_OK(launches.Quantize(rows, out, false));
      ASSERT_CUDA_OK(launches.Dequantize(pages[repeat % 2], rows, others, true));
      Wait();
      ASSERT_EQ(out.Read(), expected[1 - repeat % 2]);
    }
  }
}

// Head dim, and whether the kernel in front has early inputs.
class EarlyInputsBehindTwoCudaTest
    : public CudaTest,
      public testing::WithParamInterface<std::tuple<uint32_t, bool>> {};

// The kernel in front is short and begins early too: it must not let the next one start before its
// own predecessor, which writes what the next one reads, has ended.
TEST_P(EarlyInputsBehindTwoCudaTest, WhatIsOlderThanTheKernelInFrontIsThere) {
  const auto [dim, early_front] = GetParam();
  const Launches launches(dim, kBlocks, stream_);
  const Launches front(dim, 2, stream_);
  const Rows front_rows = front.RandomRows(7);
  const Runs front_pages = front.NoPages();
  const TwoSets sets(launches);
  const auto& [rows, pages, k, v, expected] = sets;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    ASSERT_CUDA_OK(launches.Quantize(rows[repeat % 2], pages, false));
    ASSERT_CUDA_OK(front.Quantize(front_rows, front_pages, early_front));
    ASSERT_CUDA_OK(launches.Dequantize(pages, k, v, true));
    Wait();
    ASSERT_EQ(k.Read(), expected[repeat % 2]);
    ASSERT_EQ(v.Read(), expected[repeat % 2]);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryHeadDim, EarlyInputsBehindTwoCudaTest,
                         testing::Combine(testing::Values(64u, 128u, 256u), testing::Bool()));

}  // namespace
}  // namespace okv::cuda_test
