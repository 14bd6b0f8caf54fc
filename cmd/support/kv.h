#ifndef OKV_CMD_SUPPORT_KV_H_
#define OKV_CMD_SUPPORT_KV_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "calib/dump.h"
#include "client/sequence.h"
#include "cmd/engine/model.h"
#include "cmd/engine/tokenizer.h"
#include "proto/format.h"
#include "proto/rotation_set.h"

namespace okv {

// What joins the reference engine to the client library.

struct FormatOptions {
  uint32_t sink_tokens = 64;
  uint32_t recent_tokens = 256;
};

// The format of `config`'s cache under `rotations`.
Format MakeFormat(const ModelConfig& config, const RotationSet& rotations,
                  const FormatOptions& options);

// A window so wide that no block is ever demoted: plain BF16 KV, the baseline.
inline constexpr uint32_t kBf16RecentTokens = 1u << 20;

// Rotations that change nothing and clip nothing: what a BF16 cache uses.
RotationSet IdentityRotations(const ModelConfig& config);

// kInvalidArgument or kDataLoss naming the file; kNotFound when there is none.
absl::StatusOr<RotationSet> ReadRotationFile(const std::string& path);

// kInvalidArgument naming --threads when there are more than a machine may have.
absl::Status ValidateThreads(uint32_t threads);

struct TokenRange {
  uint32_t skip_tokens = 0;
  uint32_t tokens_count = 0;
  bool rest_too = false;  // Not only these: all from skip_tokens on.
};
// Tokens [skip, skip + count) of a text file. kInvalidArgument when the text has fewer.
absl::StatusOr<std::vector<uint32_t>> ReadTokens(const Tokenizer& tokenizer,
                                                 const std::string& path, const TokenRange& range);

// What Sequence::Create needs to know of `config` under `format`.
SequenceOptions MakeSequenceOptions(const ModelConfig& config, const Format& format,
                                    uint32_t tokens_max);
// An empty sequence with these options.
absl::StatusOr<std::unique_ptr<Sequence>> MakeSequence(const ModelConfig& config,
                                                       const Format& format,
                                                       const RotationSet* rotations,
                                                       uint32_t tokens_max, ThreadPool* pool);

// The engine's view of a Sequence. Thread-compatible; `sequence` and `dump` outlive it.
class SequenceCache final : public KvCache {
 public:
  // With `dump`, every appended row also goes there.
  explicit SequenceCache(Sequence* sequence, DumpWriter* dump = nullptr)
      : sequence_(sequence), dump_(dump) {}

  absl::Status Append(const AppendRows& rows) override;
  uint32_t tokens_count() const override { return sequence_->tokens_count(); }

 private:
  Sequence* const sequence_;
  DumpWriter* const dump_;
};

}  // namespace okv

#endif  // OKV_CMD_SUPPORT_KV_H_
