#ifndef OKV_CMD_BENCH_CONTENDER_H_
#define OKV_CMD_BENCH_CONTENDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cmd/engine/model.h"
#include "cmd/support/kv.h"
#include "kernels/thread_pool.h"
#include "proto/format.h"
#include "proto/rotation_set.h"

namespace okv {

inline constexpr char kBf16Name[] = "bf16";
// Bits of a code of the int2 codec.
inline constexpr uint32_t kInt2Bits = 2;

// One way to keep the KV cache of a sequence, under a name. A plain value; it outlives the caches
// made from it.
struct Contender {
  std::string name;
  RotationSet rotations;
  Format format;
  // kInt2Bits: the client library's Sequence. Otherwise a FakeQuantizedCache of so many bits.
  uint32_t history_bits = kInt2Bits;
};

// The baseline: no block is ever demoted.
Contender MakeBf16Contender(const ModelConfig& config);

struct ContenderOptions {
  std::string name;
  FormatOptions windows;
  uint32_t history_bits = kInt2Bits;
};
// kInvalidArgument: windows or a group size that no format has; kFailedPrecondition: a set for
// another model, revision or geometry. The message begins with the name.
absl::StatusOr<Contender> MakeContender(const ModelConfig& config, RotationSet rotations,
                                        const ContenderOptions& options);

// An empty cache for up to tokens_max tokens. Errors as Sequence::Create.
absl::StatusOr<std::unique_ptr<KvCache>> MakeCache(const ModelConfig& config,
                                                   const Contender& contender, uint32_t tokens_max,
                                                   ThreadPool* pool);

// Bits a K or V element takes, scales and offsets included.
struct BitsPerElement {
  double history = 0;  // Of a demoted block; 16 when the sequence has none.
  double all = 0;      // Over the whole sequence: sink and recent tokens are BF16.
  // Tokens that the last one reads from demoted blocks; 0: the figures say nothing about INT2.
  uint32_t history_tokens = 0;
};
// REQUIRES: tokens_count > 0, the sequence's length.
BitsPerElement CountBits(const Contender& contender, uint32_t tokens_count);

// "name=file,name=file": kInvalidArgument naming the piece that is not, or the name used twice.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseRotationsFlag(
    absl::string_view flag);
// "SINK/RECENT,SINK/RECENT" in tokens: kInvalidArgument naming the piece that is not, or that
// stands twice. Whether a format has such windows is MakeContender's to say.
absl::StatusOr<std::vector<FormatOptions>> ParseWindowsFlag(absl::string_view flag);

}  // namespace okv

#endif  // OKV_CMD_BENCH_CONTENDER_H_
