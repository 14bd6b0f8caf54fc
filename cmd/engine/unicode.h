#ifndef OKV_CMD_ENGINE_UNICODE_H_
#define OKV_CMD_ENGINE_UNICODE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace okv {

// What the pre-tokenizer's rules ask about a code point.
enum class CharClass : uint8_t {
  kLetter,  // \p{L}
  kNumber,  // \p{N}
  kSpace,   // \s, Unicode's White_Space
  kOther,
};

struct Char {
  uint32_t code_point;
  uint32_t bytes_count;  // 1 to 4
};

// The character at the start of `text`. A byte that starts no valid UTF-8 sequence is a character
// of its own, U+FFFD: byte-level tokens can spell any bytes, so bad text is no error. REQUIRES:
// text not empty.
Char DecodeUtf8(absl::string_view text);

CharClass ClassOf(uint32_t code_point);

// The UTF-8 spelling of `code_point`. REQUIRES: code_point < 0x800.
absl::string_view EncodeUtf8Short(uint32_t code_point, char buffer[2]);

}  // namespace okv

#endif  // OKV_CMD_ENGINE_UNICODE_H_
