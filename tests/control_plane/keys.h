#ifndef OKV_TESTS_CONTROL_PLANE_KEYS_H_
#define OKV_TESTS_CONTROL_PLANE_KEYS_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/sha256.h"

namespace okv::testing_support {

// Block `index` of a sequence that is only a number.
inline BlockKey TestKey(uint32_t sequence, uint32_t index) {
  BlockKey key;
  key.bytes = Sha256(absl::StrCat("test key ", sequence, "/", index));
  return key;
}

inline std::vector<BlockKey> ChainKeys(uint32_t sequence, uint32_t count) {
  std::vector<BlockKey> keys;
  keys.reserve(count);
  for (uint32_t i = 0; i < count; ++i) keys.push_back(TestKey(sequence, i));
  return keys;
}

// The seed of a random test: printed, and OKV_TEST_SEED gives it.
inline uint64_t Seed() {
  const char* given = std::getenv("OKV_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 0) : uint64_t{std::random_device()()};
  std::printf("OKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CONTROL_PLANE_KEYS_H_
