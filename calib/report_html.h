#ifndef OKV_CALIB_REPORT_HTML_H_
#define OKV_CALIB_REPORT_HTML_H_

#include <string>

#include "calib/report.h"

namespace okv {

// The report as one HTML page that needs nothing else: tables of what each step does, errors by
// layer, spectra, histograms of keys before and after, a map of heads.
std::string RenderReportHtml(const CalibrationReport& report);

}  // namespace okv

#endif  // OKV_CALIB_REPORT_HTML_H_
