#include "cmd/engine/tokenizer.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "absl/strings/str_cat.h"
#include "cmd/engine/unicode.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kNoToken = std::numeric_limits<uint32_t>::max();
constexpr int32_t kTypeControl = 3;
constexpr int32_t kTypeUserDefined = 4;

// Token names write bytes as printable characters: those that Latin-1 prints stand for themselves,
// the 68 others are U+0100 and up, in order.
std::array<uint32_t, 256> ByteCodePoints() {
  std::array<uint32_t, 256> code_points;
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    code_points[byte] = printable ? byte : next++;
  }
  return code_points;
}

// The bytes behind a token's name; false when a character stands for no byte.
bool NameToBytes(absl::string_view name, std::string* bytes) {
  static const absl::flat_hash_map<uint32_t, char>* const kBytes = [] {
    auto* map = new absl::flat_hash_map<uint32_t, char>;
    const std::array<uint32_t, 256> code_points = ByteCodePoints();
    for (size_t byte = 0; byte < 256; ++byte) (*map)[code_points[byte]] = static_cast<char>(byte);
    return map;
  }();
  bytes->clear();
  while (!name.empty()) {
    const Char character = DecodeUtf8(name);
    const auto found = kBytes->find(character.code_point);
    if (found == kBytes->end()) return false;
    bytes->push_back(found->second);
    name.remove_prefix(character.bytes_count);
  }
  return true;
}

// Bytes of the English contraction that `text` starts with: 's 't 're 've 'm 'll 'd, or 0.
size_t ContractionBytes(absl::string_view text) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  if (absl::string_view("stmd").find(text[1]) != absl::string_view::npos) return 2;
  const absl::string_view two = text.substr(1, 2);
  return two == "re" || two == "ve" || two == "ll" ? 3 : 0;
}

// Bytes of the run of `char_class` that `text` starts with.
size_t RunBytes(absl::string_view text, CharClass char_class) {
  size_t bytes_count = 0;
  while (bytes_count < text.size()) {
    const Char character = DecodeUtf8(text.substr(bytes_count));
    if (ClassOf(character.code_point) != char_class) break;
    bytes_count += character.bytes_count;
  }
  return bytes_count;
}

// Bytes of the first piece of `text`, which holds no number, by GPT-2's rules: a contraction, or
// letters or signs with one space before them, or white space. REQUIRES: text not empty.
size_t PieceBytes(absl::string_view text) {
  if (const size_t contraction = ContractionBytes(text); contraction > 0) return contraction;
  const size_t space = text[0] == ' ' ? 1 : 0;
  if (space < text.size()) {
    const CharClass next = ClassOf(DecodeUtf8(text.substr(space)).code_point);
    if (next != CharClass::kSpace) return space + RunBytes(text.substr(space), next);
  }
  const size_t run = RunBytes(text, CharClass::kSpace);
  if (run == text.size()) return run;
  // The last space of a run goes to the word behind it, unless it is the only one.
  size_t last = run;
  size_t characters = 0;
  for (size_t i = 0; i < run; i += DecodeUtf8(text.substr(i)).bytes_count) {
    last = i;
    ++characters;
  }
  return characters > 1 ? last : run;
}

}  // namespace

std::vector<absl::string_view> PreTokenize(absl::string_view text) {
  std::vector<absl::string_view> pieces;
  size_t start = 0;
  const auto cut_before = [&](size_t end) {
    while (start < end) {
      const size_t bytes_count = PieceBytes(text.substr(start, end - start));
      pieces.push_back(text.substr(start, bytes_count));
      start += bytes_count;
    }
  };
  for (size_t i = 0; i < text.size();) {
    const Char character = DecodeUtf8(text.substr(i));
    const size_t next = i + character.bytes_count;
    if (ClassOf(character.code_point) == CharClass::kNumber) {
      cut_before(i);
      pieces.push_back(text.substr(i, character.bytes_count));
      start = next;
    }
    i = next;
  }
  cut_before(text.size());
  return pieces;
}

absl::StatusOr<Tokenizer> Tokenizer::Load(const GgufFile& file) {
  Tokenizer tokenizer;
  OKV_ASSIGN_OR_RETURN(const std::string model, file.String("tokenizer.ggml.model"));
  OKV_ASSIGN_OR_RETURN(const std::string pre, file.String("tokenizer.ggml.pre"));
  if (model != "gpt2" || pre != "smollm") {
    return absl::InvalidArgumentError(absl::StrCat("'", file.path(), "': tokenizer '", model,
                                                   "' with pre-tokenizer '", pre,
                                                   "'; only gpt2 with smollm is implemented"));
  }
  OKV_RETURN_IF_ERROR(tokenizer.LoadVocabulary(file));
  OKV_RETURN_IF_ERROR(tokenizer.LoadMerges(file));
  OKV_RETURN_IF_ERROR(tokenizer.LoadBytes(file));
  for (const auto& [key, token] :
       {std::pair("tokenizer.ggml.bos_token_id", &tokenizer.bos_token_),
        std::pair("tokenizer.ggml.eos_token_id", &tokenizer.eos_token_)}) {
    OKV_ASSIGN_OR_RETURN(const uint64_t value, file.Uint(key));
    if (value >= tokenizer.vocab_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", file.path(), "': ", key, " is ", value, ", no token"));
    }
    *token = static_cast<uint32_t>(value);
  }
  if (file.Has("tokenizer.ggml.add_bos_token")) {
    OKV_ASSIGN_OR_RETURN(tokenizer.adds_bos_, file.Bool("tokenizer.ggml.add_bos_token"));
  }
  return tokenizer;
}

absl::Status Tokenizer::LoadVocabulary(const GgufFile& file) {
  OKV_ASSIGN_OR_RETURN(const std::vector<absl::string_view>* names,
                       file.Strings("tokenizer.ggml.tokens"));
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> types, file.Ints("tokenizer.ggml.token_type"));
  if (types.size() != names->size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", file.path(), "': ", names->size(),
                                                   " tokens, but ", types.size(), " token types"));
  }
  spellings_.resize(names->size());
  for (uint32_t token = 0; token < names->size(); ++token) {
    const absl::string_view name = (*names)[token];
    if (types[token] == kTypeControl || types[token] == kTypeUserDefined) {
      spellings_[token] = std::string(name);
      if (!name.empty()) special_.emplace_back(std::string(name), token);
    } else if (!NameToBytes(name, &spellings_[token])) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", file.path(), "': the name of token ", token, " spells no bytes"));
    }
    token_by_name_.emplace(std::string(name), token);
  }
  std::stable_sort(special_.begin(), special_.end(), [](const auto& left, const auto& right) {
    return left.first.size() > right.first.size();
  });
  return absl::OkStatus();
}

absl::Status Tokenizer::LoadMerges(const GgufFile& file) {
  OKV_ASSIGN_OR_RETURN(const std::vector<absl::string_view>* merges,
                       file.Strings("tokenizer.ggml.merges"));
  for (uint32_t rank = 0; rank < merges->size(); ++rank) {
    const absl::string_view merge = (*merges)[rank];
    const size_t space = merge.find(' ', 1);  // Names write a space as another character.
    const auto bad = [&] {
      return absl::InvalidArgumentError(
          absl::StrCat("'", file.path(), "': merge ", rank, " joins tokens that do not exist"));
    };
    if (space == absl::string_view::npos) return bad();
    const auto left = token_by_name_.find(merge.substr(0, space));
    const auto right = token_by_name_.find(merge.substr(space + 1));
    const auto joined =
        token_by_name_.find(absl::StrCat(merge.substr(0, space), merge.substr(space + 1)));
    if (left == token_by_name_.end() || right == token_by_name_.end() ||
        joined == token_by_name_.end()) {
      return bad();
    }
    merges_.emplace(uint64_t{left->second} << 32 | right->second, Merge{rank, joined->second});
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::LoadBytes(const GgufFile& file) {
  uint32_t unknown = kNoToken;
  if (file.Has("tokenizer.ggml.unknown_token_id")) {
    OKV_ASSIGN_OR_RETURN(const uint64_t value, file.Uint("tokenizer.ggml.unknown_token_id"));
    if (value < vocab_size()) unknown = static_cast<uint32_t>(value);
  }
  const std::array<uint32_t, 256> code_points = ByteCodePoints();
  for (size_t byte = 0; byte < 256; ++byte) {
    char buffer[2];
    const auto found = token_by_name_.find(EncodeUtf8Short(code_points[byte], buffer));
    byte_tokens_[byte] = found != token_by_name_.end() ? found->second : unknown;
    if (byte_tokens_[byte] == kNoToken) {
      return absl::InvalidArgumentError(absl::StrCat("'", file.path(), "': no token spells byte ",
                                                     byte, " and there is no unknown token"));
    }
  }
  return absl::OkStatus();
}

size_t Tokenizer::FindSpecial(absl::string_view text) const {
  for (size_t i = 0; i < special_.size(); ++i) {
    if (text.substr(0, special_[i].first.size()) == special_[i].first) return i;
  }
  return absl::string_view::npos;
}

std::vector<uint32_t> Tokenizer::Encode(absl::string_view text, SpecialTokens special) const {
  std::vector<uint32_t> tokens;
  size_t start = 0;
  if (special == SpecialTokens::kParse) {
    for (size_t i = 0; i < text.size();) {
      const size_t found = FindSpecial(text.substr(i));
      if (found == absl::string_view::npos) {
        ++i;
        continue;
      }
      EncodeText(text.substr(start, i - start), &tokens);
      tokens.push_back(special_[found].second);
      i += special_[found].first.size();
      start = i;
    }
  }
  EncodeText(text.substr(start), &tokens);
  return tokens;
}

void Tokenizer::EncodeText(absl::string_view text, std::vector<uint32_t>* tokens) const {
  for (const absl::string_view piece : PreTokenize(text)) EncodePiece(piece, tokens);
}

// Joins the pair of the lowest rank, the leftmost of equals, until none is left: a heap of
// candidate pairs over a linked list of symbols, so that a piece of n bytes costs n log n.
void Tokenizer::EncodePiece(absl::string_view piece, std::vector<uint32_t>* tokens) const {
  struct Symbol {
    uint32_t token;  // kNoToken: joined into the one before.
    int32_t previous;
    int32_t next;
  };
  struct Candidate {
    uint32_t rank;
    int32_t left;
    uint32_t left_token, right_token;  // As they were: a candidate whose symbols changed is stale.
    uint32_t joined;
    bool operator<(const Candidate& other) const {  // The queue gives the largest first.
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const int32_t bytes_count = static_cast<int32_t>(piece.size());
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (int32_t i = 0; i < bytes_count; ++i) {
    const uint32_t token = byte_tokens_[static_cast<uint8_t>(piece[static_cast<size_t>(i)])];
    symbols.push_back({token, i - 1, i + 1 < bytes_count ? i + 1 : -1});
  }
  std::priority_queue<Candidate> queue;
  const auto offer = [&](int32_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    const uint32_t left_token = symbols[left].token;
    const uint32_t right_token = symbols[symbols[left].next].token;
    const auto found = merges_.find(uint64_t{left_token} << 32 | right_token);
    if (found == merges_.end()) return;
    queue.push({found->second.rank, left, left_token, right_token, found->second.token});
  };
  for (int32_t i = 0; i + 1 < bytes_count; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    if (left.token != best.left_token || left.next < 0 ||
        symbols[left.next].token != best.right_token) {
      continue;
    }
    left.token = best.joined;
    symbols[left.next].token = kNoToken;
    left.next = symbols[left.next].next;
    if (left.next >= 0) symbols[left.next].previous = best.left;
    offer(left.previous);
    offer(best.left);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.token != kNoToken) tokens->push_back(symbol.token);
  }
}

std::string Tokenizer::Decode(absl::Span<const uint32_t> tokens) const {
  std::string text;
  for (const uint32_t token : tokens) {
    OKV_CHECK(token < spellings_.size());
    text += spellings_[token];
  }
  return text;
}

}  // namespace okv
