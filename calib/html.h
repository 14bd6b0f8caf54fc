#ifndef OKV_CALIB_HTML_H_
#define OKV_CALIB_HTML_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace okv {

// Pieces of a self-contained HTML page: plots are inline SVG, without script or font of their own.
// Colors are CSS classes c0 to c9 of the page (HtmlPage), so that a plot follows its theme.

inline constexpr size_t kPlotColors = 10;

// For text and for attributes in double quotes.
std::string HtmlEscape(absl::string_view text);

// Three significant digits, whole numbers below a million: "0.00123", "1350"; "-" when not finite.
std::string ShortNumber(double value);

struct PlotSeries {
  std::string name;
  size_t color = 0;  // Below kPlotColors.
  bool dashed = false;
  std::vector<double> y;  // One for each x; what is not finite, or not positive on a log axis, is
                          // left out.
};

struct LinePlot {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<double> x;  // Ascending, at least one.
  std::vector<PlotSeries> series;
  bool log_y = false;
  bool steps = false;   // A histogram's outline: x are the bins' left edges.
  bool points = false;  // Marks each point, which says its numbers when it is pointed at.
  uint32_t width = 430;
  uint32_t height = 260;
};
// An <svg> element.
std::string RenderLinePlot(const LinePlot& plot);

// Which color and dash stands for which name.
std::string RenderLegend(const std::vector<PlotSeries>& series);

struct HeatMap {
  std::string title;
  std::string row_label;
  std::string column_label;
  std::vector<std::string> rows;
  std::vector<std::string> columns;
  std::vector<double> values;  // [rows, columns], not negative.
  double limit = 0;            // The value with the strongest color; 0: the largest.
};
// An <svg> element; a cell says its number when it is pointed at.
std::string RenderHeatMap(const HeatMap& map);

struct HtmlTable {
  std::vector<std::string> columns;  // The first names rows.
  struct Row {
    std::string name;
    std::vector<double> values;
  };
  std::vector<Row> rows;
  std::vector<bool> marks;  // By value column: whether its smallest is marked. Empty: none.
};
// A <table> element.
std::string RenderTable(const HtmlTable& table);

// The whole page around `body`.
std::string HtmlPage(absl::string_view title, absl::string_view body);

}  // namespace okv

#endif  // OKV_CALIB_HTML_H_
