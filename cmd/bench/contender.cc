#include "cmd/bench/contender.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/fake_quantized_cache.h"
#include "proto/check.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

class OwnedSequenceCache final : public KvCache {
 public:
  explicit OwnedSequenceCache(std::unique_ptr<Sequence> sequence)
      : sequence_(std::move(sequence)), cache_(sequence_.get()) {}

  absl::Status Append(const AppendRows& rows) override { return cache_.Append(rows); }
  uint32_t tokens_count() const override { return cache_.tokens_count(); }

 private:
  const std::unique_ptr<Sequence> sequence_;
  SequenceCache cache_;
};

}  // namespace

Contender MakeBf16Contender(const ModelConfig& config) {
  Contender contender{.name = kBf16Name, .rotations = IdentityRotations(config), .format = {}};
  contender.format = MakeFormat(config, contender.rotations, {.recent_tokens = kBf16RecentTokens});
  return contender;
}

absl::StatusOr<Contender> MakeContender(const ModelConfig& config, RotationSet rotations,
                                        const ContenderOptions& options) {
  Contender contender{.name = options.name,
                      .rotations = std::move(rotations),
                      .format = {},
                      .history_bits = options.history_bits};
  contender.format = MakeFormat(config, contender.rotations, options.windows);
  absl::Status status = contender.format.Validate();
  status.Update(contender.rotations.CheckMatches(contender.format));
  if (status.ok()) return contender;
  return absl::Status(status.code(),
                      absl::StrCat("'", options.name, "': ", absl::string_view(status.message())));
}

absl::StatusOr<std::unique_ptr<KvCache>> MakeCache(const ModelConfig& config,
                                                   const Contender& contender, uint32_t tokens_max,
                                                   ThreadPool* pool) {
  if (contender.history_bits != kInt2Bits) {
    return std::make_unique<FakeQuantizedCache>(config, contender.format, &contender.rotations,
                                                contender.history_bits, pool);
  }
  OKV_ASSIGN_OR_RETURN(
      std::unique_ptr<Sequence> sequence,
      MakeSequence(config, contender.format, &contender.rotations, tokens_max, pool));
  return std::make_unique<OwnedSequenceCache>(std::move(sequence));
}

BitsPerElement CountBits(const Contender& contender, uint32_t tokens_count) {
  OKV_CHECK(tokens_count > 0);
  const PageLayout layout = PageLayout::Of(contender.format);
  const auto block_bits = [&layout](Codec codec) {
    return 8 * static_cast<double>(layout.block_bytes(codec)) /
           static_cast<double>(layout.elements_count());
  };
  const double bf16_bits = block_bits(Codec::kBf16);
  // Scales and offsets stay; a code has more bits or fewer.
  const double history_bits = block_bits(Codec::kInt2) + contender.history_bits - kInt2Bits;
  const uint32_t last_block = (tokens_count - 1) / kBlockTokens;
  uint32_t history_tokens = 0;
  for (uint32_t block = contender.format.sink_blocks();
       uint64_t{block} + contender.format.recent_blocks() < last_block; ++block) {
    history_tokens += kBlockTokens;
  }
  if (history_tokens == 0) return {.history = bf16_bits, .all = bf16_bits, .history_tokens = 0};
  const double share = static_cast<double>(history_tokens) / tokens_count;
  return {.history = history_bits,
          .all = share * history_bits + (1 - share) * bf16_bits,
          .history_tokens = history_tokens};
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseRotationsFlag(
    absl::string_view flag) {
  std::vector<std::pair<std::string, std::string>> rotations;
  for (const absl::string_view piece : absl::StrSplit(flag, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> entry =
        absl::StrSplit(piece, absl::MaxSplits('=', 1));
    if (entry.first.empty() || entry.second.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rotations: '", piece, "' is not name=file"));
    }
    for (const auto& [name, file] : rotations) {
      if (name != entry.first) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--rotations: the name '", name, "' stands for two files"));
    }
    rotations.push_back(entry);
  }
  return rotations;
}

absl::StatusOr<std::vector<FormatOptions>> ParseWindowsFlag(absl::string_view flag) {
  std::vector<FormatOptions> windows;
  for (const absl::string_view piece : absl::StrSplit(flag, ',', absl::SkipEmpty())) {
    const std::vector<absl::string_view> numbers = absl::StrSplit(piece, '/');
    FormatOptions pair;
    if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &pair.sink_tokens) ||
        !absl::SimpleAtoi(numbers[1], &pair.recent_tokens)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--windows: '", piece, "' is not SINK/RECENT in tokens"));
    }
    for (const FormatOptions& other : windows) {
      if (other.sink_tokens != pair.sink_tokens || other.recent_tokens != pair.recent_tokens) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat("--windows: ", piece, " stands there twice"));
    }
    windows.push_back(pair);
  }
  return windows;
}

}  // namespace okv
