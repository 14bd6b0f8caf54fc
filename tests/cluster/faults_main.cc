// okv_faults: real processes, seeded faults, and an oracle that knows every byte.
//
//   okv_faults [--rounds N] [--seed S] [--scenario NAME] [--json] [--hbm_devices 0,1]
//
// Round i has seed S + i, which picks its scenario and everything random in it: a failed round is
// repeated by --rounds 1 --seed. Exit code 0, or 1 when anything was lost, wrong or late, or when
// fewer than half of the reads were verified hits, when no round ran, or when 10 or more rounds of
// a scenario never met what it is after. OKV_BIN_DIR has the programs.

#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "tests/cluster/fault_media.h"
#include "tests/cluster/fault_scenarios.h"

ABSL_FLAG(uint64_t, rounds, 12, "how many rounds");
ABSL_FLAG(uint64_t, seed, 1, "the first round's seed");
ABSL_FLAG(std::string, scenario, "", "only this one; default: the seed picks");
ABSL_FLAG(bool, json, false, "one JSON object as the last line");
ABSL_FLAG(bool, logs, false, "the ends of all logs after good rounds too");
ABSL_FLAG(uint64_t, slack_ms, 8000, "how far past its deadline a call counts as hung");
ABSL_FLAG(
    std::vector<std::string>, hbm_devices, {},
    "GPUs for the nodes' HBM tiers, by CUDA's numbers; node i has the i-th of them, beginning "
    "again behind the last; none: no HBM tiers");
ABSL_FLAG(uint64_t, hbm_bytes, uint64_t{4} << 20, "with --hbm_devices: the size of a node's tier");
ABSL_FLAG(bool, worker, false, "be a worker process of a round, not the driver");
ABSL_FLAG(std::string, control, "", "of a worker: the control plane's address");
ABSL_FLAG(std::string, journal, "", "of a worker: the file of its acknowledged writes");
ABSL_FLAG(std::string, name, "", "of a worker: its name");

namespace okv::faults {
namespace {

using Json = nlohmann::ordered_json;

// Seeds that follow each other take the scenarios in turn, so that a run has each equally often.
std::vector<Scenario> AllScenarios() {
  std::vector<Scenario> all = ProcessScenarios();
  for (const auto& more : {MediaScenarios(), DiskScenarios()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

const Scenario* Choose(const std::vector<Scenario>& all, uint64_t seed) {
  const std::string name = absl::GetFlag(FLAGS_scenario);
  if (name.empty()) return &all[seed % all.size()];
  for (const Scenario& scenario : all) {
    if (name == scenario.name) return &scenario;
  }
  return nullptr;
}

// Nothing when the command line is wrong, which it then says.
std::optional<RoundOptions> OptionsFromFlags() {
  RoundOptions options;
  options.slack = std::chrono::milliseconds(absl::GetFlag(FLAGS_slack_ms));
  options.hbm_bytes = absl::GetFlag(FLAGS_hbm_bytes);
  for (const std::string& device : absl::GetFlag(FLAGS_hbm_devices)) {
    int number = -1;
    if (!absl::SimpleAtoi(device, &number) || number < 0) {
      std::fprintf(stderr, "okv_faults: error: --hbm_devices: '%s' is no GPU's number\n",
                   device.c_str());
      return std::nullopt;
    }
    options.hbm_devices.push_back(number);
  }
  if (options.hbm_bytes > 0 || options.hbm_devices.empty()) return options;
  std::fprintf(stderr, "okv_faults: error: --hbm_bytes must be positive\n");
  return std::nullopt;
}

// False when something was wrong.
bool RunRound(const Scenario& scenario, uint64_t seed, const RoundOptions& options, Tally* tally) {
  const auto start = std::chrono::steady_clock::now();
  Round round(seed, options, tally);
  Tally::Scenario& counts = tally->scenarios[scenario.name];
  const std::string skipped = scenario.run(&round);
  // What went wrong before is none the less wrong.
  if (!skipped.empty()) round.CheckNodesRun();
  if (!skipped.empty() && round.failures().empty()) {
    ++counts.skipped;
    counts.skip_reason = skipped;
    std::printf("%s, seed %llu: skipped: %s\n", scenario.name,
                static_cast<unsigned long long>(seed), skipped.c_str());
    return true;
  }
  if (skipped.empty()) round.Finish();
  ++tally->rounds;
  ++counts.rounds;
  for (const auto& [mark, count] : round.seen()) counts.seen[mark] += count;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s, seed %llu: %s in %.2f s\n", scenario.name, static_cast<unsigned long long>(seed),
              round.failures().empty() ? "ok" : "FAILED", seconds.count());
  std::fflush(stdout);
  if (absl::GetFlag(FLAGS_logs)) std::printf("%s", round.Logs().c_str());
  if (round.failures().empty()) return true;
  for (const std::string& failure : round.failures()) std::printf("  %s\n", failure.c_str());
  if (!skipped.empty()) std::printf("  and it went no further: %s\n", skipped.c_str());
  if (!absl::GetFlag(FLAGS_logs)) std::printf("%s", round.Logs().c_str());
  const std::string gpus = absl::StrJoin(absl::GetFlag(FLAGS_hbm_devices), ",");
  std::printf("  repeat: tests/faults.sh --rounds 1 --seed %llu --scenario %s%s%s\n",
              static_cast<unsigned long long>(seed), scenario.name,
              gpus.empty() ? "" : " --hbm_devices ", gpus.c_str());
  std::fflush(stdout);
  return false;
}

Json Summary(const Tally& tally, uint64_t seed) {
  Json scenarios = Json::object();
  for (const auto& [name, counts] : tally.scenarios) {
    scenarios[name] = {
        {"rounds", counts.rounds}, {"skipped", counts.skipped}, {"seen", counts.seen}};
    if (counts.skipped > 0) scenarios[name]["skip_reason"] = counts.skip_reason;
  }
  return {{"rounds", tally.rounds},
          {"reads", tally.reads},
          {"verified_hits", tally.verified_hits},
          {"unexpected_misses", tally.unexpected_misses},
          {"wrong_bytes", tally.wrong_bytes},
          {"lost_objects", tally.lost_objects},
          {"hangs", tally.hangs},
          {"failed_checks", tally.failed_checks},
          {"overrun_ms_max", tally.overrun_ms_max},
          {"seed", seed},
          {"scenarios", scenarios}};
}

int RunDriver() {
  // A scenario that mounts says itself why it cannot.
  if (const std::string why = OwnMounts(); !why.empty()) std::printf("%s\n", why.c_str());
  const std::vector<Scenario> all = AllScenarios();
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const std::optional<RoundOptions> options = OptionsFromFlags();
  if (!options.has_value()) return 2;
  Tally tally;
  uint64_t failed_rounds = 0;
  for (uint64_t i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
    const Scenario* scenario = Choose(all, seed + i);
    if (scenario == nullptr) {
      std::fprintf(stderr, "okv_faults: no scenario '%s'; there are:\n",
                   absl::GetFlag(FLAGS_scenario).c_str());
      for (const Scenario& known : all) std::fprintf(stderr, "  %s\n", known.name);
      return 2;
    }
    if (!RunRound(*scenario, seed + i, *options, &tally)) ++failed_rounds;
  }
  // A scenario that fills a disk asks for much that had to go.
  const bool one = !absl::GetFlag(FLAGS_scenario).empty();
  const bool enough = one || tally.verified_hits * 2 >= tally.reads;
  if (!enough) std::printf("fewer than half of the reads were verified hits\n");
  bool bites = true;
  for (const Scenario& scenario : all) {
    const auto counts = tally.scenarios.find(scenario.name);
    if (counts == tally.scenarios.end()) continue;
    for (const std::string& mark : MarksNotSeen(counts->second, scenario.marks)) {
      std::printf("%s: in %llu rounds never '%s': it does not do what it is for\n", scenario.name,
                  static_cast<unsigned long long>(counts->second.rounds), mark.c_str());
      bites = false;
    }
  }
  if (tally.rounds == 0) std::printf("no round ran\n");
  const Json summary = Summary(tally, seed);
  std::printf("%s\n", absl::GetFlag(FLAGS_json) ? summary.dump().c_str()
                                                : summary.dump(/*indent=*/1).c_str());
  return failed_rounds == 0 && enough && bites && tally.rounds > 0 ? 0 : 1;
}

}  // namespace
}  // namespace okv::faults

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("okv_faults: fault rounds over a real cluster (see --helpfull)");
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_worker)) {
    return okv::faults::RunWorker({.control_address = absl::GetFlag(FLAGS_control),
                                   .journal = absl::GetFlag(FLAGS_journal),
                                   .name = absl::GetFlag(FLAGS_name)});
  }
  signal(SIGPIPE, SIG_IGN);
  return okv::faults::RunDriver();
}
