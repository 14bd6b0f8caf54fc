#ifndef OKV_CMD_BENCH_CHILD_H_
#define OKV_CMD_BENCH_CHILD_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace okv {

struct ChildOptions {
  std::vector<std::string> argv;  // argv[0]: a path, or a name to be found in PATH.
  std::vector<std::pair<std::string, std::string>> environment;  // On top of this process's.
  std::string output_path;  // Standard output and standard error; created.
};

// What a process has used so far.
struct ChildUsage {
  double cpu_seconds = 0;  // User and system, all threads.
  uint64_t rss_bytes = 0;  // Resident now.
};

// Another process of a measurement, killed when the object goes or this process dies.
// Thread-compatible; start it on a thread that stays: the kernel takes that thread's end for the
// parent's.
class ChildProcess {
 public:
  // kUnavailable when no process can be made. A program that cannot be run ends with code 127.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const ChildOptions& options);
  ~ChildProcess();

  // The exit code, 128 + n for a death by signal n. kDeadlineExceeded when it still runs at
  // `until`.
  absl::StatusOr<int> Wait(absl::Time until);
  // Waits until `path` is there and not empty. kUnavailable with the process's output when it ends
  // first, kDeadlineExceeded with it at `until`.
  absl::Status WaitForFile(const std::string& path, absl::Time until);
  // Waits until somebody listens on TCP port `port`. Errors as WaitForFile's.
  absl::Status WaitForListener(int port, absl::Time until);
  bool running();
  void Kill();
  pid_t pid() const { return pid_; }
  // kUnavailable when it has ended.
  absl::StatusOr<ChildUsage> Usage() const;
  std::string output() const;

 private:
  absl::Status WaitUntil(const std::function<bool()>& ready, absl::Time until);
  ChildProcess(pid_t pid, const ChildOptions& options) : pid_(pid), options_(options) {}

  const pid_t pid_;
  const ChildOptions options_;
  bool ended_ = false;
  int code_ = 0;
};

// User and system time of this process, all threads, in seconds.
double OwnCpuSeconds();

// A port that nobody has just now, for programs that cannot choose one themselves. kUnavailable.
absl::StatusOr<int> FreeTcpPort();

// A program of this project: beside this one.
std::string ProgramPath(const std::string& name);

// A directory for a measurement's files, removed with everything in it when the object goes.
class ScratchDirectory {
 public:
  // Inside `parent`. kUnavailable naming it when none can be made.
  static absl::StatusOr<std::unique_ptr<ScratchDirectory>> Create(const std::string& parent);
  ~ScratchDirectory();
  std::string Path(const std::string& name) const { return absl::StrCat(path_, "/", name); }

 private:
  explicit ScratchDirectory(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_CHILD_H_
