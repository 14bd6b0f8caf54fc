#include "tests/proto/examples.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "proto/bf16.h"

namespace okv::examples {
namespace {

constexpr uint32_t kDim = 64;
constexpr uint32_t kGroupSize = 32;

void PutU16(std::vector<uint8_t>* bytes, size_t at, uint16_t value) {
  (*bytes)[at] = static_cast<uint8_t>(value);
  (*bytes)[at + 1] = static_cast<uint8_t>(value >> 8);
}

void PutParameter(std::vector<uint8_t>* bytes, size_t at, float scale, float offset) {
  PutU16(bytes, at, FloatToBf16(scale));
  PutU16(bytes, at + 2, FloatToBf16(offset));
}

}  // namespace

RotationSet Rotations() {
  RotationSet set;
  set.model = "SmolLM2-135M-Instruct";
  set.weights_revision = "r1";
  set.layer_ids = {0};
  set.kv_heads = 2;
  set.head_dim = kDim;
  set.group_size = kGroupSize;
  set.method = "hadamard";
  for (uint32_t i = 0; i < kDim; ++i) {
    for (uint32_t j = 0; j < kDim; ++j) {
      set.r_k.push_back(FloatToBf16((std::popcount(i & j) & 1) != 0 ? -0.125f : 0.125f));
    }
  }
  set.r_v = set.r_k;
  set.clip_rank_k = {61, 0};
  set.clip_rank_v = {58, 63};
  set.provenance = {{"data", "none"}};
  return set;
}

Format ExampleFormat() {
  const RotationSet rotations = Rotations();
  Format format;
  format.model = rotations.model;
  format.weights_revision = rotations.weights_revision;
  format.layer_ids = rotations.layer_ids;
  format.kv_heads = rotations.kv_heads;
  format.head_dim_k = rotations.head_dim;
  format.head_dim_v = rotations.head_dim;
  format.rope_theta = 100000;
  format.group_size = rotations.group_size;
  format.rotation_hash = rotations.hash();
  return format;
}

std::vector<uint32_t> Tokens(size_t count) {
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint32_t>(1000 + i));
  return tokens;
}

std::vector<BlockKey> Keys() {
  return ComputeBlockKeys(ExampleFormat().id(), "acme", Tokens(192), {});
}

std::vector<uint8_t> Int2Run(uint32_t head) {
  constexpr uint32_t kGroups = kDim / kGroupSize;
  std::vector<uint8_t> run(32 * kDim + 512 * kGroups);
  for (uint32_t t = 0; t < 64; ++t) {
    for (uint32_t ch = 0; ch < kDim; ++ch) {
      const uint32_t j = ch / 16;
      const uint32_t r = ch % 16;
      const uint32_t k_code = (t + t / 8 + ch + ch / 16 + head) % 4;
      run[t / 32 * 512 + (t % 8 * 4 + r / 4) * 16 + t / 8 % 4 * 4 + r % 4] |=
          static_cast<uint8_t>(k_code << (2 * j));
      const uint32_t v_code = (t + t / 8 + ch / 2 + ch / 8 + ch / 16 + head) % 4;
      run[16 * kDim + t / 32 * 512 + (r % 8 * 4 + t % 8 / 2) * 16 + (r / 8 + t / 16 % 2 * 2) * 4 +
          t % 2 * 2 + t / 8 % 2] |= static_cast<uint8_t>(v_code << (2 * j));
    }
    const size_t words = 32 * kDim + (t / 16 * 8 + t % 8) * kGroups * 16 + t / 8 % 2 * 4;
    PutParameter(&run, words, 1.0f, -1.5f);
    PutParameter(&run, words + 16, 2.0f, -3.0f);
    PutParameter(&run, words + 8, 0.5f, 0.0f);
    PutParameter(&run, words + 24, 0.25f, -0.5f);
  }
  return run;
}

std::vector<uint8_t> Bf16Run() {
  std::vector<uint8_t> run(2 * 64 * kDim * 2);
  for (uint32_t t = 0; t < 64; ++t) {
    for (uint32_t ch = 0; ch < kDim; ++ch) {
      PutU16(&run, (t * kDim + ch) * 2, FloatToBf16(static_cast<float>(t)));
      PutU16(&run, (64 * kDim + t * kDim + ch) * 2, FloatToBf16(-static_cast<float>(ch)));
    }
  }
  return run;
}

std::vector<uint8_t> Payload() {
  std::vector<uint8_t> payload = Int2Run(0);
  const std::vector<uint8_t> second = Int2Run(1);
  payload.insert(payload.end(), second.begin(), second.end());
  return payload;
}

ObjectHeader Header() {
  const std::vector<uint8_t> payload = Payload();
  const std::vector<BlockKey> keys = Keys();
  ObjectHeader header;
  header.format_id = ExampleFormat().id();
  header.id = {.key = keys[1], .codec = Codec::kInt2};
  header.parent = keys[0];
  header.index = BlockIndex(1);
  header.payload_bytes = payload.size();
  header.generation = 7;
  header.checksums = BlockChecksums(header.id, PageLayout::Of(ExampleFormat()), payload);
  return header;
}

Ticket ExampleTicket() {
  return {.tenant = "acme",
          .format_id = ExampleFormat().id(),
          .expires_wall_us = kNowWallUs + 3'600'000'000};
}

Reservation ExampleReservation() {
  return {.tenant = "acme",
          .format_id = ExampleFormat().id(),
          .object = {.key = Keys()[1], .codec = Codec::kBf16},
          .node_id = "node-1",
          .write_id = WriteId(7),
          .expires_wall_us = kNowWallUs + 60'000'000};
}

uint64_t Seed() {
  const char* given = std::getenv("OKV_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 0) : uint64_t{std::random_device()()};
  std::printf("OKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace okv::examples
