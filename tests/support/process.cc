#include "tests/support/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "proto/check.h"

namespace okv::testing_support {
namespace {

// Between two looks at another process: nothing notifies us of a file or an exit.
void Pause() { poll(nullptr, 0, /*timeout=*/5); }

std::string ProgramPath(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* directory = std::getenv("OKV_BIN_DIR");
  OKV_CHECK(directory != nullptr);
  return std::string(directory) + "/" + name;
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "okv_test.XXXXXX").string();
  OKV_CHECK(mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string ReadFileOrEmpty(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  OKV_CHECK(file.good());
}

Process::Process(pid_t pid, std::unique_ptr<TempDir> directory)
    : pid_(pid), directory_(std::move(directory)), output_path_(directory_->Path("output")) {}

std::unique_ptr<Process> Process::Start(const std::vector<std::string>& argv) {
  auto directory = std::make_unique<TempDir>();
  const std::string output = directory->Path("output");
  const std::string program = ProgramPath(argv[0]);
  std::vector<char*> pointers;
  for (const std::string& word : argv) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  OKV_CHECK(pid >= 0);
  if (pid == 0) {
    // A test that aborts leaves nobody behind.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    const int fd = open(output.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    execv(program.c_str(), pointers.data());
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", program.c_str(), std::strerror(errno));
    _exit(127);
  }
  return std::unique_ptr<Process>(new Process(pid, std::move(directory)));
}

Process::~Process() {
  if (!Poll()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

bool Process::Poll() {
  if (ended_) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  ended_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return true;
}

bool Process::running() { return !Poll(); }

void Process::Signal(int signal) const {
  if (!ended_) kill(pid_, signal);
}

int Process::Wait(std::chrono::seconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!Poll()) {
    if (std::chrono::steady_clock::now() > end) return -1;
    Pause();
  }
  return code_;
}

std::string Process::last_line() const {
  std::string text = output();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

RunResult RunProgram(const std::vector<std::string>& argv, std::chrono::seconds timeout) {
  const std::unique_ptr<Process> process = Process::Start(argv);
  const int code = process->Wait(timeout);
  return {.code = code, .output = process->output(), .last_line = process->last_line()};
}

bool WaitForFile(const std::string& path, Process* process) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (ReadFileOrEmpty(path).empty()) {
    if (!process->running() || std::chrono::steady_clock::now() > end) return false;
    Pause();
  }
  return true;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return "";  // Of a process that never said where it listens.
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &peer.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  // A process that is stopped takes the connection and never answers.
  const timeval timeout = {.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: " + address + "\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, got);
    }
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

}  // namespace okv::testing_support
