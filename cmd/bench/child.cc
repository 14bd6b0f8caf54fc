#include "cmd/bench/child.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "cmd/support/files.h"

namespace okv {
namespace {

// Between two looks at another process: nothing notifies us of a file or, with a deadline, of an
// exit.
void Pause() { poll(nullptr, 0, /*timeout=*/5); }

// Lines of /proc/net/tcp: "number: local:PORT remote:PORT state ...", 0A for a listener.
bool IsListening(int port) {
  const std::string ending = absl::StrFormat(":%04X", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    const absl::StatusOr<std::string> text = ReadFile(path);
    if (!text.ok()) continue;
    for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      if (words.size() > 3 && absl::EndsWith(words[1], ending) && words[3] == "0A") return true;
    }
  }
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const ChildOptions& options) {
  std::vector<char*> argv;
  for (const std::string& word : options.argv) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  // Made here: between fork and exec of a process with threads nothing may allocate.
  std::vector<std::string> texts;
  for (char** entry = environ; *entry != nullptr; ++entry) texts.emplace_back(*entry);
  for (const auto& [name, value] : options.environment) {
    std::erase_if(texts, [prefix = absl::StrCat(name, "=")](const std::string& text) {
      return text.compare(0, prefix.size(), prefix) == 0;
    });
    texts.push_back(absl::StrCat(name, "=", value));
  }
  std::vector<char*> environment;
  for (const std::string& text : texts) environment.push_back(const_cast<char*>(text.c_str()));
  environment.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::UnavailableError(absl::StrCat("fork: ", std::strerror(errno)));
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = open(options.output_path.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    if (getppid() != parent || fd < 0) _exit(127);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execvpe(argv[0], argv.data(), environment.data());
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  return absl::WrapUnique(new ChildProcess(pid, options));
}

ChildProcess::~ChildProcess() { Kill(); }

bool ChildProcess::running() {
  if (ended_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  ended_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return false;
}

void ChildProcess::Kill() {
  if (!running()) return;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  ended_ = true;
  code_ = 128 + SIGKILL;
}

absl::StatusOr<int> ChildProcess::Wait(absl::Time until) {
  while (running()) {
    if (absl::Now() > until) {
      return absl::DeadlineExceededError(
          absl::StrCat(options_.argv[0], " did not end in time: ", output()));
    }
    Pause();
  }
  return code_;
}

absl::Status ChildProcess::WaitUntil(const std::function<bool()>& ready, absl::Time until) {
  while (true) {
    const bool alive = running();
    if (ready()) return absl::OkStatus();
    if (!alive) {
      return absl::UnavailableError(
          absl::StrCat(options_.argv[0], " ended with code ", code_, ": ", output()));
    }
    if (absl::Now() > until) {
      return absl::DeadlineExceededError(
          absl::StrCat(options_.argv[0], " is not ready in time: ", output()));
    }
    Pause();
  }
}

absl::Status ChildProcess::WaitForFile(const std::string& path, absl::Time until) {
  return WaitUntil(
      [&path] {
        const absl::StatusOr<std::string> text = ReadFile(path);
        return text.ok() && !text->empty();
      },
      until);
}

absl::Status ChildProcess::WaitForListener(int port, absl::Time until) {
  // A connection made only to find out would be taken for the client's.
  return WaitUntil([port] { return IsListening(port); }, until);
}

absl::StatusOr<ChildUsage> ChildProcess::Usage() const {
  const auto gone = [this] {
    return absl::UnavailableError(absl::StrCat(options_.argv[0], " is gone: ", output()));
  };
  const absl::StatusOr<std::string> stat = ReadFile(absl::StrCat("/proc/", pid_, "/stat"));
  if (!stat.ok()) return gone();
  // Behind the name, which may hold anything: "S ppid ...", utime and stime are words 11 and 12,
  // the resident pages word 21 (proc(5) counts from the pid).
  const std::vector<std::string> words = absl::StrSplit(stat->substr(stat->rfind(')') + 2), ' ');
  uint64_t user_ticks;
  uint64_t system_ticks;
  uint64_t pages;
  if (words.size() < 22 || !absl::SimpleAtoi(words[11], &user_ticks) ||
      !absl::SimpleAtoi(words[12], &system_ticks) || !absl::SimpleAtoi(words[21], &pages)) {
    return gone();
  }
  return ChildUsage{.cpu_seconds = static_cast<double>(user_ticks + system_ticks) /
                                   static_cast<double>(sysconf(_SC_CLK_TCK)),
                    .rss_bytes = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE))};
}

std::string ChildProcess::output() const {
  const absl::StatusOr<std::string> text = ReadFile(options_.output_path);
  return text.ok() ? *text : "";
}

double OwnCpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

absl::StatusOr<int> FreeTcpPort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool found = fd >= 0 &&
                     bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) close(fd);
  if (!found) return absl::UnavailableError("no free TCP port");
  return ntohs(address.sin_port);
}

std::string ProgramPath(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? name : (self.parent_path() / name).string();
}

absl::StatusOr<std::unique_ptr<ScratchDirectory>> ScratchDirectory::Create(
    const std::string& parent) {
  std::string pattern = absl::StrCat(parent, "/okv_bench.XXXXXX");
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot make a directory in '", parent, "': ", std::strerror(errno)));
  }
  return absl::WrapUnique(new ScratchDirectory(pattern));
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace okv
