#ifndef OKV_TESTS_CLUSTER_FAULT_MEDIA_H_
#define OKV_TESTS_CLUSTER_FAULT_MEDIA_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace okv::faults {

// ---- Damage.

// Where the bytes `needle` are in the files of `directory` (searched deeply), one place a file.
struct FilePlace {
  std::string path;
  uint64_t offset = 0;
};
std::vector<FilePlace> FindInFiles(const std::string& directory, const std::string& needle);
// Flips one bit of a file. False when it cannot be written.
bool FlipInFile(const FilePlace& place, unsigned bit);

// Flips one bit wherever a process's writable memory has the bytes `needle`, at `offset` from
// there: a receive buffer may have them as well as the arena. Returns in how many places that was,
// or why its memory is out of reach.
absl::StatusOr<size_t> FlipInMemory(pid_t pid, const std::string& needle, size_t offset,
                                    unsigned bit);

// ---- Mounts and links of this process alone, children included.

// Gives this process a mount namespace of its own: its mounts end with it, however it ends. Returns
// why it cannot, or "".
std::string OwnMounts();
// Each returns why it cannot, or "".
std::string MountSmallDisk(const std::string& path, uint64_t bytes);
std::string ResizeDisk(const std::string& path, uint64_t bytes);

// Directories in which nothing can be made or deleted, whatever is open in them, until the object
// goes. Mounting over them or moving them away does no harm to a node: it has them open.
// Thread-compatible.
class ImmutableDirectories {
 public:
  ~ImmutableDirectories();
  std::string Add(const std::string& path);  // Returns why it cannot, or "".

 private:
  std::vector<std::string> paths_;
};

// A network namespace with a loopback link of its own, for this thread and the processes that it
// starts while the object lives. Thread-compatible.
class OwnLink {
 public:
  static std::unique_ptr<OwnLink> Create(std::string* why_not);
  ~OwnLink();
  void Set(bool up);

 private:
  explicit OwnLink(int outer) : outer_(outer) {}
  const int outer_;  // The namespace to go back to.
};

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_MEDIA_H_
