#include "calib/report_html.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "calib/html.h"

namespace okv {
namespace {

// The steps keep their colors, whatever is in the report; sets take the others in turn.
class Palette {
 public:
  explicit Palette(const CalibrationReport& report) {
    for (const VariantMeasures& variant : report.layers.front().variants) Add(variant.name);
  }

  PlotSeries Series(const std::string& name, std::vector<double> y) const {
    const size_t place =
        static_cast<size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
    constexpr size_t kSteps = 6;
    const size_t color =
        place < kPlotColors ? place : kSteps + (place - kSteps) % (kPlotColors - kSteps);
    return {.name = name,
            .color = color,
            .dashed = name == "UHP recipe" || place >= kPlotColors,
            .y = std::move(y)};
  }

 private:
  void Add(const std::string& name) {
    if (names_.empty()) names_ = {"none", "hadamard", "U", "UH", "UHP", "UHP recipe"};
    if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
  }
  std::vector<std::string> names_;
};

std::string Paragraph(absl::string_view text, absl::string_view css = "") {
  return absl::StrCat("<p", css.empty() ? "" : absl::StrCat(" class=\"", css, "\""), ">",
                      HtmlEscape(text), "</p>\n");
}

std::string Card(const std::string& svg) {
  return absl::StrCat("<div class=\"card\">", svg, "</div>\n");
}

std::vector<uint32_t> GroupSizes(const CalibrationReport& report) {
  std::set<uint32_t> sizes;
  for (const VariantMeasures& one : report.layers.front().variants) sizes.insert(one.group_size);
  return {sizes.begin(), sizes.end()};
}

// One row a variant of this group size.
HtmlTable KeyTable(const std::vector<VariantMeasures>& variants, uint32_t group_size) {
  HtmlTable table{
      .columns = {"keys", "max |K|", "mean group range", "importance max / mean", "tr(E_K)",
                  "logit error", "attention KL, nats", "output error by K", "clip rate"},
      .rows = {},
      .marks = {false, false, false, true, true, true, true, false}};
  for (const VariantMeasures& one : variants) {
    if (one.group_size != group_size) continue;
    const HeadMeasures& m = one.layer;
    table.rows.push_back({.name = one.name,
                          .values = {m.k.max_abs, m.k.group_range, m.k.importance_ratio,
                                     m.k.error_trace, m.logit.ratio(), m.attention.kl(),
                                     m.attention.output_by_k.ratio(), m.k.clip_rate}});
  }
  return table;
}

HtmlTable ValueTable(const std::vector<VariantMeasures>& variants, uint32_t group_size) {
  HtmlTable table{.columns = {"values", "max |V|", "mean group range", "importance max / mean",
                              "tr(E_V)", "output error by V", "clip rate", "output error, K and V"},
                  .rows = {},
                  .marks = {false, false, false, true, true, false, true}};
  for (const VariantMeasures& one : variants) {
    if (one.group_size != group_size) continue;
    const HeadMeasures& m = one.layer;
    table.rows.push_back(
        {.name = one.name,
         .values = {m.v.max_abs, m.v.group_range, m.v.importance_ratio, m.v.error_trace,
                    m.attention.output_by_v.ratio(), m.v.clip_rate, m.attention.output.ratio()}});
  }
  return table;
}

std::string Head(const CalibrationReport& report) {
  std::string html =
      absl::StrCat("<h1>Calibration report: ", HtmlEscape(report.info.model), "</h1>\n");
  uint64_t measured = 0;
  for (const SequenceRange& window : report.windows) measured += window.tokens_count;
  absl::StrAppend(
      &html,
      Paragraph(
          absl::StrCat(report.info.layer_ids.size(), " layers, ", report.info.query_heads,
                       " query heads, ", report.info.kv_heads, " KV heads of ",
                       report.info.head_dim, " channels; weights ", report.info.weights_revision),
          "soft"),
      Paragraph(absl::StrCat("Measured on ", measured, " of ", report.tokens_count, " tokens of ",
                             report.info.text_source, ", in ", report.windows.size(), " windows: ",
                             report.shape.sink_tokens, " sink and ", report.shape.recent_tokens,
                             " recent tokens in BF16, what lies between through the INT2 codec. ",
                             "U is of ", report.fitted_on, ", one ",
                             report.scope == RotationScope::kLayer ? "a layer." : "a KV head.")));
  for (const std::string& note : report.notes) absl::StrAppend(&html, Paragraph(note, "note"));
  return html;
}

std::string SummarySection(const CalibrationReport& report) {
  std::string html = absl::StrCat(
      "<h2>What each step does</h2>\n",
      Paragraph(
          "Means over layers, of max the largest. Errors are relative, but for tr(E): the "
          "mean squared error of a row. Logit error: tr(C_Q E_K) over tr(C_Q K^T K / N). Output "
          "error: of the attention outputs' squared norm. The steps have no clip; UHP recipe has "
          "the ratios 0.96 for keys and 0.92 for values.",
          "soft"));
  const std::vector<VariantMeasures> summary = report.Summary();
  for (const uint32_t group_size : GroupSizes(report)) {
    absl::StrAppend(&html, "<h3>Groups of ", group_size, " channels</h3>\n",
                    RenderTable(KeyTable(summary, group_size)), "<br>\n",
                    RenderTable(ValueTable(summary, group_size)));
  }
  return html;
}

// One plot of a measure by layer, for the variants of one group size.
LinePlot LayerPlot(const CalibrationReport& report, const Palette& palette, uint32_t group_size,
                   absl::FunctionRef<double(const HeadMeasures&)> measure) {
  LinePlot plot{.title = {},
                .x_label = "layer",
                .y_label = {},
                .x = {},
                .series = {},
                .log_y = true,
                .points = true};
  const std::vector<VariantMeasures>& first = report.layers.front().variants;
  for (const LayerMeasures& layer : report.layers) plot.x.push_back(layer.layer_id);
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].group_size != group_size) continue;
    std::vector<double> y;
    for (const LayerMeasures& layer : report.layers) y.push_back(measure(layer.variants[i].layer));
    plot.series.push_back(palette.Series(first[i].name, std::move(y)));
  }
  return plot;
}

std::string LayersSection(const CalibrationReport& report, const Palette& palette) {
  std::string html = "<h2>Errors by layer</h2>\n";
  for (const uint32_t group_size : GroupSizes(report)) {
    LinePlot output = LayerPlot(report, palette, group_size,
                                [](const HeadMeasures& m) { return m.attention.output.ratio(); });
    output.title = "Output error, keys and values";
    output.y_label = "relative squared error";
    LinePlot logit = LayerPlot(report, palette, group_size,
                               [](const HeadMeasures& m) { return m.logit.ratio(); });
    logit.title = "Logit error";
    logit.y_label = "relative squared error";
    LinePlot kl = LayerPlot(report, palette, group_size,
                            [](const HeadMeasures& m) { return m.attention.kl(); });
    kl.title = "Attention KL";
    kl.y_label = "nats a query";
    absl::StrAppend(&html, "<h3>Groups of ", group_size, " channels</h3>\n",
                    RenderLegend(output.series), "<div class=\"row\">\n",
                    Card(RenderLinePlot(output)), Card(RenderLinePlot(logit)),
                    Card(RenderLinePlot(kl)), "</div>\n");
  }
  return html;
}

LinePlot SpectrumPlot(const LayerMeasures& layer, const std::vector<Spectrum>& spectra,
                      const Palette& palette) {
  LinePlot plot{.title = absl::StrCat("layer ", layer.layer_id),
                .x_label = "channel, by rank",
                .y_label = "variance",
                .x = {},
                .series = {},
                .log_y = true,
                .width = 246,
                .height = 180};
  for (size_t i = 0; i < spectra.front().values.size(); ++i) {
    plot.x.push_back(static_cast<double>(i));
  }
  for (const Spectrum& one : spectra) plot.series.push_back(palette.Series(one.name, one.values));
  return plot;
}

// A plot a layer, folded away beyond the first ones.
std::string Panels(const CalibrationReport& report,
                   absl::FunctionRef<LinePlot(const LayerMeasures&)> plot) {
  constexpr size_t kOpen = 10;
  std::string html =
      absl::StrCat(RenderLegend(plot(report.layers.front()).series), "<div class=\"row\">\n");
  for (size_t i = 0; i < report.layers.size(); ++i) {
    if (i == kOpen) {
      absl::StrAppend(&html, "</div>\n<details><summary>the other ", report.layers.size() - kOpen,
                      " layers</summary>\n<div class=\"row\">\n");
    }
    absl::StrAppend(&html, Card(RenderLinePlot(plot(report.layers[i]))));
  }
  return absl::StrCat(html, "</div>\n", report.layers.size() > kOpen ? "</details>\n" : "");
}

std::string SpectraSection(const CalibrationReport& report, const Palette& palette) {
  return absl::StrCat(
      "<h2>Spectra</h2>\n",
      Paragraph("diag(R^T C R) in order of size, of the measured text: how much a channel of the "
                "rotated basis matters. U piles it up, H spreads it evenly.",
                "soft"),
      "<h3>Keys: C_Q</h3>\n",
      Panels(report,
             [&](const LayerMeasures& layer) {
               return SpectrumPlot(layer, layer.k_spectra, palette);
             }),
      "<h3>Values: C_S</h3>\n", Panels(report, [&](const LayerMeasures& layer) {
        return SpectrumPlot(layer, layer.v_spectra, palette);
      }));
}

std::string HistogramsSection(const CalibrationReport& report, const Palette& palette) {
  const auto plot = [&](const LayerMeasures& layer) {
    LinePlot one{.title = absl::StrCat("layer ", layer.layer_id),
                 .x_label = "element of a key",
                 .y_label = "count",
                 .x = {},
                 .series = {},
                 .log_y = true,
                 .steps = true,
                 .width = 246,
                 .height = 180};
    const KeyHistogram& first = layer.k_histograms.front();
    const size_t bins = first.counts.size();
    for (size_t i = 0; i < bins; ++i) {
      one.x.push_back(first.limit * (2.0 * static_cast<double>(i) / static_cast<double>(bins) - 1));
    }
    for (const KeyHistogram& histogram : layer.k_histograms) {
      one.series.push_back(
          palette.Series(histogram.name, {histogram.counts.begin(), histogram.counts.end()}));
    }
    return one;
  };
  return absl::StrCat("<h2>Keys before and after</h2>\n",
                      Paragraph("Elements of the keys of all heads, before any clip. Wide tails "
                                "make groups wide, and their four levels coarse.",
                                "soft"),
                      Panels(report, plot));
}

// Of each set, and of hadamard and the recipe at the largest groups: output error by layer and
// head.
std::string HeadsSection(const CalibrationReport& report) {
  const std::vector<VariantMeasures>& variants = report.layers.front().variants;
  const uint32_t group_size = variants.back().group_size;
  const std::set<std::string> steps = {"none", "U", "UH", "UHP"};  // Not as they would serve.
  double limit = 0;
  std::vector<HeatMap> maps;
  for (size_t i = 0; i < variants.size(); ++i) {
    if (steps.count(variants[i].name) > 0) continue;
    if (variants[i].group_size != group_size &&
        (variants[i].name == "hadamard" || variants[i].name == "UHP recipe")) {
      continue;
    }
    HeatMap map{.title = absl::StrCat(variants[i].name, ", groups of ", variants[i].group_size),
                .row_label = "layer",
                .column_label = "KV head",
                .rows = {},
                .columns = {},
                .values = {}};
    for (size_t head = 0; head < report.info.kv_heads; ++head) {
      map.columns.push_back(absl::StrCat(head));
    }
    for (const LayerMeasures& layer : report.layers) {
      map.rows.push_back(absl::StrCat(layer.layer_id));
      for (const HeadMeasures& head : layer.variants[i].heads) {
        map.values.push_back(head.attention.output.ratio());
        limit = std::max(limit, map.values.back());
      }
    }
    maps.push_back(std::move(map));
  }
  std::string html = absl::StrCat(
      "<h2>Heads</h2>\n",
      Paragraph(absl::StrCat("Output error of each head, keys and values together; the strongest "
                             "color is ",
                             ShortNumber(limit), " in all maps."),
                "soft"),
      "<div class=\"row\">\n");
  for (HeatMap& map : maps) {
    map.limit = limit;
    absl::StrAppend(&html, Card(RenderHeatMap(map)));
  }
  return absl::StrCat(html, "</div>\n");
}

// One row a head of each variant of this group size.
HtmlTable HeadTable(const LayerMeasures& layer, uint32_t group_size) {
  HtmlTable table{.columns = {"rotation, head", "max |K|", "range K", "importance K", "tr(E_K)",
                              "logit error", "KL", "output by K", "clip K", "max |V|", "range V",
                              "importance V", "tr(E_V)", "output by V", "clip V", "output"},
                  .rows = {},
                  .marks = {}};
  for (const VariantMeasures& one : layer.variants) {
    if (one.group_size != group_size) continue;
    for (size_t head = 0; head < one.heads.size(); ++head) {
      const HeadMeasures& m = one.heads[head];
      table.rows.push_back(
          {.name = absl::StrCat(one.name, ", ", head),
           .values = {m.k.max_abs, m.k.group_range, m.k.importance_ratio, m.k.error_trace,
                      m.logit.ratio(), m.attention.kl(), m.attention.output_by_k.ratio(),
                      m.k.clip_rate, m.v.max_abs, m.v.group_range, m.v.importance_ratio,
                      m.v.error_trace, m.attention.output_by_v.ratio(), m.v.clip_rate,
                      m.attention.output.ratio()}});
    }
  }
  return table;
}

std::string TablesSection(const CalibrationReport& report) {
  std::string html = "<h2>Each layer</h2>\n";
  for (const LayerMeasures& layer : report.layers) {
    absl::StrAppend(&html, "<details><summary>layer ", layer.layer_id, "</summary>\n");
    for (const uint32_t group_size : GroupSizes(report)) {
      absl::StrAppend(&html, "<h3>Groups of ", group_size, " channels</h3>\n",
                      RenderTable(KeyTable(layer.variants, group_size)), "<br>\n",
                      RenderTable(ValueTable(layer.variants, group_size)),
                      "<details><summary>each head</summary>\n",
                      RenderTable(HeadTable(layer, group_size)), "</details>\n");
    }
    absl::StrAppend(&html, "</details>\n");
  }
  return html;
}

}  // namespace

std::string RenderReportHtml(const CalibrationReport& report) {
  const Palette palette(report);
  return HtmlPage(absl::StrCat("Calibration report: ", report.info.model),
                  absl::StrCat(Head(report), SummarySection(report), LayersSection(report, palette),
                               SpectraSection(report, palette), HistogramsSection(report, palette),
                               HeadsSection(report), TablesSection(report)));
}

}  // namespace okv
