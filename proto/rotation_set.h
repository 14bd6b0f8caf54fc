#ifndef OKV_PROTO_ROTATION_SET_H_
#define OKV_PROTO_ROTATION_SET_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/format.h"

namespace okv {

// The rotations and clip ranks of one model, the bits that every process must agree on. A plain
// value; `hash()` is its identity and goes into Format::rotation_hash.
struct RotationSet {
  std::string model;
  std::string weights_revision;
  std::vector<uint32_t> layer_ids;  // Ascending.
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t group_size = 0;      // The group that P_br was built for.
  uint32_t rotation_heads = 1;  // 1: one rotation a layer; kv_heads: one a head.
  std::string method;           // "oscar", "hadamard", "none".

  // R as row vectors use it: y = x R, [layers, rotation_heads, head_dim, head_dim] bf16, row-major.
  std::vector<uint16_t> r_k;
  std::vector<uint16_t> r_v;
  // Clip ranks [layers, kv_heads]: 0 = off, otherwise t = the k-th smallest |y| of a row (0-based).
  std::vector<uint32_t> clip_rank_k;
  std::vector<uint32_t> clip_rank_v;

  // What calibration measured on the text that judged its choices: sum |y^ - y|^2 over sum |y|^2, y
  // the rotated bf16 rows of a layer's heads together, y^ what the codec gives back; [layers], or
  // empty: nothing was promised. Not part of the hash: no bit of a page depends on it.
  std::vector<float> promised_error_k;
  std::vector<float> promised_error_v;

  // Free text for people: data, token count, date, program version. Not part of the hash.
  std::map<std::string, std::string> provenance;

  bool operator==(const RotationSet&) const = default;

  const uint16_t* RotationK(uint32_t layer, uint32_t head) const {
    return r_k.data() + MatrixOffset(layer, head);
  }
  const uint16_t* RotationV(uint32_t layer, uint32_t head) const {
    return r_v.data() + MatrixOffset(layer, head);
  }

  // kInvalidArgument naming what is wrong: a field, sizes, a NaN or Inf (tensor, layer, head), a
  // matrix whose max |R R^T - I| exceeds 2^-6 (bf16 rounding alone gives about 2^-9), a clip rank
  // >= head_dim, a promised error that is negative or not finite.
  absl::Status Validate() const;

  // SHA-256 over a canonical encoding of everything but promised errors and provenance.
  RotationHash hash() const;

  // One safetensors file: tensors r_k, r_v (BF16), clip_rank_k, clip_rank_v (U32), those of
  // promised_error_k, promised_error_v (F32) that are not empty; the rest, the hash included, in
  // __metadata__. The same set gives the same bytes. REQUIRES: Validate() is OK.
  std::string Serialize() const;
  // kInvalidArgument: not safetensors, a tensor or field missing or of the wrong shape, or
  // Validate() fails. kDataLoss: truncated, or the stored hash is not that of the content.
  static absl::StatusOr<RotationSet> Parse(absl::string_view bytes);

  // kFailedPrecondition naming the field when this set is for another model, revision or geometry
  // than `format`, or its hash is not format.rotation_hash.
  absl::Status CheckMatches(const Format& format) const;

 private:
  size_t MatrixOffset(uint32_t layer, uint32_t head) const {
    const size_t matrix = rotation_heads == 1 ? layer : size_t{layer} * rotation_heads + head;
    return matrix * head_dim * head_dim;
  }
};

}  // namespace okv

#endif  // OKV_PROTO_ROTATION_SET_H_
