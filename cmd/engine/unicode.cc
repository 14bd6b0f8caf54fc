#include "cmd/engine/unicode.h"

#include <algorithm>
#include <iterator>

#include "proto/check.h"

namespace okv {
namespace {

struct CodePointRange {
  uint32_t first;
  uint32_t last;
};

#include "cmd/engine/unicode_tables.inc"

template <size_t kSize>
bool Contains(const CodePointRange (&ranges)[kSize], uint32_t code_point) {
  const auto* range = std::upper_bound(
      std::begin(ranges), std::end(ranges), code_point,
      [](uint32_t point, const CodePointRange& candidate) { return point < candidate.first; });
  return range != std::begin(ranges) && code_point <= std::prev(range)->last;
}

bool IsSpace(uint32_t code_point) {
  return (code_point >= 0x9 && code_point <= 0xd) || code_point == 0x20 || code_point == 0x85 ||
         code_point == 0xa0 || code_point == 0x1680 ||
         (code_point >= 0x2000 && code_point <= 0x200a) || code_point == 0x2028 ||
         code_point == 0x2029 || code_point == 0x202f || code_point == 0x205f ||
         code_point == 0x3000;
}

constexpr uint32_t kReplacement = 0xfffd;

}  // namespace

Char DecodeUtf8(absl::string_view text) {
  OKV_CHECK(!text.empty());
  const auto byte_at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte_at(0);
  if (lead < 0x80) return {lead, 1};
  uint32_t bytes_count;
  uint32_t code_point;
  if (lead >= 0xc2 && lead <= 0xdf) {
    bytes_count = 2;
    code_point = lead & 0x1fu;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    bytes_count = 3;
    code_point = lead & 0x0fu;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    bytes_count = 4;
    code_point = lead & 0x07u;
  } else {
    return {kReplacement, 1};
  }
  if (text.size() < bytes_count) return {kReplacement, 1};
  for (uint32_t i = 1; i < bytes_count; ++i) {
    if ((byte_at(i) & 0xc0u) != 0x80u) return {kReplacement, 1};
    code_point = (code_point << 6) | (byte_at(i) & 0x3fu);
  }
  // Overlong forms, surrogates and what lies behind the last code point.
  const bool overlong =
      (bytes_count == 3 && code_point < 0x800) || (bytes_count == 4 && code_point < 0x10000);
  if (overlong || (code_point >= 0xd800 && code_point <= 0xdfff) || code_point > 0x10ffff) {
    return {kReplacement, 1};
  }
  return {code_point, bytes_count};
}

CharClass ClassOf(uint32_t code_point) {
  if (code_point < 0x80) {  // Nearly all of English text.
    const uint32_t lower = code_point | 0x20;
    if (lower >= 'a' && lower <= 'z') return CharClass::kLetter;
    if (code_point >= '0' && code_point <= '9') return CharClass::kNumber;
    return IsSpace(code_point) ? CharClass::kSpace : CharClass::kOther;
  }
  if (IsSpace(code_point)) return CharClass::kSpace;
  if (Contains(kLetters, code_point)) return CharClass::kLetter;
  return Contains(kNumbers, code_point) ? CharClass::kNumber : CharClass::kOther;
}

absl::string_view EncodeUtf8Short(uint32_t code_point, char buffer[2]) {
  OKV_CHECK(code_point < 0x800);
  if (code_point < 0x80) {
    buffer[0] = static_cast<char>(code_point);
    return absl::string_view(buffer, 1);
  }
  buffer[0] = static_cast<char>(0xc0 | (code_point >> 6));
  buffer[1] = static_cast<char>(0x80 | (code_point & 0x3f));
  return absl::string_view(buffer, 2);
}

}  // namespace okv
