#ifndef OKV_TESTS_GOLDEN_GOLDEN_H_
#define OKV_TESTS_GOLDEN_GOLDEN_H_

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

// Bytes that must never change by accident: tests/golden/NAME.hex, hex digits in lines of 32 bytes,
// comments after '#'. A test run with OKV_UPDATE_GOLDEN=1 in its environment writes them anew
// instead of comparing; the diff is then for people to judge, for files in the field hold the old
// bytes.

namespace okv::golden {

// CTest sets OKV_SOURCE_DIR; a test started by hand runs in the source directory.
inline std::string SourcePath(const std::string& relative) {
  const char* root = std::getenv("OKV_SOURCE_DIR");
  return std::string(root != nullptr ? root : ".") + "/" + relative;
}

// The text of a file of the source tree, "" and a test failure when it cannot be read.
inline std::string ReadSource(const std::string& relative) {
  std::ifstream file(SourcePath(relative), std::ios::binary);
  EXPECT_TRUE(file.good()) << "cannot read " << SourcePath(relative);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The bytes of hex digits, white space and comments left out; a test failure for anything else.
inline std::string BytesOfHex(const std::string& text) {
  std::string digits;
  bool in_comment = false;
  for (const char c : text) {
    if (c == '#') in_comment = true;
    if (c == '\n') in_comment = false;
    if (in_comment || std::isspace(static_cast<unsigned char>(c)) != 0) continue;
    EXPECT_TRUE(std::isxdigit(static_cast<unsigned char>(c)) != 0) << "not a hex digit: " << c;
    digits += c;
  }
  EXPECT_EQ(digits.size() % 2, 0u) << "half a byte";
  return absl::HexStringToBytes(digits);
}

// `bytes` are those of tests/golden/NAME.hex. `what` is the comment of a file written anew.
inline void ExpectGolden(const std::string& name, const std::string& what,
                         absl::string_view bytes) {
  const std::string relative = "tests/golden/" + name + ".hex";
  if (std::getenv("OKV_UPDATE_GOLDEN") != nullptr) {
    std::ofstream file(SourcePath(relative), std::ios::binary | std::ios::trunc);
    file << "# " << what << "\n";
    for (size_t at = 0; at < bytes.size(); at += 32) {
      file << absl::BytesToHexString(bytes.substr(at, 32)) << "\n";
    }
    ASSERT_TRUE(file.good()) << "cannot write " << SourcePath(relative);
    std::printf("wrote %s\n", relative.c_str());
    return;
  }
  const std::string expected = BytesOfHex(ReadSource(relative));
  const size_t common = std::min(expected.size(), bytes.size());
  size_t at = 0;
  while (at < common && expected[at] == bytes[at]) ++at;
  EXPECT_TRUE(bytes == expected) << relative << ": " << bytes.size() << " bytes, "
                                 << expected.size() << " expected; the first difference is at byte "
                                 << at;
}

}  // namespace okv::golden

#endif  // OKV_TESTS_GOLDEN_GOLDEN_H_
