#ifndef OKV_CMD_BENCH_STORED_BLOCKS_H_
#define OKV_CMD_BENCH_STORED_BLOCKS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache_node/node_metrics.h"
#include "cache_node/storage.h"
#include "cache_node/tiers/tier.h"
#include "proto/format.h"

namespace okv {

// What the storage benchmarks store: chains of INT2 blocks of one format, with true checksums.

struct BlocksShape {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t group_size = 0;
};
// kInvalidArgument naming the field.
absl::StatusOr<Format> BenchFormat(const BlocksShape& shape);

// Block `number` of chains of 256; its checksums are those of `payload`.
ObjectRef BenchBlock(const Format& format, const FormatId& format_id, uint32_t number,
                     absl::Span<const uint8_t> payload);
// Bytes that look like codes, other ones for each number.
void FillPayload(uint32_t number, absl::Span<uint8_t> payload);

// Storage without the rest of a node.
class BenchStorage {
 public:
  struct Options {
    std::string data_dir;
    uint64_t dram_bytes = 0;
    uint64_t disk_bytes = 0;
  };
  static absl::StatusOr<std::unique_ptr<BenchStorage>> Open(const Options& options);
  Storage* operator->() { return storage_.get(); }

 private:
  NodeMetrics metrics_;
  std::unique_ptr<Storage> storage_;
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_STORED_BLOCKS_H_
