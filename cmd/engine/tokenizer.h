#ifndef OKV_CMD_ENGINE_TOKENIZER_H_
#define OKV_CMD_ENGINE_TOKENIZER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cmd/engine/gguf.h"

namespace okv {

// What to do where the text spells a control token, such as <|im_end|>.
enum class SpecialTokens {
  kParse,   // It becomes that token.
  kAsText,  // It is text like any other: what a stranger wrote cannot end a turn.
};

// Byte-level BPE as a GGUF file describes it, with the "smollm" pre-tokenizer: every digit stands
// alone, and GPT-2's rules cut what is between them. Thread-safe after Load. A plain value.
class Tokenizer {
 public:
  // kInvalidArgument naming file and key: no such vocabulary, another tokenizer model or
  // pre-tokenizer, a merge of tokens that do not exist, a byte that no token spells although the
  // file names no unknown token.
  static absl::StatusOr<Tokenizer> Load(const GgufFile& file);

  // The tokens of `text`, which may hold any bytes. A byte that the vocabulary cannot spell (some
  // never occur in UTF-8) becomes the unknown token. No token is put in front: see adds_bos().
  std::vector<uint32_t> Encode(absl::string_view text,
                               SpecialTokens special = SpecialTokens::kParse) const;

  // The bytes that `tokens` spell, control tokens by their names. A single token may spell part of
  // a UTF-8 character. REQUIRES: every token < vocab_size().
  std::string Decode(absl::Span<const uint32_t> tokens) const;

  uint32_t vocab_size() const { return static_cast<uint32_t>(spellings_.size()); }
  uint32_t bos_token() const { return bos_token_; }
  uint32_t eos_token() const { return eos_token_; }
  // The model wants bos_token() first.
  bool adds_bos() const { return adds_bos_; }

 private:
  struct Merge {
    uint32_t rank;  // Lower ones go first.
    uint32_t token;
  };

  Tokenizer() = default;
  absl::Status LoadVocabulary(const GgufFile& file);
  absl::Status LoadMerges(const GgufFile& file);
  absl::Status LoadBytes(const GgufFile& file);
  void EncodeText(absl::string_view text, std::vector<uint32_t>* tokens) const;
  void EncodePiece(absl::string_view piece, std::vector<uint32_t>* tokens) const;
  // The longest control token that `text` starts with: its position in special_, or npos.
  size_t FindSpecial(absl::string_view text) const;

  std::vector<std::string> spellings_;  // The bytes of each token.
  absl::flat_hash_map<std::string, uint32_t> token_by_name_;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // By left token << 32 | right token.
  std::array<uint32_t, 256> byte_tokens_{};
  std::vector<std::pair<std::string, uint32_t>> special_;  // Longest first.
  uint32_t bos_token_ = 0;
  uint32_t eos_token_ = 0;
  bool adds_bos_ = false;
};

// Cuts `text` where no merge may reach across, by the "smollm" rules. The pieces join to `text`.
std::vector<absl::string_view> PreTokenize(absl::string_view text);

}  // namespace okv

#endif  // OKV_CMD_ENGINE_TOKENIZER_H_
