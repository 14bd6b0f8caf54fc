#ifndef OKV_TESTS_SUPPORT_PROCESS_H_
#define OKV_TESTS_SUPPORT_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace okv::testing_support {

// A directory that goes away with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string Path(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string ReadFileOrEmpty(const std::string& path);
void WriteFile(const std::string& path, const std::string& bytes);

// A child process with its output in a file; killed when the object goes. Thread-compatible.
class Process {
 public:
  // Starts `argv`; argv[0] without a slash is one of the project's programs (OKV_BIN_DIR).
  static std::unique_ptr<Process> Start(const std::vector<std::string>& argv);
  ~Process();

  void Signal(int signal) const;
  // The exit code; 128 + n for a death by signal n; -1 after `timeout`.
  int Wait(std::chrono::seconds timeout);
  bool running();
  pid_t pid() const { return pid_; }
  // Standard output and standard error so far, interleaved.
  std::string output() const { return ReadFileOrEmpty(output_path_); }
  // The last non-empty line of output().
  std::string last_line() const;

 private:
  Process(pid_t pid, std::unique_ptr<TempDir> directory);
  bool Poll();

  const pid_t pid_;
  const std::unique_ptr<TempDir> directory_;
  const std::string output_path_;
  bool ended_ = false;
  int code_ = -1;
};

// Runs a program to its end.
struct RunResult {
  int code;
  std::string output;
  std::string last_line;
};
RunResult RunProgram(const std::vector<std::string>& argv,
                     std::chrono::seconds timeout = std::chrono::seconds(60));

// True once `path` exists and is not empty; false when `process` ended first or 30 s passed.
bool WaitForFile(const std::string& path, Process* process);

// Body of an HTTP GET on "host:port"; empty when there is none within 10 s.
std::string HttpGet(const std::string& address, const std::string& path);

}  // namespace okv::testing_support

#endif  // OKV_TESTS_SUPPORT_PROCESS_H_
