#include "calib/html.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "proto/check.h"

namespace okv {
namespace {

// Room around the plot's area, in pixels.
constexpr double kLeft = 58;
constexpr double kRight = 12;
constexpr double kTop = 26;
constexpr double kBottom = 38;

// Okabe and Ito's colors, which people with color-deficient sight can tell apart; gray first.
constexpr absl::string_view kStyle = R"css(
:root { --ink: #1b1f24; --soft: #5b6470; --line: #d7dce2; --page: #ffffff; --card: #f7f8fa;
  --c0: #8a8f98; --c1: #0072b2; --c2: #b8860b; --c3: #56b4e9; --c4: #009e73; --c5: #cc79a7;
  --c6: #d55e00; --c7: #6a3d9a; --c8: #33691e; --c9: #1b1f24; --heat: 213, 94, 0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a5adb8; --line: #3a414b;
  --page: #15181c; --card: #1d2126; --c1: #4aa3df; --c2: #e69f00; --c4: #2fc79b; --c7: #b294e0;
  --c8: #8bc34a; --c9: #e8eaed; --heat: 240, 130, 50; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 1440px; padding: 24px 32px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 6px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p { margin: 4px 0 10px; max-width: 82ch; } .soft { color: var(--soft); }
.note { border-left: 4px solid var(--c6); padding: 6px 12px; background: var(--card); }
.row { display: flex; flex-wrap: wrap; gap: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 3px 11px; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td.least { font-weight: 700; color: var(--c4); }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--c1); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0; font-size: 14px; }
.legend svg { vertical-align: middle; margin-right: 6px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); }
svg .s { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); } .c8 { stroke: var(--c8); }
.c9 { stroke: var(--c9); } svg .dot { fill: var(--page); stroke-width: 1.5; }
svg .cell { fill: rgb(var(--heat)); stroke: var(--line); stroke-width: 0.5; }
)css";

// The numbers of an axis, and where they stand on it: 0 to 1.
class Axis {
 public:
  Axis(double low, double high, bool log) : log_(log) {
    if (!(high >= low)) low = high = log ? 1 : 0;  // Nothing is drawn.
    low_ = log ? std::log10(low) : low;
    high_ = log ? std::log10(high) : high;
    if (high_ - low_ < 1e-12) {
      low_ -= 0.5;
      high_ += 0.5;
    }
  }

  double Place(double value) const {
    return ((log_ ? std::log10(value) : value) - low_) / (high_ - low_);
  }

  std::vector<double> Ticks() const {
    std::vector<double> ticks;
    if (log_ && high_ - low_ > 0.8) {
      const double step = std::max(1.0, std::ceil((high_ - low_) / 6));
      for (double at = std::floor(low_); at <= high_; at += step) {
        ticks.push_back(std::pow(10, at));
        if (high_ - low_ > 2.2) continue;  // Decades alone are enough.
        ticks.push_back(2 * ticks.back());
        ticks.push_back(2.5 * ticks.back());
      }
      return ticks;
    }
    const double low = log_ ? std::pow(10, low_) : low_;
    const double high = log_ ? std::pow(10, high_) : high_;
    const double rough = (high - low) / 5;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    const double digit = rough / power;
    const double step = power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
    for (double i = std::ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); ++i) {
      ticks.push_back(i == 0 ? 0 : i * step);
    }
    return ticks;
  }

 private:
  const bool log_;
  double low_;
  double high_;
};

bool IsDrawn(double value, bool log) { return std::isfinite(value) && (!log || value > 0); }

Axis ValueAxis(const LinePlot& plot) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const PlotSeries& one : plot.series) {
    for (const double value : one.y) {
      if (!IsDrawn(value, plot.log_y)) continue;
      low = std::min(low, value);
      high = std::max(high, value);
    }
  }
  if (!plot.log_y && low > 0) low = 0;  // Heights are compared from zero.
  return Axis(low, plot.log_y ? high * 1.1 : high * 1.05, plot.log_y);
}

// Where things stand in a plot of this size.
struct Frame {
  double width;
  double height;
  double X(double place) const { return kLeft + place * (width - kLeft - kRight); }
  double Y(double place) const { return height - kBottom - place * (height - kTop - kBottom); }
};

void AppendAxes(const LinePlot& plot, const Frame& frame, const Axis& x, const Axis& y,
                std::string* svg) {
  for (const double tick : y.Ticks()) {
    const double at = frame.Y(y.Place(tick));
    if (at < kTop - 1 || at > frame.height - kBottom + 1) continue;
    absl::StrAppendFormat(svg,
                          "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>"
                          "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                          kLeft, frame.width - kRight, at, at, kLeft - 5, at + 4,
                          ShortNumber(tick));
  }
  for (const double tick : x.Ticks()) {
    const double at = frame.X(x.Place(tick));
    if (at < kLeft - 1 || at > frame.width - kRight + 1) continue;
    absl::StrAppendFormat(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n", at,
                          frame.height - kBottom + 14, ShortNumber(tick));
  }
  absl::StrAppendFormat(
      svg, "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", kLeft,
      frame.width - kRight, frame.height - kBottom, frame.height - kBottom);
  absl::StrAppendFormat(svg, "<text class=\"title\" x=\"%.1f\" y=\"16\">%s</text>\n", kLeft,
                        HtmlEscape(plot.title));
  absl::StrAppendFormat(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
                        (kLeft + frame.width - kRight) / 2, frame.height - 6,
                        HtmlEscape(plot.x_label));
  const double middle = (kTop + frame.height - kBottom) / 2;
  absl::StrAppendFormat(svg,
                        "<text x=\"12\" y=\"%.1f\" text-anchor=\"middle\" "
                        "transform=\"rotate(-90 12 %.1f)\">%s</text>\n",
                        middle, middle, HtmlEscape(plot.y_label));
}

std::string ClassOf(const PlotSeries& series) {
  OKV_CHECK(series.color < kPlotColors);
  return absl::StrCat("s c", series.color, "\"", series.dashed ? " stroke-dasharray=\"5 3" : "",
                      series.dashed ? "\"" : "");
}

void AppendSeries(const LinePlot& plot, const PlotSeries& series, const Frame& frame, const Axis& x,
                  const Axis& y, std::string* svg) {
  OKV_CHECK(series.y.size() == plot.x.size());
  std::string path;
  std::string dots;
  bool pen_down = false;
  for (size_t i = 0; i < plot.x.size(); ++i) {
    if (!IsDrawn(series.y[i], plot.log_y)) {
      pen_down = false;
      continue;
    }
    const double at_x = frame.X(x.Place(plot.x[i]));
    const double at_y = frame.Y(y.Place(series.y[i]));
    absl::StrAppendFormat(&path, "%s%.1f %.1f", pen_down ? "L" : "M", at_x, at_y);
    if (plot.steps && i + 1 < plot.x.size()) {
      absl::StrAppendFormat(&path, "H%.1f", frame.X(x.Place(plot.x[i + 1])));
    }
    pen_down = true;
    if (!plot.points) continue;
    absl::StrAppendFormat(
        &dots,
        "<circle class=\"dot c%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"2.6\"><title>%s</title>"
        "</circle>\n",
        series.color, at_x, at_y,
        HtmlEscape(absl::StrCat(series.name, ", ", plot.x_label, " ", ShortNumber(plot.x[i]), ": ",
                                ShortNumber(series.y[i]))));
  }
  absl::StrAppend(svg, "<path class=\"", ClassOf(series), " d=\"", path, "\"/>\n", dots);
}

}  // namespace

std::string HtmlEscape(absl::string_view text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string ShortNumber(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::fabs(value);
  if (size >= 100 && size < 1e6) return absl::StrFormat("%.0f", value);
  return absl::StrFormat("%.3g", value);
}

std::string RenderLinePlot(const LinePlot& plot) {
  OKV_CHECK(!plot.x.empty());
  const Frame frame{.width = static_cast<double>(plot.width),
                    .height = static_cast<double>(plot.height)};
  const Axis x(plot.x.front(), plot.x.back(), /*log=*/false);
  const Axis y = ValueAxis(plot);
  std::string svg = absl::StrFormat(
      "<svg role=\"img\" aria-label=\"%s\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n",
      HtmlEscape(plot.title), plot.width, plot.height, plot.width, plot.height);
  AppendAxes(plot, frame, x, y, &svg);
  for (const PlotSeries& series : plot.series) AppendSeries(plot, series, frame, x, y, &svg);
  return svg + "</svg>\n";
}

std::string RenderLegend(const std::vector<PlotSeries>& series) {
  std::string html = "<div class=\"legend\">\n";
  for (const PlotSeries& one : series) {
    absl::StrAppend(&html, "<span><svg width=\"26\" height=\"10\"><path class=\"", ClassOf(one),
                    " d=\"M1 5H25\"/></svg>", HtmlEscape(one.name), "</span>\n");
  }
  return html + "</div>\n";
}

std::string RenderHeatMap(const HeatMap& map) {
  OKV_CHECK(map.values.size() == map.rows.size() * map.columns.size());
  constexpr double kCell = 15;
  const double width = kLeft + kRight + kCell * static_cast<double>(map.columns.size());
  const double height = kTop + kBottom + kCell * static_cast<double>(map.rows.size());
  double limit = map.limit;
  if (limit <= 0) {
    for (const double value : map.values) limit = std::max(limit, value);
  }
  std::string svg = absl::StrFormat(
      "<svg role=\"img\" aria-label=\"%s\" width=\"%.0f\" height=\"%.0f\">\n"
      "<text class=\"title\" x=\"4\" y=\"16\">%s</text>\n",
      HtmlEscape(map.title), std::max(width, 230.0), height, HtmlEscape(map.title));
  for (size_t row = 0; row < map.rows.size(); ++row) {
    const double y = kTop + kCell * static_cast<double>(row);
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                          kLeft - 5, y + 11, HtmlEscape(map.rows[row]));
    for (size_t column = 0; column < map.columns.size(); ++column) {
      const double value = map.values[row * map.columns.size() + column];
      const double strength = limit > 0 && std::isfinite(value) ? std::min(value / limit, 1.0) : 0;
      absl::StrAppendFormat(
          &svg,
          "<rect class=\"cell\" x=\"%.1f\" y=\"%.1f\" width=\"%.0f\" height=\"%.0f\" "
          "fill-opacity=\"%.3f\"><title>%s %s, %s %s: %s</title></rect>\n",
          kLeft + kCell * static_cast<double>(column), y, kCell, kCell, std::sqrt(strength),
          HtmlEscape(map.row_label), HtmlEscape(map.rows[row]), HtmlEscape(map.column_label),
          HtmlEscape(map.columns[column]), ShortNumber(value));
    }
  }
  for (size_t column = 0; column < map.columns.size(); ++column) {
    const double x = kLeft + kCell * (static_cast<double>(column) + 0.5);
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n", x,
                          height - kBottom + 14, HtmlEscape(map.columns[column]));
  }
  absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\">%s</text></svg>\n", kLeft, height - 6,
                        HtmlEscape(map.column_label));
  return svg;
}

std::string RenderTable(const HtmlTable& table) {
  std::string html = "<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& column : table.columns) {
    absl::StrAppend(&html, "<th>", HtmlEscape(column), "</th>");
  }
  absl::StrAppend(&html, "</tr>\n");
  std::vector<double> least(table.marks.size(), std::numeric_limits<double>::infinity());
  for (const HtmlTable::Row& row : table.rows) {
    OKV_CHECK(row.values.size() + 1 == table.columns.size());
    for (size_t i = 0; i < least.size(); ++i) {
      if (table.marks[i]) least[i] = std::min(least[i], row.values[i]);
    }
  }
  for (const HtmlTable::Row& row : table.rows) {
    absl::StrAppend(&html, "<tr><td>", HtmlEscape(row.name), "</td>");
    for (size_t i = 0; i < row.values.size(); ++i) {
      const bool mark = i < least.size() && table.marks[i] && row.values[i] == least[i];
      absl::StrAppend(&html, mark ? "<td class=\"least\">" : "<td>", ShortNumber(row.values[i]),
                      "</td>");
    }
    absl::StrAppend(&html, "</tr>\n");
  }
  return html + "</table></div>\n";
}

std::string HtmlPage(absl::string_view title, absl::string_view body) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
      HtmlEscape(title), "</title>\n<style>", kStyle, "</style></head>\n<body>\n", body,
      "</body></html>\n");
}

}  // namespace okv
