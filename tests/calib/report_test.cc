#include "calib/report.h"

#include <algorithm>
#include <cmath>

#include "calib/html.h"
#include "calib/linalg.h"
#include "calib/measure.h"
#include "calib/report_attention.h"
#include "calib/report_html.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

const std::vector<uint16_t>& HadamardBits() {
  static const std::vector<uint16_t> bits = RoundToBf16(Hadamard(64));
  return bits;
}

// History's rows of a head over `windows` through the codec.
RestoredHistory Restored(const HeadHistory& history, const RowCodec& codec) {
  size_t bad_row = 0;
  return {.k = *RestoredRows(history.Rows(KvTensor::kKeys), codec, &bad_row),
          .v = *RestoredRows(history.Rows(KvTensor::kValues), codec, &bad_row)};
}

TEST(CompareAttentionTest, OutputErrorsOfOneTensorAreThoseThatHistoryJudges) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {500, 600}}, 3);
  const HistoryShape shape;
  const std::vector<SequenceRange> windows = {{0, 500}, {500, 600}};
  UseSingleThreadedBlas();
  const HeadHistory history(layer, 1, shape, windows, /*judge_stride=*/2);
  const RowCodec codec{.rotation = HadamardBits().data(), .group_size = 32, .clip_rank = 60};
  const std::vector<AttentionErrors> errors =
      CompareAttention(ExtractWindows(layer, shape, windows), 1, {.shape = shape, .stride = 2},
                       {Restored(history, codec)});
  ASSERT_THAT(errors, SizeIs(1));
  const auto by_k = history.Judge(KvTensor::kKeys, codec);
  const auto by_v = history.Judge(KvTensor::kValues, codec);
  ASSERT_TRUE(by_k.ok() && by_v.ok());
  ASSERT_GT(by_k->ratio(), 1e-4);
  EXPECT_NEAR(errors[0].output_by_k.ratio() / by_k->ratio(), 1, 1e-4);
  EXPECT_NEAR(errors[0].output_by_v.ratio() / by_v->ratio(), 1, 1e-4);
  EXPECT_NEAR(errors[0].output.signal / by_k->signal, 1, 1e-5);
  EXPECT_GT(errors[0].output.error, 0);
}

TEST(CompareAttentionTest, ExactRowsLoseNothing) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {500}}, 4);
  const HistoryShape shape;
  UseSingleThreadedBlas();
  const HeadHistory history(layer, 0, shape, {{0, 500}}, 0);
  RestoredHistory exact;
  for (const uint16_t bits : history.Rows(KvTensor::kKeys).rows) {
    exact.k.push_back(Bf16ToFloat(bits));
  }
  for (const uint16_t bits : history.Rows(KvTensor::kValues).rows) {
    exact.v.push_back(Bf16ToFloat(bits));
  }
  const AttentionErrors errors =
      CompareAttention(layer, 0, {.shape = shape, .stride = 1}, {exact})[0];
  EXPECT_EQ(errors.queries_count, 2u * (500 - 384));
  EXPECT_LT(errors.kl(), 1e-6);
  EXPECT_LT(errors.output.ratio(), 1e-9);
}

TEST(CompareAttentionTest, KlIsThatOfTheSchoolbook) {
  // Without sink and recent tokens: the second block of a sequence of 70 sees the first in INT2.
  const LayerDump layer =
      SyntheticLayer({.sequence_lengths = {70}, .query_heads = 1, .kv_heads = 1}, 5);
  UseSingleThreadedBlas();
  const HistoryShape shape{.sink_tokens = 0, .recent_tokens = 0};
  const HeadHistory history(layer, 0, shape, {{0, 70}}, 0);
  const RestoredHistory restored =
      Restored(history, {.rotation = HadamardBits().data(), .group_size = 64, .clip_rank = 0});
  const AttentionErrors errors =
      CompareAttention(layer, 0, {.shape = shape, .stride = 1}, {restored})[0];
  double expected = 0;
  for (size_t n = 64; n < 70; ++n) {
    std::vector<double> p[2];
    for (const bool coded : {false, true}) {
      double sum = 0;
      for (size_t t = 0; t <= n; ++t) {
        const float* k = (coded && t < 64 ? restored.k : layer.k).data() + t * 64;
        double score = 0;
        for (size_t c = 0; c < 64; ++c) score += double{layer.q[n * 64 + c]} * k[c];
        p[coded].push_back(std::exp(score / 8));
        sum += p[coded].back();
      }
      for (double& one : p[coded]) one /= sum;
    }
    for (size_t t = 0; t <= n; ++t) {
      if (p[0][t] > 0) expected += p[0][t] * std::log(p[0][t] / p[1][t]);
    }
  }
  ASSERT_GT(expected, 1e-4);
  EXPECT_EQ(errors.queries_count, 6u);
  EXPECT_NEAR(errors.kl_sum / expected, 1, 1e-3);
}

TEST(ExtractWindowsTest, AWindowInsideASequenceBeginsWithItsSink) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {90, 300}}, 6);
  const LayerDump part =
      ExtractWindows(layer, {.sink_tokens = 64, .recent_tokens = 0}, {{0, 80}, {190, 100}});
  EXPECT_THAT(part.sequence_lengths, ElementsAre(80, 100));
  const size_t width = 2 * 64;
  const auto row = [&](const LayerDump& from, size_t token) {
    return std::vector<float>(from.k.begin() + token * width, from.k.begin() + (token + 1) * width);
  };
  EXPECT_EQ(row(part, 79), row(layer, 79));
  EXPECT_EQ(row(part, 80), row(layer, 90));
  EXPECT_EQ(row(part, 80 + 63), row(layer, 90 + 63));
  EXPECT_EQ(row(part, 80 + 64), row(layer, 190 + 64));
}

class ReportTest : public testing::Test {
 protected:
  // 8 windows: 5 are fitted on, 2 judge, 1 reports.
  ReportTest() { WriteDump(directory_.Path("dump"), {0, 3}, shape_, 11); }

  absl::StatusOr<CalibrationReport> Measure(const std::vector<NamedSet>& sets,
                                            const ReportOptions& options = {}) {
    const auto dump = DumpReader::Open(directory_.Path("dump"));
    if (!dump.ok()) return dump.status();
    return MeasureReport(*dump, nullptr, sets, options, &pool_, nullptr);
  }
  RotationSet HadamardSet() {
    const auto dump = DumpReader::Open(directory_.Path("dump"));
    FitOptions options{.method = Method::kHadamard, .group_size = 32, .clip_k = 0.9, .clip_v = 0.5};
    return FitRotations(*dump, options, &pool_, nullptr)->rotations;
  }
  static const VariantMeasures& Find(const std::vector<VariantMeasures>& variants,
                                     const std::string& name, uint32_t group_size) {
    const auto found = std::find_if(variants.begin(), variants.end(), [&](const auto& one) {
      return one.name == name && one.group_size == group_size;
    });
    OKV_CHECK(found != variants.end());
    return *found;
  }

  const SyntheticShape shape_{.sequence_lengths = std::vector<uint32_t>(8, 450)};
  const TempDirectory directory_;
  ThreadPool pool_{2};
};

TEST_F(ReportTest, StepsAndSetsAreMeasuredOnWindowsThatNothingWasFittedOn) {
  const auto report = Measure({{.name = "mine", .set = HadamardSet()}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->windows, ElementsAre(SequenceRange{7 * 450, 450}));
  EXPECT_THAT(report->fitted_on, HasSubstr("2250 tokens"));
  ASSERT_THAT(report->layers, SizeIs(2));
  EXPECT_EQ(report->layers[1].layer_id, 3u);
  EXPECT_EQ(report->layers[0].rows_count, 448u - 256 - 64);
  std::vector<std::string> names;
  for (const VariantMeasures& one : report->layers[0].variants) {
    names.push_back(one.name + " " + std::to_string(one.group_size));
    EXPECT_THAT(one.heads, SizeIs(2));
  }
  EXPECT_THAT(names, ElementsAre("none 32", "hadamard 32", "U 32", "UH 32", "UHP 32",
                                 "UHP recipe 32", "mine 32", "none 64", "hadamard 64", "U 64",
                                 "UH 64", "UHP 64", "UHP recipe 64"));
  EXPECT_THAT(report->layers[0].k_spectra, SizeIs(4));
  EXPECT_THAT(report->layers[0].v_spectra, SizeIs(4));
  EXPECT_THAT(report->layers[0].k_histograms, SizeIs(4));
  for (const KeyHistogram& one : report->layers[0].k_histograms) {
    uint64_t sum = 0;
    for (const uint64_t count : one.counts) sum += count;
    EXPECT_EQ(sum, report->layers[0].rows_count * 64 * 2) << one.name;
  }
}

TEST_F(ReportTest, FactorsAreWhatTheStepsPromise) {
  const auto report = Measure({});
  ASSERT_TRUE(report.ok()) << report.status();
  const std::vector<VariantMeasures>& variants = report->layers[0].variants;
  const HeadMeasures& none = Find(variants, "none", 64).layer;
  const HeadMeasures& hadamard = Find(variants, "hadamard", 64).layer;
  const HeadMeasures& u = Find(variants, "U", 64).layer;
  const HeadMeasures& uh = Find(variants, "UH", 64).layer;
  const HeadMeasures& uhp = Find(variants, "UHP", 64).layer;
  // Keys have three channels of mean 8; H spreads them.
  EXPECT_GT(none.k.max_abs, hadamard.k.max_abs);
  EXPECT_GT(none.k.group_range, hadamard.k.group_range);
  EXPECT_GT(none.logit.ratio(), hadamard.logit.ratio());
  // U piles importance up, H makes it even: 1.00 on the text that U is of, near it on other text.
  EXPECT_GT(u.k.importance_ratio, none.k.importance_ratio);
  EXPECT_GT(u.k.importance_ratio, 10);
  EXPECT_LT(uh.k.importance_ratio, 1.3);
  EXPECT_LT(uh.v.importance_ratio, 1.3);
  // With one group a head P_br changes nothing but the columns' order.
  EXPECT_NEAR(uhp.k.group_range, uh.k.group_range, 1e-6);
  EXPECT_NEAR(uhp.k.error_trace / uh.k.error_trace, 1, 1e-3);
  EXPECT_LT(Find(variants, "UHP", 32).layer.k.error_trace,
            Find(variants, "UH", 32).layer.k.error_trace);
  // The whole of a rotation's importance is tr(C).
  double sums[2] = {0, 0};
  for (const double value : report->layers[0].k_spectra[0].values) sums[0] += value;
  for (const double value : report->layers[0].k_spectra[2].values) sums[1] += value;
  EXPECT_NEAR(sums[1] / sums[0], 1, 1e-2);
  // The identity's own numbers: |k| as the dump has it.
  const auto dump = DumpReader::Open(directory_.Path("dump"));
  const auto layer = dump->ReadLayer(0);
  float largest = 0;
  for (size_t t = 7 * 450 + 64; t < 7 * 450 + 192; ++t) {
    for (size_t i = t * 128; i < (t + 1) * 128; ++i) {
      largest = std::max(largest, std::fabs(layer->k[i]));
    }
  }
  EXPECT_EQ(none.k.max_abs, largest);
}

TEST_F(ReportTest, ClipRatesAreThoseOfTheRanks) {
  const auto report = Measure({{.name = "mine", .set = HadamardSet()}});
  ASSERT_TRUE(report.ok()) << report.status();
  const std::vector<VariantMeasures>& variants = report->layers[0].variants;
  EXPECT_EQ(Find(variants, "UHP", 64).layer.k.clip_rate, 0);
  // Ranks 57 and 32 of 64: 6 and 31 elements are larger, but for equal ones.
  const HeadMeasures& mine = Find(variants, "mine", 32).layer;
  EXPECT_NEAR(mine.k.clip_rate, 6.0 / 64, 0.01);
  EXPECT_LE(mine.k.clip_rate, 6.0 / 64);
  EXPECT_NEAR(mine.v.clip_rate, 31.0 / 64, 0.02);
  EXPECT_NEAR(Find(variants, "UHP recipe", 64).layer.k.clip_rate, 2.0 / 64, 0.005);
}

TEST_F(ReportTest, ASetMeasuresAsTheStepItEquals) {
  RotationSet set = HadamardSet();
  std::fill(set.clip_rank_k.begin(), set.clip_rank_k.end(), 0);
  std::fill(set.clip_rank_v.begin(), set.clip_rank_v.end(), 0);
  const auto report = Measure({{.name = "mine", .set = set}});
  ASSERT_TRUE(report.ok()) << report.status();
  for (const LayerMeasures& layer : report->layers) {
    const VariantMeasures& mine = Find(layer.variants, "mine", 32);
    const VariantMeasures& step = Find(layer.variants, "hadamard", 32);
    for (size_t head = 0; head < 2; ++head) {
      EXPECT_EQ(mine.heads[head].logit.error, step.heads[head].logit.error);
      EXPECT_EQ(mine.heads[head].attention.kl_sum, step.heads[head].attention.kl_sum);
      EXPECT_EQ(mine.heads[head].attention.output.error, step.heads[head].attention.output.error);
    }
  }
}

TEST_F(ReportTest, ADumpToFitOnLeavesAllWindowsToMeasure) {
  WriteDump(directory_.Path("fit"), {0, 3}, shape_, 12);
  const auto activations = DumpReader::Open(directory_.Path("dump"));
  const auto fit = DumpReader::Open(directory_.Path("fit"));
  const auto report = MeasureReport(*activations, &*fit, {}, {.windows_max = 4}, &pool_, nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_THAT(report->windows, SizeIs(4));
  EXPECT_EQ(report->windows[0].first_token, 0u);
  EXPECT_EQ(report->windows[3].first_token, 6u * 450);
  // WriteDump says the same text_source in all dumps.
  ASSERT_THAT(report->notes, SizeIs(1));
  EXPECT_THAT(report->notes[0], HasSubstr("U was fitted on the text that is measured"));
}

TEST_F(ReportTest, SaysWhenASetSawTheTextThatIsMeasured) {
  RotationSet set = HadamardSet();
  const std::string text = DumpReader::Open(directory_.Path("dump"))->info().text_source;
  const auto notes = [&] { return Measure({{.name = "mine", .set = set}})->notes; };
  EXPECT_THAT(notes(), testing::IsEmpty());
  // Another dump of the text; then this one, whose last windows the fit keeps apart.
  set.provenance = {{"text_source", text}, {"tokens", "3600"}, {"sequences", "7"}};
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("mine was fitted on the text that is measured")));
  set.provenance["sequences"] = "8";
  EXPECT_THAT(notes(), testing::IsEmpty());
  set.provenance["text_source"] = "another";
  EXPECT_THAT(notes(), testing::IsEmpty());
}

TEST_F(ReportTest, RefusesWhatDoesNotFit) {
  const auto code = [&](RotationSet set) {
    return Measure({{.name = "mine", .set = std::move(set)}}).status();
  };
  RotationSet set = HadamardSet();
  set.model = "another";
  EXPECT_EQ(code(set).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(code(set).message(), HasSubstr("rotation set mine has model another"));
  set = HadamardSet();
  set.layer_ids = {0, 1};
  EXPECT_THAT(code(set).message(), HasSubstr("other layers"));
  set = HadamardSet();
  EXPECT_EQ(Measure({{.name = "UHP", .set = set}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Measure({}, {.group_sizes = {48}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Measure({}, {.group_sizes = {128}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Measure({}, {.windows_max = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Measure({}, {.query_stride = 0}).status().code(), absl::StatusCode::kInvalidArgument);

  WriteDump(directory_.Path("short"), {0, 3}, {.sequence_lengths = {60, 50, 40}}, 1);
  const auto dump = DumpReader::Open(directory_.Path("short"));
  EXPECT_EQ(MeasureReport(*dump, nullptr, {}, {}, &pool_, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  // 66 tokens are history enough; 65 of another sequence are left to fit on, less than 128.
  WriteDump(directory_.Path("few"), {0}, {.sequence_lengths = {66, 66}, .head_dim = 128}, 1);
  const auto few = DumpReader::Open(directory_.Path("few"));
  const absl::Status status = MeasureReport(*few, nullptr, {}, {}, &pool_, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("fewer than head_dim 128"));
}

TEST_F(ReportTest, NamesTheRowThatCannotBeQuantized) {
  const std::string path = directory_.Path("dump/layer_3.safetensors");
  LayerDump layer = *DumpReader::Open(directory_.Path("dump"))->ReadLayer(1);
  const size_t token = 7 * 450 + 100;
  for (uint32_t c = 0; c < 64; ++c) layer.v[(token * 2 + 1) * 64 + c] = c % 2 ? 3e38f : -3e38f;
  WriteFile(path, RawSafetensors(LayerMetadata(3, "0,3"), RawTensors(layer)));
  const absl::Status status = Measure({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("layer 3: "));
  EXPECT_THAT(status.message(), HasSubstr("V of token 3250, head 1"));
}

TEST_F(ReportTest, ThePageStandsAlone) {
  RotationSet set = HadamardSet();
  const auto report = Measure({{.name = "<b>&\"mine\"", .set = set}});
  ASSERT_TRUE(report.ok()) << report.status();
  const std::string page = RenderReportHtml(*report);
  for (const char* outside :
       {"http", "<script", "src=", "@import", "url(", "<link", "@font-face"}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;&amp;&quot;mine&quot;"));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, HasSubstr("Groups of 32 channels"));
  EXPECT_THAT(page, HasSubstr("max |K|"));
  EXPECT_THAT(page, HasSubstr("<td>UHP recipe, 1</td>"));
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  EXPECT_THAT(page, Not(HasSubstr("inf,")));
}

// Every tag that is opened is closed, in order.
void ExpectBalanced(const std::string& html) {
  std::vector<std::string> open;
  size_t at = 0;
  while ((at = html.find('<', at)) != std::string::npos) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1);
    at = end;
    if (tag[0] == '!' || tag.back() == '/') continue;
    const std::string name = tag.substr(0, tag.find_first_of(" \n"));
    if (name == "meta" || name == "br") continue;
    if (name[0] != '/') {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty());
    ASSERT_EQ("/" + open.back(), name);
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

TEST_F(ReportTest, ThePageIsWellFormed) {
  const auto report = Measure({});
  ASSERT_TRUE(report.ok()) << report.status();
  ExpectBalanced(RenderReportHtml(*report));
}

TEST(HtmlTest, ALogAxisLeavesOutWhatItCannotShow) {
  LinePlot plot{
      .title = "t", .x_label = "x", .y_label = "y", .x = {0, 1, 2, 3}, .series = {}, .log_y = true};
  plot.series.push_back({.name = "a", .color = 1, .y = {1, 0, 10, std::nan("")}});
  const std::string svg = RenderLinePlot(plot);
  ExpectBalanced(svg);
  // Two lone points: the pen is lifted between them.
  EXPECT_EQ(std::count(svg.begin(), svg.end(), 'M'), 2);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(HtmlTest, ATableMarksTheLeastOfAColumn) {
  const HtmlTable table{.columns = {"name", "error", "size"},
                        .rows = {{"one", {0.5, 3}}, {"two", {0.25, 2}}},
                        .marks = {true, false}};
  const std::string html = RenderTable(table);
  EXPECT_THAT(html, HasSubstr("<td>0.5</td>"));
  EXPECT_THAT(html, HasSubstr("<td class=\"least\">0.25</td>"));
  EXPECT_THAT(html, HasSubstr("<td>2</td>"));
}

TEST(HtmlTest, NumbersAreShort) {
  EXPECT_EQ(ShortNumber(36.29), "36.3");
  EXPECT_EQ(ShortNumber(1354.4), "1354");
  EXPECT_EQ(ShortNumber(0.000012345), "1.23e-05");
  EXPECT_EQ(ShortNumber(0), "0");
  EXPECT_EQ(ShortNumber(std::nan("")), "-");
}

}  // namespace
}  // namespace okv
