#ifndef OKV_TESTS_CLUSTER_FAULT_WORKER_H_
#define OKV_TESTS_CLUSTER_FAULT_WORKER_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace okv::faults {

struct WorkerOptions {
  std::string control_address;
  std::string journal;  // The file that gets a line for each attempt and each acknowledged block.
  std::string name;
};

// The main function of a worker process: a real client that does what it is told, one JSON command
// a line on standard input, one JSON answer a line on standard output:
//
//   put     blocks, nonce, group, batch, deadline_ms: puts what FillPattern gives, `batch` blocks a
//           call, and repeats what may be repeated until the deadline. Answers the count of each
//           code.
//   fetch   blocks, nodes, where, deadline_ms, keep: one call; `where` has the numbers of a block's
//           nodes. Answers [code, nonce, wrong bytes] for each block. With `keep` all buffers are
//           poisoned once it returned, and stay.
//   lookup  chain, blocks_count, deadline_ms: then fetches the prefix from where it is said to be.
//   kept    how many bytes of the kept buffers are no longer poison.
//
// Returns the exit code.
int RunWorker(const WorkerOptions& options);

// A worker process, from the driver's side. Killed when the object goes. Thread-compatible.
class FaultWorker {
 public:
  using Json = nlohmann::json;

  // Its standard error goes to the file `log`.
  static std::unique_ptr<FaultWorker> Start(const WorkerOptions& options, const std::string& log);
  ~FaultWorker();

  void Send(const Json& command);
  // The next answer; nothing when it ended or `timeout` passed.
  std::optional<Json> Await(std::chrono::milliseconds timeout);
  bool running() { return !Reap(); }
  void Signal(int signal) const;
  // Closes its standard input and waits for its end: the exit code, 128 + n for a death by signal
  // n, -1 after `timeout`.
  int End(std::chrono::milliseconds timeout);

  const std::string& name() const { return name_; }
  const std::string& journal() const { return journal_; }
  const std::string& log() const { return log_; }

 private:
  FaultWorker(const WorkerOptions& options, std::string log)
      : name_(options.name), journal_(options.journal), log_(std::move(log)) {}
  bool Reap();

  const std::string name_;
  const std::string journal_;
  const std::string log_;
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
  std::string received_;
  bool ended_ = false;
  int code_ = -1;
};

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_WORKER_H_
