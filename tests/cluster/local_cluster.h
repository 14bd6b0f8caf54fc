#ifndef OKV_TESTS_CLUSTER_LOCAL_CLUSTER_H_
#define OKV_TESTS_CLUSTER_LOCAL_CLUSTER_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace okv::testing_support {

// A control plane, nodes and a tiny random model, each the real program, in a directory of their
// own. Thread-compatible.
class LocalCluster {
 public:
  LocalCluster();

  // Starts okv-control; REQUIRES that it comes up.
  void StartControl();
  // Starts node `number` (a directory of its own, kept over restarts); REQUIRES that it comes up.
  void StartNode(int number, const std::vector<std::string>& flags = {});
  Process& control() { return *control_; }
  Process& node(int number) { return *nodes_.at(number); }
  // Drops a process; it was stopped, or is killed now.
  void ForgetNode(int number) { nodes_.at(number).reset(); }
  void ForgetControl() { control_.reset(); }

  std::string control_address() const { return control_address_; }
  std::string Path(const std::string& name) const { return directory_.Path(name); }
  std::string model() const { return Path("tiny.gguf"); }
  std::string rotation() const { return Path("rotation.safetensors"); }
  std::string text() const { return Path("text.txt"); }
  // Publishes rotation().
  void Publish();

  // okv-worker run over the first prompt_tokens of text(), then `ending`; more flags behind.
  RunResult Worker(int prompt_tokens, const std::string& ending,
                   const std::vector<std::string>& flags = {});
  // The same with --control, and its JSON line.
  nlohmann::json ClusterWorker(int prompt_tokens, const std::string& ending,
                               const std::vector<std::string>& flags = {});
  nlohmann::json LoneWorker(int prompt_tokens, const std::string& ending,
                            const std::vector<std::string>& flags = {});

  nlohmann::json ReadyFile(int number) const;
  // Sum over a node's labels of one metric.
  double Metric(int number, const std::string& name) const;
  nlohmann::json Status();

 private:
  TempDir directory_;
  std::string control_address_;
  std::unique_ptr<Process> control_;
  std::vector<std::unique_ptr<Process>> nodes_;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CLUSTER_LOCAL_CLUSTER_H_
