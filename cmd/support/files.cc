#include "cmd/support/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

namespace okv {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const auto failed = [&path] {
    return absl::NotFoundError(absl::StrCat("cannot read '", path, "': ", std::strerror(errno)));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) return failed();
  std::string bytes;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof(buffer), file.get())) {
    bytes.append(buffer, got);
  }
  if (std::ferror(file.get()) != 0) return failed();  // A directory, for one.
  return bytes;
}

absl::Status WriteFileAtomically(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  const bool written =
      file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file == nullptr || std::fclose(file) != 0 || !written ||
      std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("'", path, "' cannot be written"));
  }
  return absl::OkStatus();
}

}  // namespace okv
