// What holds for all of quantize, checksum, verify and dequantize: a captured graph follows what is
// in its tables when it is replayed, and offsets have 64 bits.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/verify.h"
#include "kernels/quantize.h"
#include "proto/page_layout.h"
#include "tests/kernels/cuda/device.h"
#include "tests/kernels/support.h"

namespace okv::cuda_test {
namespace {

using kernels_test::Lcg;
using kernels_test::OneRun;
using kernels_test::RandomBf16;

constexpr uint32_t kDim = 128;
constexpr uint32_t kBlocks = 4;

// Seals up to four blocks of one head into slots, makes their checksums, verifies them and brings
// the rows back.
class Chain {
 public:
  // Block b is at slot * block_stride behind `pool`.
  Chain(uint8_t* pool, int64_t block_stride, const int32_t* table)
      : k_(Rows(1)),
        v_(Rows(2)),
        k_out_(std::vector<uint16_t>(k_host_.size())),
        v_out_(std::vector<uint16_t>(v_host_.size())) {
    quantize = {.layers_count = 1,
                .kv_heads = 1,
                .head_dim = kDim,
                .group_size = kDim,
                .blocks_count = kBlocks,
                .tokens_count = tokens_count.get(),
                .k = PlainRows(AsBf16(k_), kBlocks * 64, 1, kDim),
                .v = PlainRows(AsBf16(v_), kBlocks * 64, 1, kDim),
                .tokens = {},
                .rotations = {},
                .clip_rank_k = nullptr,
                .clip_rank_v = nullptr,
                .pages = {.base = pool,
                          .block_stride = block_stride,
                          .layer_stride = 0,
                          .head_stride = 0,
                          .table = table},
                .bad_row = bad_row.get()};
    const cuda::ConstPages pages = {.base = pool,
                                    .block_stride = block_stride,
                                    .layer_stride = 0,
                                    .head_stride = 0,
                                    .table = table};
    runs = {.blocks_count = kBlocks,
            .layers_count = 1,
            .kv_heads = 1,
            .first_layer = 0,
            .first_head = 0,
            .run_bytes = static_cast<uint32_t>(OneRun(kDim, kDim).run_bytes(Codec::kInt2)),
            .codec = static_cast<uint8_t>(Codec::kInt2),
            .keys = keys.get(),
            .pages = pages};
    dequantize = {.layers_count = 1,
                  .kv_heads = 1,
                  .head_dim = kDim,
                  .group_size = kDim,
                  .blocks_count = kBlocks,
                  .pages = pages,
                  .rotations = {},
                  .k = PlainRows(AsMutableBf16(k_out_), kBlocks * 64, 1, kDim),
                  .v = PlainRows(AsMutableBf16(v_out_), kBlocks * 64, 1, kDim),
                  .tokens = {}};
  }

  void Queue(cudaStream_t stream) const {
    EXPECT_CUDA_OK(cuda::QuantizePages(quantize, stream));
    EXPECT_CUDA_OK(cuda::ChecksumRuns(runs, checksums.get(), stream));
    EXPECT_CUDA_OK(cuda::VerifyRuns(runs, checksums.get(),
                                    {.count = failures.get(), .bits = failed_bits.get()}, stream));
    EXPECT_CUDA_OK(cuda::DequantizePages(dequantize, stream));
  }

  // The run of block b as the twin makes it, and the rows it reads in it.
  std::vector<uint8_t> Run(uint32_t b, std::vector<uint16_t>* k, std::vector<uint16_t>* v) const {
    std::vector<uint8_t> run(runs.run_bytes);
    BadRow bad;
    EXPECT_TRUE(reference::QuantizeRun({.k = &k_host_[b * 64 * kDim],
                                        .v = &v_host_[b * 64 * kDim],
                                        .row_stride = kDim,
                                        .dim = kDim,
                                        .group_size = kDim,
                                        .clip_rank_k = 0,
                                        .clip_rank_v = 0},
                                       run.data(), &bad)
                    .ok());
    k->resize(64 * kDim);
    v->resize(64 * kDim);
    reference::DequantizeRun({.run = run.data(), .dim = kDim, .group_size = kDim}, k->data(),
                             v->data());
    return run;
  }
  // Checks that block b came back, and nothing failed.
  void ExpectBlock(uint32_t b) const {
    std::vector<uint16_t> k, v;
    Run(b, &k, &v);
    const std::vector<uint16_t> k_made = k_out_.Read();
    const std::vector<uint16_t> v_made = v_out_.Read();
    EXPECT_TRUE(std::equal(k.begin(), k.end(), &k_made[b * 64 * kDim])) << "block " << b;
    EXPECT_TRUE(std::equal(v.begin(), v.end(), &v_made[b * 64 * kDim])) << "block " << b;
    EXPECT_EQ(failures.Read()[0], 0u);
    EXPECT_EQ(bad_row.Read()[0], cuda::kNoBadRow);
  }

  const OnDevice<int32_t> tokens_count{{kBlocks * 64}};
  const OnDevice<uint64_t> bad_row{{cuda::kNoBadRow}};
  const OnDevice<uint64_t> keys{std::vector<uint64_t>(4 * kBlocks, 0x0123456789abcdef)};
  const OnDevice<uint32_t> checksums{std::vector<uint32_t>(kBlocks)};
  const OnDevice<uint32_t> failures{{77}};
  const OnDevice<uint32_t> failed_bits{{77}};
  cuda::QuantizePagesParams quantize;
  cuda::RunSet runs;
  cuda::DequantizePagesParams dequantize;

 private:
  static std::vector<uint16_t> Rows(uint64_t seed) {
    Lcg lcg(seed);
    return RandomBf16(&lcg, kBlocks * 64 * kDim, 1.0f);
  }

  const std::vector<uint16_t> k_host_ = Rows(1);
  const std::vector<uint16_t> v_host_ = Rows(2);
  const OnDevice<uint16_t> k_;
  const OnDevice<uint16_t> v_;
  const OnDevice<uint16_t> k_out_;
  const OnDevice<uint16_t> v_out_;
};

class CaptureCudaTest : public CudaTest {};

TEST_F(CaptureCudaTest, AReplayedGraphFollowsTablesAndCounts) {
  const size_t run_bytes = OneRun(kDim, kDim).run_bytes(Codec::kInt2);
  const OnDevice<uint8_t> pool(std::vector<uint8_t>(8 * run_bytes, 0xcd));
  const OnDevice<int32_t> table(std::vector<int32_t>(kBlocks, -1));
  const Chain chain(pool.get(), static_cast<int64_t>(run_bytes), table.get());
  ASSERT_CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  chain.Queue(stream_);
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA_OK(cudaStreamEndCapture(stream_, &graph));
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  ASSERT_CUDA_OK(cudaGraphDestroy(graph));
  std::vector<uint8_t> wanted(8 * run_bytes, 0xcd);
  std::vector<uint16_t> k, v;
  const std::vector<int32_t> tables[] = {{3, -1, 0, 7}, {-1, 5, 1, 2}};
  const int32_t tokens[] = {256, 255};
  for (int i = 0; i < 2; ++i) {
    ASSERT_CUDA_OK(cudaMemcpy(table.get(), tables[i].data(), 16, cudaMemcpyHostToDevice));
    ASSERT_CUDA_OK(cudaMemcpy(chain.tokens_count.get(), &tokens[i], 4, cudaMemcpyHostToDevice));
    ASSERT_CUDA_OK(cudaGraphLaunch(executable, stream_));
    Wait();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (tables[i][b] < 0 || static_cast<int32_t>(b) >= tokens[i] / 64) continue;
      const std::vector<uint8_t> run = chain.Run(b, &k, &v);
      std::copy(run.begin(), run.end(), &wanted[tables[i][b] * run_bytes]);
      chain.ExpectBlock(b);
    }
    EXPECT_TRUE(kernels_test::SameBits(pool.Read(), wanted)) << "replay " << i;
  }
  ASSERT_CUDA_OK(cudaGraphExecDestroy(executable));
}

TEST_F(CaptureCudaTest, BlocksBeyondFourGibibytesAreFound) {
  constexpr int64_t kStride = int64_t{1} << 28;
  cuda::DeviceBuffer pool;
  if (pool.Allocate(20 * kStride) != cudaSuccess) GTEST_SKIP() << "no 5 GiB of GPU memory free";
  const OnDevice<int32_t> table({19, 0, 16, 8});  // 4.75, 0, 4 and 2 GiB
  const Chain chain(pool.data(), kStride, table.get());
  chain.Queue(stream_);
  Wait();
  std::vector<uint16_t> k, v;
  const std::vector<int32_t> slots = table.Read();
  for (uint32_t b = 0; b < kBlocks; ++b) {
    const std::vector<uint8_t> wanted = chain.Run(b, &k, &v);
    std::vector<uint8_t> made(wanted.size());
    ASSERT_CUDA_OK(cudaMemcpy(made.data(), pool.data() + slots[b] * kStride, made.size(),
                              cudaMemcpyDeviceToHost));
    EXPECT_TRUE(kernels_test::SameBits(made, wanted)) << "block " << b;
    chain.ExpectBlock(b);
  }
  // Rows in pages up to 4.5 GiB away.
  cuda::DequantizePagesParams far = chain.dequantize;
  const OnDevice<int32_t> pages({3, 18, 17, 5});
  far.k = {.base = pool.as<__nv_bfloat16>() + (kStride / 4),
           .layer_stride = 0,
           .page_stride = kStride / 2,
           .token_stride = kDim,
           .head_stride = 0,
           .page_tokens = 64};
  far.v = far.k;
  far.v.base += 64 * kDim;
  far.tokens = {.slots = nullptr, .pages = pages.get()};
  ASSERT_CUDA_OK(cuda::DequantizePages(far, stream_));
  Wait();
  chain.Run(1, &k, &v);
  std::vector<uint16_t> made(64 * kDim);
  ASSERT_CUDA_OK(cudaMemcpy(made.data(), far.v.base + 18 * (kStride / 2), made.size() * 2,
                            cudaMemcpyDeviceToHost));
  EXPECT_TRUE(kernels_test::SameBits(made, v));
}

}  // namespace
}  // namespace okv::cuda_test
