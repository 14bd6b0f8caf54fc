// okv-calibrate: builds a model's rotation set from dumped queries, keys and values, or from
// published files, and reads one.
//
//   okv-calibrate fit --dump DIR --out FILE [--method oscar|hadamard|none]
//       [--ranks N [--rank R --rendezvous HOST:PORT]] [--nccl] [...]
//   okv-calibrate import --k_file K.pt --v_file V.pt --model NAME --weights_revision REVISION
//       --kv_heads N --group_size G --clip_k RATIO --clip_v RATIO --out FILE
//   okv-calibrate export --set FILE --k_out K.pt --v_out V.pt --format v1|v2
//   okv-calibrate inspect FILE
//   okv-calibrate report --activations DIR [--dump DIR] [--rotations FILE,NAME=FILE,...]
//       [--json_out FILE] [--html_out FILE]
//   okv-calibrate draw --out DIR [--layers N] [--tokens N] [...]: random rows, to measure with
//   okv-calibrate draw --out DIR --k_file K.pt --v_file V.pt [--layer_ids ID,ID] [--tokens N] [...]
//
// Exit code 0, or 1 with one line on stderr that names what is wrong.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "calib/dump.h"
#include "calib/files.h"
#include "calib/fit.h"
#include "calib/linalg.h"
#include "cmd/calibrate/draw.h"
#include "cmd/calibrate/fit_summary.h"
#include "cmd/calibrate/published.h"
#include "cmd/calibrate/ranks.h"
#include "cmd/calibrate/report.h"
#include "cmd/support/command_flags.h"
#include "kernels/thread_pool.h"
#include "nlohmann/json.hpp"
#include "proto/rotation_set.h"
#include "proto/status_macros.h"

ABSL_FLAG(std::string, dump, "",
          "fit: the dump's directory, in one of three layouts (dump.h); report: what U is made of, "
          "default other windows of --activations");
ABSL_FLAG(std::string, out, "",
          "fit, import: the rotation set to write (safetensors); draw: the dump's directory");
ABSL_FLAG(std::string, method, "oscar", "fit: oscar, hadamard or none");
ABSL_FLAG(uint32_t, group_size, 64, "fit, import: channels that share a scale, 32 to head_dim");
ABSL_FLAG(std::string, scope, "",
          "fit: a rotation per kv_head or layer, default by --recipe; report: U's, default layer");
ABSL_FLAG(std::string, value_objective, "softmax",
          "fit: values weighed by softmax, energy or auto");
ABSL_FLAG(std::string, recipe, "fitted", "fit: fitted (to held-out error), or published");
ABSL_FLAG(std::string, key_objective, "", "fit: auto, qqt, kkt or offset; default by --recipe");
ABSL_FLAG(std::string, clip_k, "",
          "fit, import: clip ratio of keys, 0 = off; fit: or auto, default by --recipe");
ABSL_FLAG(std::string, clip_v, "", "fit, import: the same for values");
ABSL_FLAG(uint32_t, refine_steps, 400, "fit: of each descent from U H P_br, 0 = none");
ABSL_FLAG(uint32_t, fit_windows, 16, "fit: windows of 2,048 tokens whose rows are fitted on");
ABSL_FLAG(uint32_t, judge_windows, 6, "fit: windows, not among those, that decide");
ABSL_FLAG(uint32_t, value_tokens_max, 8192,
          "fit, report: tokens a layer that the softmax objective reads");
ABSL_FLAG(uint32_t, value_sequence_tokens_max, 2048,
          "fit, report: of those, at most this many a sequence");
ABSL_FLAG(uint32_t, measure_tokens, 1024, "fit: tokens a layer for the INT2 errors, 0 = off");
ABSL_FLAG(uint32_t, threads, 0, "fit, report, draw: threads, 0 = one a core");
ABSL_FLAG(uint32_t, ranks, 0, "fit: ranks that share the work, 0 = one, or with --nccl one a GPU");
ABSL_FLAG(int32_t, rank, -1, "fit: which rank this process is, -1 = all, as threads");
ABSL_FLAG(std::string, rendezvous, "", "fit: HOST:PORT where rank 0 listens, with --rank");
ABSL_FLAG(bool, nccl, false, "fit: covariances on GPUs, a rank each, summed by NCCL");
ABSL_FLAG(std::string, k_file, "", "import, draw: the published rotations of keys (.pt)");
ABSL_FLAG(std::string, v_file, "", "import, draw: those of values");
ABSL_FLAG(std::string, model, "",
          "import, fit, report: the model's name, of a dump where that does not say it");
ABSL_FLAG(std::string, weights_revision, "",
          "import, fit, report: the revision of its weights, the same");
ABSL_FLAG(uint32_t, kv_heads, 0, "import, draw: its KV heads; draw: 0 = 8");
ABSL_FLAG(uint32_t, rotary_dim, 0, "inspect: channels of a head that RoPE turns, 0 = all");
ABSL_FLAG(std::string, set, "", "export: the rotation set to read");
ABSL_FLAG(std::string, k_out, "", "export: the file of keys to write (.pt)");
ABSL_FLAG(std::string, v_out, "", "export: that of values");
ABSL_FLAG(std::string, format, "v1", "export: v1 (a rotation a layer) or v2 (one a KV head)");
ABSL_FLAG(uint32_t, layers, 36, "draw: layers");
ABSL_FLAG(std::vector<std::string>, layer_ids, {}, "draw: layers of --k_file; default all");
ABSL_FLAG(uint32_t, query_heads, 32, "draw: query heads");
ABSL_FLAG(uint32_t, head_dim, 128, "draw: channels of a head");
ABSL_FLAG(uint32_t, tokens, 30'000, "draw: tokens of a layer");
ABSL_FLAG(uint32_t, sequence_tokens, 2'000, "draw: tokens of a sequence");
ABSL_FLAG(uint32_t, seed, 1, "draw: of the random numbers");
ABSL_FLAG(std::string, activations, "", "report: a dump of text that nothing was fitted to");
ABSL_FLAG(std::vector<std::string>, rotations, {}, "report: sets to measure, FILE or NAME=FILE");
ABSL_FLAG(std::vector<std::string>, group_sizes, {}, "report: default 32, 64, 128 to head_dim");
ABSL_FLAG(uint32_t, windows, 3, "report: windows of 2,048 tokens that are measured");
ABSL_FLAG(std::string, json_out, "", "report: write all numbers to this file");
ABSL_FLAG(std::string, html_out, "", "report: write a page to look at to this file");
ABSL_FLAG(bool, json, false, "print one JSON object as the last line");

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

void PrintJson(const Json& json) {
  std::printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

// Leaves *ratio alone when `text` is empty.
absl::Status ParseClip(absl::string_view name, const std::string& text,
                       std::optional<double>* ratio) {
  if (text.empty()) return absl::OkStatus();
  double value = 0;
  if (text == "auto") {
    ratio->reset();
  } else if (absl::SimpleAtod(text, &value)) {
    *ratio = value;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, " '", text, "' is neither a number nor auto"));
  }
  return absl::OkStatus();
}

// The index of `word` in `words`. kInvalidArgument naming the flag.
absl::StatusOr<size_t> ParseWord(absl::string_view flag, absl::string_view word,
                                 const std::vector<absl::string_view>& words) {
  const auto found = std::find(words.begin(), words.end(), word);
  if (found != words.end()) return static_cast<size_t>(found - words.begin());
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " '", word, "' is not known; there are: ", absl::StrJoin(words, ", ")));
}

uint32_t ThreadsFromFlags() {
  const uint32_t threads = absl::GetFlag(FLAGS_threads);
  return threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
}

absl::StatusOr<FitOptions> OptionsFromFlags() {
  FitOptions options;
  OKV_ASSIGN_OR_RETURN(options.method, ParseMethod(absl::GetFlag(FLAGS_method)));
  OKV_ASSIGN_OR_RETURN(const size_t recipe,
                       ParseWord("recipe", absl::GetFlag(FLAGS_recipe), {"fitted", "published"}));
  if (recipe == 1) options = FitOptions::Published(options.method);
  if (const std::string name = absl::GetFlag(FLAGS_scope); !name.empty()) {
    OKV_ASSIGN_OR_RETURN(options.scope, ParseScope(name));
  }
  OKV_ASSIGN_OR_RETURN(options.value_objective,
                       ParseValueObjective(absl::GetFlag(FLAGS_value_objective)));
  if (const std::string name = absl::GetFlag(FLAGS_key_objective); !name.empty()) {
    OKV_ASSIGN_OR_RETURN(options.key_objective, ParseKeyObjective(name));
  }
  options.group_size = absl::GetFlag(FLAGS_group_size);
  OKV_RETURN_IF_ERROR(ParseClip("clip_k", absl::GetFlag(FLAGS_clip_k), &options.clip_k));
  OKV_RETURN_IF_ERROR(ParseClip("clip_v", absl::GetFlag(FLAGS_clip_v), &options.clip_v));
  options.value_sample = {.tokens_max = absl::GetFlag(FLAGS_value_tokens_max),
                          .sequence_tokens_max = absl::GetFlag(FLAGS_value_sequence_tokens_max)};
  if (recipe == 0) options.refine_steps = absl::GetFlag(FLAGS_refine_steps);
  options.fit_windows = absl::GetFlag(FLAGS_fit_windows);
  options.judge_windows = absl::GetFlag(FLAGS_judge_windows);
  options.measure_tokens = absl::GetFlag(FLAGS_measure_tokens);
  return options;
}

RankOptions RanksFromFlags() {
  RankOptions ranks{.ranks_count = absl::GetFlag(FLAGS_ranks),
                    .rank = {},
                    .rendezvous = absl::GetFlag(FLAGS_rendezvous),
                    .nccl = absl::GetFlag(FLAGS_nccl),
                    .threads = ThreadsFromFlags()};
  if (const int32_t rank = absl::GetFlag(FLAGS_rank); rank >= 0) {
    ranks.rank = static_cast<uint32_t>(rank);
  }
  return ranks;
}

std::string ClipText(const std::optional<double>& ratio) {
  return ratio.has_value() ? absl::StrCat(*ratio) : "auto";
}

// How often each key objective was used: "kkt 80, offset 10".
std::string KeyObjectiveCounts(const FitResult& result) {
  std::map<absl::string_view, size_t> counts;
  for (const LayerReport& layer : result.layers) {
    for (const KeyObjective one : layer.key_objectives) ++counts[KeyObjectiveName(one)];
  }
  return absl::StrJoin(counts, ", ", absl::PairFormatter(" "));
}

// What made the set, without a date: the same dump and options give the same file.
std::map<std::string, std::string> Provenance(const DumpReader& dump, const FitOptions& options,
                                              const FitResult& result) {
  std::map<std::string, std::string> facts = {
      {"program", "okv-calibrate"},
      {"text_source", dump.info().text_source},
      {"tokens", absl::StrCat(dump.tokens_count())},
      {"sequences", absl::StrCat(dump.sequence_lengths().size())},
      {"query_heads", absl::StrCat(dump.info().query_heads)},
      {"clip_k", ClipText(options.clip_k)},
      {"clip_v", ClipText(options.clip_v)}};
  if (options.method == Method::kOscar) {
    facts["scope"] = std::string(ScopeName(options.scope));
    facts["key_objective"] = std::string(KeyObjectiveName(options.key_objective));
    facts["key_objectives_used"] = KeyObjectiveCounts(result);
    facts["refine_steps"] = absl::StrCat(options.refine_steps);
    facts["value_objective"] = std::string(ValueObjectiveName(options.value_objective));
    if (result.value_tokens > 0) facts["value_tokens"] = absl::StrCat(result.value_tokens);
  }
  return facts;
}

void PrintProgress(size_t done, size_t layers_count, const LayerReport& report) {
  std::fprintf(stderr, "layer %u (%zu of %zu): |R R^T - I| %.1e, clip ranks K %s V %s",
               report.layer_id, done, layers_count, report.orthogonality_error,
               absl::StrJoin(report.clip_rank_k, " ").c_str(),
               absl::StrJoin(report.clip_rank_v, " ").c_str());
  for (const KeyObjective objective : report.key_objectives) {
    std::fprintf(stderr, " %s", std::string(KeyObjectiveName(objective)).c_str());
  }
  if (!report.key_objectives.empty()) {
    std::fprintf(stderr, ", refined %u of %zu", report.refined, 2 * report.key_objectives.size());
  }
  if (report.judged_k.signal > 0) {
    std::fprintf(stderr, ", output error by K %.5f", report.judged_k.ratio());
  }
  if (report.judged_v.signal > 0) std::fprintf(stderr, ", by V %.5f", report.judged_v.ratio());
  std::fprintf(stderr, "\n");
}

// The means over layers, for people and programs.
Json Summary(const DumpReader& dump, const FitOptions& options, const FitResult& result,
             double seconds) {
  double orthogonality_error = 0;
  uint32_t refined = 0;
  bool judged = true;  // In every layer.
  double judged_k = 0;
  double judged_v = 0;
  Int2Errors sum;
  for (const LayerReport& layer : result.layers) {
    refined += layer.refined;
    judged = judged && layer.judged_k.signal > 0 && layer.judged_v.signal > 0;
    judged_k += layer.judged_k.ratio();
    judged_v += layer.judged_v.ratio();
    orthogonality_error = std::max(orthogonality_error, layer.orthogonality_error);
    sum.tokens_count += layer.int2.tokens_count;
    sum.logit += layer.int2.logit;
    sum.value += layer.int2.value;
    sum.output += layer.int2.output;
  }
  const double layers_count = static_cast<double>(result.layers.size());
  Json json = {{"method", MethodName(options.method)},
               {"group_size", options.group_size},
               {"layers", result.layers.size()},
               {"tokens", dump.tokens_count()},
               {"value_tokens", result.value_tokens},
               {"hash", result.rotations.hash().Hex()},
               {"seconds", seconds},
               {"orthogonality_error_max", orthogonality_error}};
  if (options.method == Method::kOscar) {
    json["scope"] = ScopeName(options.scope);
    json["key_objective"] = KeyObjectiveName(options.key_objective);
    json["key_objectives_used"] = KeyObjectiveCounts(result);
    json["refined"] = refined;
    json["value_objective"] = ValueObjectiveName(options.value_objective);
  }
  // The least of what was tried, on the windows that chose it.
  if (judged) {
    json["judged_error_k_mean"] = judged_k / layers_count;
    json["judged_error_v_mean"] = judged_v / layers_count;
  }
  if (sum.tokens_count > 0) {
    json["measured_tokens"] = sum.tokens_count / result.layers.size();
    json["logit_error_mean"] = sum.logit / layers_count;
    json["value_error_mean"] = sum.value / layers_count;
    json["output_error_mean"] = sum.output / layers_count;
  }
  return json;
}

absl::Status Fit() {
  const auto start = std::chrono::steady_clock::now();
  const std::string out = absl::GetFlag(FLAGS_out);
  const RankOptions ranks = RanksFromFlags();
  OKV_RETURN_IF_ERROR(ranks.Validate());
  if (absl::GetFlag(FLAGS_dump).empty()) return absl::InvalidArgumentError("--dump is missing");
  if (out.empty() && ranks.writes_result()) {
    return absl::InvalidArgumentError("--out is missing");
  }
  OKV_ASSIGN_OR_RETURN(const FitOptions options, OptionsFromFlags());
  OKV_ASSIGN_OR_RETURN(
      const DumpReader dump,
      DumpReader::Open(absl::GetFlag(FLAGS_dump),
                       {.model = absl::GetFlag(FLAGS_model),
                        .weights_revision = absl::GetFlag(FLAGS_weights_revision)}));
  OKV_RETURN_IF_ERROR(options.Validate(dump.info().head_dim));
  // Opened first: a path that cannot be written shows before the work, not after it.
  std::optional<AtomicFile> file;
  if (ranks.writes_result()) {
    OKV_ASSIGN_OR_RETURN(AtomicFile created, AtomicFile::Create(out));
    file.emplace(std::move(created));
  }
  size_t done = 0;
  Json rank_facts;
  OKV_ASSIGN_OR_RETURN(FitResult result, FitOverRanks(
                                             dump, options, ranks,
                                             [&](const LayerReport& report) {
                                               PrintProgress(++done, dump.info().layer_ids.size(),
                                                             report);
                                             },
                                             &rank_facts));
  if (!file.has_value()) return absl::OkStatus();
  if (result.value_tokens > 0 && result.value_tokens < dump.tokens_count()) {
    std::fprintf(stderr,
                 "the softmax objective read %u of %u tokens: --value_tokens_max %u, "
                 "--value_sequence_tokens_max %u\n",
                 result.value_tokens, dump.tokens_count(), options.value_sample.tokens_max,
                 options.value_sample.sequence_tokens_max);
  }
  result.rotations.provenance = Provenance(dump, options, result);
  OKV_RETURN_IF_ERROR(file->Append(result.rotations.Serialize()));
  OKV_RETURN_IF_ERROR(file->Commit());

  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  Json summary = Summary(dump, options, result, elapsed.count());
  const Json comparisons = FitComparisons(result);
  std::fputs(FitComparisonLines(comparisons).c_str(), stderr);
  summary.update(comparisons);
  summary.update(rank_facts);
  if (absl::GetFlag(FLAGS_json)) {
    PrintJson(summary);
  } else {
    std::printf("%s: %s, %zu layers, hash %s, %.1f s\n", out.c_str(),
                result.rotations.method.c_str(), result.layers.size(),
                result.rotations.hash().Hex().c_str(), elapsed.count());
  }
  return absl::OkStatus();
}

// One fact a line, or the whole as JSON.
void PrintFacts(const Json& json) {
  if (absl::GetFlag(FLAGS_json)) {
    PrintJson(json);
    return;
  }
  for (const auto& [name, value] : json.items()) {
    std::printf("%s: %s\n", name.c_str(),
                value.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  }
}

absl::Status Inspect(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  absl::StatusOr<SourcedSet> parsed = ParseSourced(file.bytes());
  if (!parsed.ok()) {
    return absl::Status(parsed.status().code(),
                        absl::StrCat(path, ": ", parsed.status().message()));
  }
  const RotationSet& set = parsed->set;
  double orthogonality_error = 0;
  for (uint32_t layer = 0; layer < set.layer_ids.size(); ++layer) {
    for (uint32_t head = 0; head < set.rotation_heads; ++head) {
      orthogonality_error = std::max(
          {orthogonality_error, OrthogonalityError(set.RotationK(layer, head), set.head_dim),
           OrthogonalityError(set.RotationV(layer, head), set.head_dim)});
    }
  }
  const auto ranks = [](const std::vector<uint32_t>& all) {
    const auto [low, high] = std::minmax_element(all.begin(), all.end());
    return *low == *high ? absl::StrCat(*low) : absl::StrCat(*low, " to ", *high);
  };
  Json json = {{"model", set.model},
               {"weights_revision", set.weights_revision},
               {"hash", set.hash().Hex()},
               {"method", set.method},
               {"layer_ids", set.layer_ids},
               {"kv_heads", set.kv_heads},
               {"head_dim", set.head_dim},
               {"group_size", set.group_size},
               {"rotation_heads", set.rotation_heads},
               {"clip_rank_k", ranks(set.clip_rank_k)},
               {"clip_rank_v", ranks(set.clip_rank_v)},
               {"orthogonality_error_max", orthogonality_error},
               {"provenance", set.provenance}};
  OKV_RETURN_IF_ERROR(AddSourceFacts(*parsed, absl::GetFlag(FLAGS_rotary_dim), &json));
  PrintFacts(json);
  return absl::OkStatus();
}

// A clip ratio that no file holds and nothing fits here.
absl::StatusOr<double> RequiredClip(absl::string_view name, const std::string& text) {
  std::optional<double> ratio;
  OKV_RETURN_IF_ERROR(ParseClip(name, text, &ratio));
  if (ratio.has_value()) return *ratio;
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " needs a ratio, 0 = off: published files do not hold it"));
}

absl::Status Import() {
  ImportOptions options = {.model = absl::GetFlag(FLAGS_model),
                           .weights_revision = absl::GetFlag(FLAGS_weights_revision),
                           .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                           .group_size = absl::GetFlag(FLAGS_group_size)};
  OKV_ASSIGN_OR_RETURN(options.clip_k, RequiredClip("clip_k", absl::GetFlag(FLAGS_clip_k)));
  OKV_ASSIGN_OR_RETURN(options.clip_v, RequiredClip("clip_v", absl::GetFlag(FLAGS_clip_v)));
  OKV_ASSIGN_OR_RETURN(const Json facts, ImportFiles({.k_file = absl::GetFlag(FLAGS_k_file),
                                                      .v_file = absl::GetFlag(FLAGS_v_file),
                                                      .out = absl::GetFlag(FLAGS_out)},
                                                     options));
  PrintFacts(facts);
  return absl::OkStatus();
}

absl::Status Export() {
  OKV_ASSIGN_OR_RETURN(const PublishedVersion version,
                       ParsePublishedVersion(absl::GetFlag(FLAGS_format)));
  OKV_ASSIGN_OR_RETURN(const Json facts, ExportFiles({.set = absl::GetFlag(FLAGS_set),
                                                      .k_out = absl::GetFlag(FLAGS_k_out),
                                                      .v_out = absl::GetFlag(FLAGS_v_out)},
                                                     version));
  PrintFacts(facts);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint32_t>> ParseNumbers(absl::string_view name,
                                                   const std::vector<std::string>& texts) {
  std::vector<uint32_t> numbers;
  for (const std::string& text : texts) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", text, "' is no number"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::Status Report() {
  ReportOptions options;
  if (const std::string name = absl::GetFlag(FLAGS_scope); !name.empty()) {
    OKV_ASSIGN_OR_RETURN(options.scope, ParseScope(name));
  }
  OKV_ASSIGN_OR_RETURN(options.group_sizes,
                       ParseNumbers("group_sizes", absl::GetFlag(FLAGS_group_sizes)));
  options.windows_max = absl::GetFlag(FLAGS_windows);
  options.value_sample = {.tokens_max = absl::GetFlag(FLAGS_value_tokens_max),
                          .sequence_tokens_max = absl::GetFlag(FLAGS_value_sequence_tokens_max)};
  ThreadPool pool(ThreadsFromFlags());
  OKV_ASSIGN_OR_RETURN(const Json report,
                       WriteReport({.activations = absl::GetFlag(FLAGS_activations),
                                    .fit_dump = absl::GetFlag(FLAGS_dump),
                                    .rotations = absl::GetFlag(FLAGS_rotations),
                                    .json_out = absl::GetFlag(FLAGS_json_out),
                                    .html_out = absl::GetFlag(FLAGS_html_out)},
                                   {.model = absl::GetFlag(FLAGS_model),
                                    .weights_revision = absl::GetFlag(FLAGS_weights_revision)},
                                   options, &pool));
  if (absl::GetFlag(FLAGS_json)) {
    PrintJson(report);
  } else {
    std::printf("%s", SummaryText(report).c_str());
  }
  return absl::OkStatus();
}

absl::Status Draw() {
  DrawOptions options{.out = absl::GetFlag(FLAGS_out),
                      .k_file = absl::GetFlag(FLAGS_k_file),
                      .v_file = absl::GetFlag(FLAGS_v_file),
                      .layers_count = absl::GetFlag(FLAGS_layers),
                      .query_heads = absl::GetFlag(FLAGS_query_heads),
                      .head_dim = absl::GetFlag(FLAGS_head_dim),
                      .tokens_count = absl::GetFlag(FLAGS_tokens),
                      .sequence_tokens = absl::GetFlag(FLAGS_sequence_tokens),
                      .seed = absl::GetFlag(FLAGS_seed)};
  if (const uint32_t heads = absl::GetFlag(FLAGS_kv_heads); heads > 0) options.kv_heads = heads;
  OKV_ASSIGN_OR_RETURN(options.layer_ids,
                       ParseNumbers("layer_ids", absl::GetFlag(FLAGS_layer_ids)));
  ThreadPool pool(ThreadsFromFlags());
  return DrawDump(options, &pool);
}

absl::Status Run(const std::vector<char*>& words, absl::Span<const char* const> arguments) {
  if (words.size() > 1) {
    OKV_RETURN_IF_ERROR(CheckFlagsOf(
        words[1], {"fit", "import", "export", "report", "draw", "inspect"}, arguments));
  }
  if (words.size() == 2 && absl::string_view(words[1]) == "fit") return Fit();
  if (words.size() == 2 && absl::string_view(words[1]) == "import") return Import();
  if (words.size() == 2 && absl::string_view(words[1]) == "export") return Export();
  if (words.size() == 2 && absl::string_view(words[1]) == "report") return Report();
  if (words.size() == 2 && absl::string_view(words[1]) == "draw") return Draw();
  if (words.size() == 3 && absl::string_view(words[1]) == "inspect") return Inspect(words[2]);
  return absl::InvalidArgumentError(
      "say: okv-calibrate fit, import, export, report or draw with flags, or inspect FILE");
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "okv-calibrate fit|import|export|report|draw [flags] | okv-calibrate inspect FILE");
  const std::vector<const char*> arguments(argv, argv + argc);
  const absl::Status status = okv::Run(absl::ParseCommandLine(argc, argv), arguments);
  if (status.ok()) return 0;
  std::fprintf(stderr, "okv-calibrate: %s\n", status.ToString().c_str());
  return 1;
}
