#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/bench/quality.h"

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

std::string Text(const Interval& interval, int digits) {
  return absl::StrFormat("%.*f [%.*f, %.*f]", digits, interval.mean, digits, interval.low, digits,
                         interval.high);
}

Json ToJson(const Interval& interval) {
  return {{"mean", interval.mean}, {"low", interval.low}, {"high", interval.high}};
}

Json ToJson(const VariantQuality& variant, bool with_recall) {
  Json json = {{"rotation_hash", variant.rotation_hash},
               {"group_size", variant.group_size},
               {"bits_history", variant.bits.history},
               {"bits_all", variant.bits.all},
               {"history_tokens", variant.bits.history_tokens},
               {"nll", ToJson(variant.nll)},
               {"perplexity", ToJson(variant.perplexity)},
               {"gap", ToJson(variant.gap)},
               {"kl", ToJson(variant.kl)},
               {"top1_agreement", ToJson(variant.agreement)}};
  if (!with_recall) return json;
  json["recall"] = {{"accuracy", ToJson(variant.recall.accuracy)},
                    {"accuracy_loss", ToJson(variant.recall.accuracy_loss)},
                    {"top1_agreement", ToJson(variant.recall.agreement)},
                    {"verbatim_mean", ToJson(variant.recall.mean_run)},
                    {"verbatim_longest", variant.recall.longest_run}};
  return json;
}

void AppendQualityTable(const QualityReport& report, std::string* table) {
  absl::StrAppendFormat(table,
                        "%s: %d tokens in %d windows of %d; 95 %% intervals over windows: %s\n"
                        "%-20s %-26s %-29s %-29s %-26s %-19s %s\n",
                        report.model, report.tokens, report.windows, report.window,
                        IntervalMethod(report.windows), "KV", "perplexity", "NLL above BF16, nats",
                        "KL(BF16 || it), nats", "BF16's top-1, %", "bits: history, all",
                        "tokens read from INT2");
  for (const VariantQuality& variant : report.variants) {
    const Interval percent = {.mean = 100 * variant.agreement.mean,
                              .low = 100 * variant.agreement.low,
                              .high = 100 * variant.agreement.high};
    absl::StrAppendFormat(table, "%-20s %-26s %-29s %-29s %-26s %-19s %d\n", variant.name,
                          Text(variant.perplexity, 3), Text(variant.gap, 5), Text(variant.kl, 5),
                          Text(percent, 2),
                          absl::StrFormat("%.2f, %.2f", variant.bits.history, variant.bits.all),
                          variant.bits.history_tokens);
  }
}

void AppendRecallTable(const QualityReport& report, std::string* table) {
  const RecallOptions& recall = report.recall;
  absl::StrAppendFormat(
      table,
      "\nverbatim recall: %d passages of %d tokens, each read twice, the first %d of the second "
      "time not counted; 95 %% intervals over passages: %s\n"
      "%-20s %-26s %-26s %-26s %-26s %s\n",
      recall.passages, recall.passage_tokens, recall.cue_tokens, IntervalMethod(recall.passages),
      "KV", "recalled", "BF16's minus it", "BF16's top-1", "verbatim tokens, mean", "longest");
  for (const VariantQuality& variant : report.variants) {
    const RecallFigures& figures = variant.recall;
    absl::StrAppendFormat(table, "%-20s %-26s %-26s %-26s %-26s %d\n", variant.name,
                          Text(figures.accuracy, 4), Text(figures.accuracy_loss, 4),
                          Text(figures.agreement, 4), Text(figures.mean_run, 1),
                          figures.longest_run);
  }
}

}  // namespace

std::string QualityReport::ToTable() const {
  std::string table;
  AppendQualityTable(*this, &table);
  if (recall.passages > 0) AppendRecallTable(*this, &table);
  if (!differences.empty()) table += "\ndifferences of NLL, paired by window\n";
  for (const GapDifference& pair : differences) {
    absl::StrAppendFormat(&table, "%-44s %s\n", absl::StrCat(pair.a, " minus ", pair.b),
                          Text(pair.difference, 5));
  }
  if (!verdicts.empty()) {
    absl::StrAppendFormat(&table, "\ncontrols against %s\n", variants[1].name);
  }
  for (const ControlVerdict& verdict : verdicts) {
    absl::StrAppendFormat(
        &table, "%-16s %-15s %s: KL x %.3g, NLL above BF16 %s, above the reference's %s\n",
        verdict.name, verdict.expectation, verdict.held ? "held" : "NOT HELD", verdict.kl_ratio,
        Text(verdict.gap, 5), Text(verdict.gap_difference, 5));
  }
  return table;
}

std::string QualityReport::ToJson() const {
  const bool with_recall = recall.passages > 0;
  Json json = {{"model", model},
               {"seed", seed},
               {"tokens", tokens},
               {"windows", windows},
               {"window", window},
               {"interval", IntervalMethod(windows)},
               {"variants", Json::object()}};
  for (const VariantQuality& variant : variants) {
    json["variants"][variant.name] = okv::ToJson(variant, with_recall);
  }
  json["differences"] = Json::array();
  for (const GapDifference& pair : differences) {
    json["differences"].push_back(
        {{"a", pair.a}, {"b", pair.b}, {"gap_difference", okv::ToJson(pair.difference)}});
  }
  if (with_recall) {
    json["recall"] = {{"passages", recall.passages},
                      {"passage_tokens", recall.passage_tokens},
                      {"cue_tokens", recall.cue_tokens}};
  }
  json["controls"] = Json::array();
  for (const ControlVerdict& verdict : verdicts) {
    json["controls"].push_back({{"name", verdict.name},
                                {"expectation", verdict.expectation},
                                {"held", verdict.held},
                                {"kl_ratio", verdict.kl_ratio},
                                {"gap", okv::ToJson(verdict.gap)},
                                {"kl_difference", okv::ToJson(verdict.kl_difference)},
                                {"gap_difference", okv::ToJson(verdict.gap_difference)}});
  }
  return json.dump();
}

}  // namespace okv
