#ifndef OKV_CALIB_QUOTED_H_
#define OKV_CALIB_QUOTED_H_

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace okv {

// Bytes of a file for a message, whatever they are: the first 100, escaped, in quotes.
inline std::string Quoted(absl::string_view bytes) {
  return absl::StrCat("'", absl::CHexEscape(bytes.substr(0, 100)), "'");
}

}  // namespace okv

#endif  // OKV_CALIB_QUOTED_H_
