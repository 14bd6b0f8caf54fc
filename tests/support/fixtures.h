#ifndef OKV_TESTS_SUPPORT_FIXTURES_H_
#define OKV_TESTS_SUPPORT_FIXTURES_H_

#include <bit>
#include <cmath>
#include <string>

#include "proto/bf16.h"
#include "proto/format.h"
#include "proto/rotation_set.h"

namespace okv::testing_support {

// A small geometry: 2 layers, 2 KV heads, head_dim 64, one group.
inline RotationSet SmallRotations(const std::string& method, uint32_t clip_rank) {
  RotationSet set;
  set.model = "small";
  set.weights_revision = "1";
  set.layer_ids = {0, 1};
  set.kv_heads = 2;
  set.head_dim = 64;
  set.group_size = 64;
  set.method = method;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t i = 0; i < 64; ++i) {
      for (uint32_t j = 0; j < 64; ++j) {
        const float hadamard = (std::popcount(i & j) & 1) != 0 ? -0.125f : 0.125f;
        set.r_k.push_back(FloatToBf16(method == "none" ? (i == j ? 1.0f : 0.0f) : hadamard));
      }
    }
  }
  set.r_v = set.r_k;
  set.clip_rank_k.assign(4, clip_rank);
  set.clip_rank_v.assign(4, clip_rank);
  return set;
}

inline Format SmallFormat(const RotationSet& rotations) {
  Format format;
  format.model = rotations.model;
  format.weights_revision = rotations.weights_revision;
  format.layer_ids = rotations.layer_ids;
  format.kv_heads = rotations.kv_heads;
  format.head_dim_k = rotations.head_dim;
  format.head_dim_v = rotations.head_dim;
  format.rope_theta = 10000;
  format.group_size = rotations.group_size;
  format.rotation_hash = rotations.hash();
  return format;
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_SUPPORT_FIXTURES_H_
