#include "cmd/calibrate/report.h"

#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "calib/files.h"
#include "calib/report_html.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<NamedSet> ReadSet(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string path = equals == std::string::npos ? text : text.substr(equals + 1);
  OKV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  absl::StatusOr<RotationSet> set = RotationSet::Parse(file.bytes());
  if (!set.ok()) {
    return absl::Status(set.status().code(), absl::StrCat(path, ": ", set.status().message()));
  }
  return NamedSet{.name = equals == std::string::npos ? std::filesystem::path(path).stem().string()
                                                      : text.substr(0, equals),
                  .set = *std::move(set)};
}

Json TensorJson(const TensorMeasures& tensor) {
  return {{"max_abs", tensor.max_abs},
          {"group_range_mean", tensor.group_range},
          {"importance_max_over_mean", tensor.importance_ratio},
          {"error_trace", tensor.error_trace},
          {"clip_rate", tensor.clip_rate}};
}

Json MeasuresJson(const HeadMeasures& measures) {
  return {{"k", TensorJson(measures.k)},
          {"v", TensorJson(measures.v)},
          {"logit_error", measures.logit.ratio()},
          {"attention_kl", measures.attention.kl()},
          {"output_error_k", measures.attention.output_by_k.ratio()},
          {"output_error_v", measures.attention.output_by_v.ratio()},
          {"output_error", measures.attention.output.ratio()}};
}

Json LayerJson(const LayerMeasures& layer) {
  Json json = {{"layer", layer.layer_id}, {"rows", layer.rows_count}};
  for (const VariantMeasures& variant : layer.variants) {
    Json one = {{"name", variant.name}, {"group_size", variant.group_size}};
    one["layer"] = MeasuresJson(variant.layer);
    // Absolute numbers too, as published tables have them.
    one["layer"]["logit_error_trace"] = variant.layer.logit.error;
    for (const HeadMeasures& head : variant.heads) one["heads"].push_back(MeasuresJson(head));
    json["variants"].push_back(std::move(one));
  }
  for (const auto& [name, spectra] :
       {std::pair("k_spectra", &layer.k_spectra), std::pair("v_spectra", &layer.v_spectra)}) {
    for (const Spectrum& one : *spectra) json[name][one.name] = one.values;
  }
  for (const KeyHistogram& one : layer.k_histograms) {
    json["k_histograms"][one.name] = {{"limit", one.limit}, {"counts", one.counts}};
  }
  return json;
}

Json HeadJson(const CalibrationReport& report) {
  Json windows = Json::array();
  for (const SequenceRange& one : report.windows) {
    windows.push_back({one.first_token, one.tokens_count});
  }
  Json json = {{"model", report.info.model},
               {"weights_revision", report.info.weights_revision},
               {"text_source", report.info.text_source},
               {"tokens", report.tokens_count},
               {"query_heads", report.info.query_heads},
               {"kv_heads", report.info.kv_heads},
               {"head_dim", report.info.head_dim},
               {"sink_tokens", report.shape.sink_tokens},
               {"recent_tokens", report.shape.recent_tokens},
               {"windows", std::move(windows)},
               {"fitted_on", report.fitted_on},
               {"scope", ScopeName(report.scope)},
               {"notes", report.notes}};
  for (const VariantMeasures& variant : report.Summary()) {
    Json one = {{"name", variant.name}, {"group_size", variant.group_size}};
    one.update(MeasuresJson(variant.layer));
    json["summary"].push_back(std::move(one));
  }
  return json;
}

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

absl::StatusOr<Json> WriteReport(const ReportPaths& paths, const DumpNames& names,
                                 const ReportOptions& options, ThreadPool* pool) {
  if (paths.activations.empty()) return absl::InvalidArgumentError("--activations is missing");
  OKV_ASSIGN_OR_RETURN(const DumpReader activations, DumpReader::Open(paths.activations, names));
  std::optional<DumpReader> fit;
  if (!paths.fit_dump.empty()) {
    OKV_ASSIGN_OR_RETURN(DumpReader reader, DumpReader::Open(paths.fit_dump, names));
    fit.emplace(std::move(reader));
  }
  std::vector<NamedSet> sets;
  for (const std::string& text : paths.rotations) {
    OKV_ASSIGN_OR_RETURN(NamedSet set, ReadSet(text));
    sets.push_back(std::move(set));
  }
  // Opened first: a path that cannot be written shows before the work, not after it.
  std::optional<AtomicFile> json_file;
  std::optional<AtomicFile> html_file;
  for (const auto& [path, file] :
       {std::pair(&paths.json_out, &json_file), std::pair(&paths.html_out, &html_file)}) {
    if (path->empty()) continue;
    OKV_ASSIGN_OR_RETURN(AtomicFile one, AtomicFile::Create(*path));
    file->emplace(std::move(one));
  }

  size_t done = 0;
  OKV_ASSIGN_OR_RETURN(const CalibrationReport report,
                       MeasureReport(activations, fit.has_value() ? &*fit : nullptr, sets, options,
                                     pool, [&](const LayerMeasures& layer) {
                                       std::fprintf(stderr, "layer %u (%zu of %zu)\n",
                                                    layer.layer_id, ++done,
                                                    activations.info().layer_ids.size());
                                     }));
  Json head = HeadJson(report);
  if (json_file.has_value()) {
    Json whole = head;
    for (const LayerMeasures& layer : report.layers) whole["layers"].push_back(LayerJson(layer));
    OKV_RETURN_IF_ERROR(json_file->Append(Dump(whole) + "\n"));
    OKV_RETURN_IF_ERROR(json_file->Commit());
  }
  if (html_file.has_value()) {
    OKV_RETURN_IF_ERROR(html_file->Append(RenderReportHtml(report)));
    OKV_RETURN_IF_ERROR(html_file->Commit());
  }
  return head;
}

std::string SummaryText(const Json& report) {
  std::string text;
  for (const auto& note : report["notes"]) {
    absl::StrAppend(&text, "note: ", note.get_ref<const std::string&>(), "\n");
  }
  absl::StrAppendFormat(&text, "%-4s %-16s %8s %8s %10s %10s %10s %10s %10s %10s %10s\n", "g",
                        "rotation", "max|K|", "range K", "importance", "tr(E_K)", "logit err", "KL",
                        "out by K", "out by V", "out");
  for (const Json& one : report["summary"]) {
    const Json& k = one["k"];
    const auto number = [](const Json& from, const char* name) { return from[name].get<double>(); };
    absl::StrAppendFormat(
        &text,
        "%-4d %-16s %8.3g %8.3g %10.3g %10.4g %10.3g %10.3g %10.3g %10.3g "
        "%10.3g\n",
        one["group_size"].get<int>(), one["name"].get<std::string>(), number(k, "max_abs"),
        number(k, "group_range_mean"), number(k, "importance_max_over_mean"),
        number(k, "error_trace"), number(one, "logit_error"), number(one, "attention_kl"),
        number(one, "output_error_k"), number(one, "output_error_v"), number(one, "output_error"));
  }
  return text;
}

}  // namespace okv
