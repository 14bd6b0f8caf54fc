// okv-bench: measurements, one command each; --json prints one JSON object as the last line.

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/nll.h"

ABSL_FLAG(std::string, model, "", "nll: GGUF file of a Llama-family model");
ABSL_FLAG(std::string, text, "", "nll: text file");
ABSL_FLAG(uint32_t, skip_tokens, 0, "nll: tokens of the text to leave out first");
ABSL_FLAG(uint32_t, tokens, 32768, "nll: tokens, a multiple of --window");
ABSL_FLAG(uint32_t, window, 2048, "nll: tokens per sequence");
ABSL_FLAG(std::string, rotations, "", "nll: name=file,name=file,...");
ABSL_FLAG(uint32_t, sink_tokens, 64, "nll: tokens at the beginning kept in BF16");
ABSL_FLAG(uint32_t, recent_tokens, 256, "nll: last tokens kept in BF16");
ABSL_FLAG(uint32_t, threads, 0, "threads; 0 = one per core");
ABSL_FLAG(uint64_t, seed, 1, "seed of the bootstrap");
ABSL_FLAG(bool, json, false, "print one JSON object as the last line");

namespace okv {
namespace {

absl::Status Nll() {
  NllOptions options = {.model = absl::GetFlag(FLAGS_model),
                        .text = absl::GetFlag(FLAGS_text),
                        .skip_tokens = absl::GetFlag(FLAGS_skip_tokens),
                        .tokens = absl::GetFlag(FLAGS_tokens),
                        .window = absl::GetFlag(FLAGS_window),
                        .rotations = {},
                        .sink_tokens = absl::GetFlag(FLAGS_sink_tokens),
                        .recent_tokens = absl::GetFlag(FLAGS_recent_tokens),
                        .threads = absl::GetFlag(FLAGS_threads),
                        .seed = absl::GetFlag(FLAGS_seed)};
  const std::string rotations = absl::GetFlag(FLAGS_rotations);
  for (const absl::string_view piece : absl::StrSplit(rotations, ',', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> entry =
        absl::StrSplit(piece, absl::MaxSplits('=', 1));
    if (entry.first.empty() || entry.second.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rotations: '", piece, "' is not name=file"));
    }
    options.rotations.insert(entry);
  }
  absl::StatusOr<NllReport> report = RunNll(options);
  if (!report.ok()) return report.status();
  std::printf("%s", report->ToTable().c_str());
  if (absl::GetFlag(FLAGS_json)) std::printf("%s\n", report->ToJson().c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("okv-bench nll [flags]; --helpfull lists the flags");
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  const std::string command = words.size() == 2 ? words[1] : "";
  if (command != "nll") {
    std::fprintf(stderr, "okv-bench: error: one command is needed: nll\n");
    return 2;
  }
  const absl::Status status = okv::Nll();
  if (status.ok()) return 0;
  std::fprintf(stderr, "okv-bench: error: %s\n", status.ToString().c_str());
  return 1;
}
