#ifndef OKV_TESTS_CACHE_NODE_OBJECTS_H_
#define OKV_TESTS_CACHE_NODE_OBJECTS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache_node/node_metrics.h"
#include "cache_node/storage.h"
#include "cache_node/tiers/tier.h"
#include "proto/check.h"
#include "proto/clock.h"
#include "proto/object.h"
#include "tests/support/fixtures.h"
#include "tests/support/process.h"

namespace okv::testing_support {

// A small format (an int2 block is 10,240 B, a bf16 block 65,536 B).
inline const Format& TestFormat() {
  static const Format& format = *new Format(SmallFormat(SmallRotations("hadamard", 0)));
  return format;
}

inline BlockKey TestKey(uint32_t number) {
  std::string text = "block " + std::to_string(number);
  return BlockKey{.bytes = Sha256(text)};
}

struct TestObject {
  ObjectRef object;
  std::vector<uint8_t> payload;
  const ObjectHeader& header() const { return object->header; }
  const ObjectId& id() const { return object->header.id; }
};

struct ObjectSpec {
  uint32_t number = 0;  // Names key, contents and block index.
  Codec codec = Codec::kInt2;
  std::string tenant = "tenant";
  uint64_t write_id = 1;
  uint32_t chain_blocks = 0;  // Blocks 0..chain_blocks-1 are a chain, and so on; 0: all are one.
};

inline TestObject MakeObject(const ObjectSpec& spec, const Format& format = TestFormat()) {
  const PageLayout layout = PageLayout::Of(format);
  TestObject made;
  made.payload.resize(layout.block_bytes(spec.codec));
  std::mt19937_64 random(spec.number * 2 + (spec.codec == Codec::kBf16 ? 1 : 0));
  for (uint8_t& byte : made.payload) byte = static_cast<uint8_t>(random());
  ObjectHeader header;
  header.format_id = format.id();
  header.id = {.key = TestKey(spec.number), .codec = spec.codec};
  const uint32_t index = spec.chain_blocks > 0 ? spec.number % spec.chain_blocks : spec.number;
  if (index > 0) header.parent = TestKey(spec.number - 1);
  header.index = BlockIndex(index);
  header.payload_bytes = made.payload.size();
  header.generation = spec.write_id;
  header.checksums = BlockChecksums(header.id, layout, made.payload);
  made.object = std::make_shared<const HeldObject>(
      HeldObject{.header = header, .tenant = spec.tenant, .layout = layout});
  return made;
}

// Storage in a directory, without the rest of a node.
struct TestStorage {
  NodeMetrics metrics;
  const Clock* clock = Clock::System();
  std::function<void(const ObjectId&, const absl::Status&)> on_removed = [](const ObjectId&,
                                                                            const absl::Status&) {};
  std::function<void(const std::string&, const ObjectId&)> on_damaged = [](const std::string&,
                                                                           const ObjectId&) {};
  std::function<void(const std::string&)> log = [](const std::string&) {};
  std::unique_ptr<Storage> storage;

  absl::Status Open(const StorageOptions& options) {
    absl::StatusOr<std::unique_ptr<Storage>> opened = Storage::Open(
        options,
        {.metrics = &metrics,
         .clock = clock,
         .on_removed = [this](const ObjectId& id, const absl::Status& why) { on_removed(id, why); },
         .on_damaged = [this](const std::string& tenant,
                              const ObjectId& id) { on_damaged(tenant, id); },
         .log = [this](const std::string& line) { log(line); }});
    if (!opened.ok()) return opened.status();
    storage = *std::move(opened);
    metrics.SetSources({.table = storage->table(),
                        .tiers = storage->tiers(),
                        .sessions_count = {},
                        .index_recovery = [this] { return storage->disk()->recovery(); }});
    return absl::OkStatus();
  }
  // As a node that stops.
  void Close() {
    storage->StopSpilling();
    storage->SpillRest(10'000'000'000);
    metrics.ClearSources();
    storage.reset();
  }
  ~TestStorage() { metrics.ClearSources(); }

  // As a put does, without the network: blocks until there is room.
  absl::Status Write(const TestObject& object) {
    absl::StatusOr<WriteClaim> claim = storage->table()->Claim(object.id(), object.header().parent);
    if (!claim.ok()) return claim.status();
    absl::StatusOr<Extent> extent = AllocateAndWait(object.payload.size(), claim->parent_is_here());
    if (!extent.ok()) return extent.status();
    std::copy(object.payload.begin(), object.payload.end(), extent->span().data());
    storage->table()->Commit(*std::move(claim), object.object, *std::move(extent));
    return absl::OkStatus();
  }
  absl::StatusOr<Extent> AllocateAndWait(size_t bytes, bool may_drop = true) {
    std::promise<absl::StatusOr<Extent>> promise;
    storage->spiller()->Allocate(bytes, may_drop, [&promise](absl::StatusOr<Extent> extent) {
      promise.set_value(std::move(extent));
    });
    return promise.get_future().get();
  }
  // As a fetch does, without the network.
  absl::StatusOr<std::vector<uint8_t>> Read(const ObjectId& id) {
    absl::StatusOr<ObjectPin> pin = storage->table()->Pin(id);
    if (!pin.ok()) return pin.status();
    absl::StatusOr<AlignedBuffer> own = storage->spiller()->Load(&*pin);
    if (!own.ok()) return own.status();
    const size_t bytes = pin->object().header.payload_bytes;
    const uint8_t* payload = *own != nullptr ? own->get() : pin->dram().data();
    return std::vector<uint8_t>(payload, payload + bytes);
  }

  // Value of one line of /metrics; -1 when it is not there.
  double Metric(const std::string& series) const {
    const std::string text = metrics.Text();
    const size_t at = text.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
  }
};

inline StorageOptions TestStorageOptions(const std::string& data_dir) {
  StorageOptions options;
  options.pool = {.arena_bytes = uint64_t{1} << 20, .prefault = true, .progress = {}};
  options.disk = {
      .data_dir = data_dir, .disk_bytes = uint64_t{64} << 20, .node_id = "", .free_floor_bytes = 0};
  return options;
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_OBJECTS_H_
