#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cmd/bench/cuda_codec.h"
#include "kernels/cuda/verify.h"
#include "proto/object.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Blocks of random bytes of one codec, contiguous, and what verification needs beside them.
struct Blocks {
  Codec codec;
  PageLayout layout;
  uint32_t blocks_count;
  cuda::DeviceBuffer pool;
  cuda::DeviceBuffer keys;
  cuda::DeviceBuffer checksums;
  cuda::DeviceBuffer failed_count;
  cuda::DeviceBuffer failed_bits;

  cuda::RunSet Runs() const {
    return {.blocks_count = blocks_count,
            .layers_count = layout.layers_count,
            .kv_heads = layout.kv_heads,
            .first_layer = 0,
            .first_head = 0,
            .run_bytes = static_cast<uint32_t>(layout.run_bytes(codec)),
            .codec = static_cast<uint8_t>(codec),
            .keys = keys.as<uint64_t>(),
            .pages = {.base = pool.data(),
                      .block_stride = static_cast<int64_t>(layout.block_bytes(codec)),
                      .layer_stride = static_cast<int64_t>(layout.page_bytes(codec)),
                      .head_stride = static_cast<int64_t>(layout.run_bytes(codec)),
                      .table = nullptr}};
  }
  cudaError_t QueueVerify(cudaStream_t stream) const {
    return cuda::VerifyRuns(
        Runs(), checksums.as<uint32_t>(),
        {.count = failed_count.as<uint32_t>(), .bits = failed_bits.as<uint32_t>()}, stream);
  }
};

std::string KeyBytes(uint32_t block) {
  std::string key(32, static_cast<char>(block * 7 + 1));
  key[5] = static_cast<char>(block >> 8);
  return key;
}

absl::StatusOr<Blocks> MakeBlocks(const CudaCodecOptions& options, Codec codec, size_t bytes) {
  const PageLayout layout = options.layout();
  Blocks blocks = {.codec = codec,
                   .layout = layout,
                   .blocks_count = static_cast<uint32_t>(bytes / layout.block_bytes(codec) + 1),
                   .pool = {},
                   .keys = {},
                   .checksums = {},
                   .failed_count = {},
                   .failed_bits = {}};
  OKV_ASSIGN_OR_RETURN(
      blocks.pool,
      RandomBf16OnDevice(blocks.blocks_count * layout.block_bytes(codec), 1.0f, options.seed));
  std::vector<char> keys;
  for (uint32_t b = 0; b < blocks.blocks_count; ++b) {
    const std::string key = KeyBytes(b);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  const size_t runs = blocks.blocks_count * layout.runs_count();
  OKV_ASSIGN_OR_RETURN(blocks.keys, DeviceCopyOf(keys));
  OKV_ASSIGN_OR_RETURN(blocks.checksums, AllocateDevice(runs * 4));
  OKV_ASSIGN_OR_RETURN(blocks.failed_count, AllocateDevice(4));
  OKV_ASSIGN_OR_RETURN(blocks.failed_bits, AllocateDevice((runs + 31) / 32 * 4));
  return blocks;
}

absl::StatusOr<uint32_t> FailedCount(const Blocks& blocks) {
  OKV_RETURN_IF_ERROR(CudaStatus(blocks.QueueVerify(nullptr), "verify"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "verify"));
  OKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> count,
                       HostCopyOf<uint32_t>(blocks.failed_count));
  return count[0];
}

// The last block's checksums against the CPU's; one flipped bit there is found, and nothing after
// it was flipped back.
absl::Status CheckSample(const Blocks& blocks) {
  const PageLayout& layout = blocks.layout;
  OKV_RETURN_IF_ERROR(CudaStatus(
      cuda::ChecksumRuns(blocks.Runs(), blocks.checksums.as<uint32_t>(), nullptr), "checksum"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "checksum"));
  const uint32_t last = blocks.blocks_count - 1;
  const size_t at = last * layout.block_bytes(blocks.codec);
  std::vector<uint8_t> payload(layout.block_bytes(blocks.codec));
  OKV_RETURN_IF_ERROR(CopyFromDevice(blocks.pool, at, absl::MakeSpan(payload)));
  OKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> checksums,
                       HostCopyOf<uint32_t>(blocks.checksums));
  const ObjectId id = {.key = *BlockKey::FromBytes(KeyBytes(last)), .codec = blocks.codec};
  const std::vector<uint32_t> expected = BlockChecksums(id, layout, payload);
  if (!std::equal(expected.begin(), expected.end(), checksums.end() - expected.size())) {
    return absl::InternalError("checksums differ from the CPU's");
  }
  std::vector<uint8_t> byte = {static_cast<uint8_t>(payload.back() ^ 0x10)};
  for (const uint32_t failed : {1u, 0u}) {
    OKV_RETURN_IF_ERROR(CopyToDevice(byte, at + payload.size() - 1, blocks.pool));
    OKV_ASSIGN_OR_RETURN(const uint32_t count, FailedCount(blocks));
    if (count != failed) {
      return absl::InternalError(absl::StrCat("verify found ", count, " bad runs of ", failed));
    }
    byte[0] = payload.back();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CudaBenchReport> RunCudaVerify(const CudaCodecOptions& options) {
  CudaBenchReport report;
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(options.Validate());
  const PageLayout layout = options.layout();
  report.shape = absl::StrCat(options.layers, " layers, ", options.kv_heads, " KV heads, d ",
                              options.head_dim, ", g ", options.group_size);
  std::vector<Blocks> all;
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  // Long enough to time, and a few blocks as one fetch brings them: those stay in the L2, as bytes
  // that have just arrived may.
  const size_t much = size_t{1} << 30;
  for (const auto& [codec, bytes] :
       {std::pair{Codec::kInt2, much}, std::pair{Codec::kBf16, much},
        std::pair{Codec::kInt2, size_t{0}}, std::pair{Codec::kBf16, size_t{0}}}) {
    OKV_ASSIGN_OR_RETURN(Blocks blocks, MakeBlocks(options, codec, bytes));
    OKV_RETURN_IF_ERROR(CheckSample(blocks));
    all.push_back(std::move(blocks));
  }
  for (const Blocks& blocks : all) {
    OKV_RETURN_IF_ERROR(
        timer->Add([&](cudaStream_t stream) { return blocks.QueueVerify(stream); }).status());
  }
  OKV_RETURN_IF_ERROR(timer->AddCopy(kCopyBytes).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(options.rounds));
  const double copy_rate = 2.0 * kCopyBytes / us.back();
  for (size_t i = 0; i < all.size(); ++i) {
    const Blocks& blocks = all[i];
    report.rows.push_back(
        {.name = absl::StrCat("verify ", blocks.blocks_count, " ", CodecName(blocks.codec),
                              " block(s), runs of ", layout.run_bytes(blocks.codec)),
         .us = us[i],
         .bytes = static_cast<double>(blocks.pool.bytes()),
         .copy_bytes_per_us = copy_rate});
  }
  report.rows[0].us_limit = report.rows[0].bytes / copy_rate / 0.6;
  return report;
}

}  // namespace okv
