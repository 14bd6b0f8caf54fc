#ifndef OKV_PROTO_UTF8_H_
#define OKV_PROTO_UTF8_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace okv {

// Whether `text` is UTF-8 as RFC 3629 has it: no overlong form, no surrogate, nothing above
// U+10FFFF. Names must be: they go into JSON headers and protobuf strings, which hold nothing else.
inline bool IsUtf8(absl::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const uint8_t lead = static_cast<uint8_t>(text[at++]);
    if (lead < 0x80) continue;
    const int tail = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || text.size() - at < static_cast<size_t>(tail)) return false;
    uint32_t code = lead & (0x3fu >> tail);
    for (int i = 0; i < tail; ++i) {
      const uint8_t byte = static_cast<uint8_t>(text[at++]);
      if ((byte & 0xc0) != 0x80) return false;
      code = code << 6 | (byte & 0x3fu);
    }
    const uint32_t code_min = tail == 1 ? 0x80 : tail == 2 ? 0x800 : 0x10000;
    if (code < code_min || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
  }
  return true;
}

}  // namespace okv

#endif  // OKV_PROTO_UTF8_H_
