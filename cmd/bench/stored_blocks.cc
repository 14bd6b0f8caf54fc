#include "cmd/bench/stored_blocks.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/clock.h"
#include "proto/object.h"
#include "proto/page_layout.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kChainBlocks = 256;

BlockKey KeyOf(uint32_t number) {
  return BlockKey{.bytes = Sha256(absl::StrCat("bench block ", number))};
}

}  // namespace

absl::StatusOr<Format> BenchFormat(const BlocksShape& shape) {
  Format format;
  format.model = "bench";
  format.weights_revision = "1";
  for (uint32_t layer = 0; layer < shape.layers; ++layer) format.layer_ids.push_back(layer);
  format.kv_heads = shape.kv_heads;
  format.head_dim_k = format.head_dim_v = shape.head_dim;
  format.rope_theta = 10000;
  format.group_size = shape.group_size;
  format.rotation_hash.bytes = Sha256("bench");
  OKV_RETURN_IF_ERROR(format.Validate());
  return format;
}

ObjectRef BenchBlock(const Format& format, const FormatId& format_id, uint32_t number,
                     absl::Span<const uint8_t> payload) {
  const PageLayout layout = PageLayout::Of(format);
  ObjectHeader header;
  header.format_id = format_id;
  header.id = {.key = KeyOf(number), .codec = Codec::kInt2};
  header.index = BlockIndex(number % kChainBlocks);
  if (header.index.value() > 0) header.parent = KeyOf(number - 1);
  header.payload_bytes = payload.size();
  header.generation = number;
  header.checksums = BlockChecksums(header.id, layout, payload);
  return std::make_shared<const HeldObject>(
      HeldObject{.header = std::move(header), .tenant = "bench", .layout = layout});
}

void FillPayload(uint32_t number, absl::Span<uint8_t> payload) {
  uint64_t state = number * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i + sizeof(state) <= payload.size(); i += sizeof(state)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(payload.data() + i, &state, sizeof(state));
  }
}

absl::StatusOr<std::unique_ptr<BenchStorage>> BenchStorage::Open(const Options& options) {
  auto bench = std::make_unique<BenchStorage>();
  StorageOptions storage;
  storage.pool.arena_bytes = options.dram_bytes;
  storage.pool.progress = [](uint64_t, uint64_t) {};
  storage.disk.data_dir = options.data_dir;
  storage.disk.disk_bytes = options.disk_bytes;
  OKV_ASSIGN_OR_RETURN(
      bench->storage_,
      Storage::Open(storage, {.metrics = &bench->metrics_,
                              .clock = Clock::System(),
                              .on_removed = [](const ObjectId&, const absl::Status&) {},
                              .log =
                                  [](const std::string& line) {
                                    std::fprintf(stderr, "okv-bench: %s\n", line.c_str());
                                  }}));
  return bench;
}

}  // namespace okv
