#include "cache_node/tiers/node_id_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/sha256.h"

namespace okv {
namespace {

constexpr absl::string_view kFirstLine = "okv-node-id 1\n";

std::string Text(absl::string_view node_id) {
  const std::string lines = absl::StrCat(kFirstLine, node_id, "\n");
  return absl::StrCat(lines, FormatId{.bytes = Sha256(lines)}.Hex(), "\n");
}

// 0 or an errno.
int WriteDurably(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  const ssize_t written = write(fd, text.data(), text.size());
  int error = written < 0 ? errno : 0;
  if (error == 0 && static_cast<size_t>(written) != text.size()) error = ENOSPC;
  if (error == 0 && fsync(fd) != 0) error = errno;
  close(fd);
  return error;
}

int SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return errno;
  const int error = fsync(fd) != 0 ? errno : 0;
  close(fd);
  return error;
}

}  // namespace

std::string ReadNodeIdFile(const std::string& data_dir) {
  std::ifstream file(absl::StrCat(data_dir, "/NODE_ID"), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!absl::StartsWith(text, kFirstLine)) return "";
  const std::string node_id =
      text.substr(kFirstLine.size(), text.find('\n', kFirstLine.size()) - kFirstLine.size());
  return text == Text(node_id) ? node_id : "";
}

absl::Status WriteNodeIdFile(const std::string& data_dir, absl::string_view node_id) {
  if (ReadNodeIdFile(data_dir) == node_id) return absl::OkStatus();
  const std::string path = absl::StrCat(data_dir, "/NODE_ID");
  const std::string temporary = absl::StrCat(path, ".new");
  int error = WriteDurably(temporary, Text(node_id));
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) error = SyncDirectory(data_dir);
  if (error == 0) return absl::OkStatus();
  const std::string what = absl::StrCat("writing ", path, ": ", std::strerror(error));
  return error == ENOSPC || error == EDQUOT ? absl::ResourceExhaustedError(what)
                                            : absl::UnavailableError(what);
}

}  // namespace okv
