// okv-calibrate import, export, and inspect of an imported set.

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/dump.h"
#include "calib/linalg.h"
#include "calib/published.h"
#include "calib/recover.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/rotation_set.h"
#include "tests/calib/run_calibrate.h"
#include "tests/calib/test_data.h"
#include "tests/calib/torch_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::Not;

class PublishedProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    WriteFile(k_, *WritePublished(RandomPublished({}, 1), PublishedVersion::kLayer, 2, "k"));
    WriteFile(v_, *WritePublished(RandomPublished({.objective = "sst_r_h_pbr"}, 9),
                                  PublishedVersion::kLayer, 2, "v"));
  }
  std::string Export(const std::string& format) const {
    return absl::StrCat("export --set ", set_, " --k_out ", directory_.Path("k.pt"), " --v_out ",
                        directory_.Path("v.pt"), " --format ", format);
  }

  const TempDirectory directory_;
  const std::string k_ = directory_.Path("k_in.pt");
  const std::string v_ = directory_.Path("v_in.pt");
  const std::string set_ = directory_.Path("rotations.safetensors");
  const std::string names_ =
      " --model synthetic --weights_revision r1 --kv_heads 2 --group_size 64";
  const std::string clips_ = " --clip_k 0.96 --clip_v 0.92";
  const std::string import_ =
      absl::StrCat("import --k_file ", k_, " --v_file ", v_, " --out ", set_, names_, clips_);
};

// ||X^T X / rows - C|| / ||C|| of rows X, [rows, 64].
double MomentError(const std::vector<float>& rows, const Matrix& covariance) {
  constexpr uint32_t kDim = 64;
  const std::vector<double> wide(rows.begin(), rows.end());
  const size_t rows_count = rows.size() / kDim;
  Matrix moment(covariance.size(), 0.0);
  AddOuterProducts(wide.data(), rows_count, kDim, &moment);
  Symmetrize(kDim, &moment);
  Scale(1.0 / static_cast<double>(rows_count), &moment);
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < covariance.size(); ++i) {
    error += (moment[i] - covariance[i]) * (moment[i] - covariance[i]);
    norm += covariance[i] * covariance[i];
  }
  return std::sqrt(error / norm);
}

TEST_F(PublishedProgramTest, ImportedFilesComeBackAsTheyWere) {
  const RunResult import = RunCalibrate(import_ + " --json");
  ASSERT_EQ(import.exit_code, 0) << import.output;
  const auto json = nlohmann::json::parse(import.last_line(), nullptr, false);
  ASSERT_TRUE(json.is_object()) << import.output;
  const auto set = RotationSet::Parse(ReadFile(set_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(json["hash"], set->hash().Hex());
  EXPECT_THAT(set->clip_rank_k, Each(61u));
  EXPECT_THAT(set->clip_rank_v, Each(58u));
  EXPECT_EQ(set->provenance.at("k_file"), "k_in.pt");
  EXPECT_EQ(set->provenance.at("v_file_sha256").size(), 64u);

  const RunResult exported = RunCalibrate(Export("v1"));
  ASSERT_EQ(exported.exit_code, 0) << exported.output;
  EXPECT_THAT(exported.output, HasSubstr("fp32 as imported"));
  // True or false: a difference would print the files.
  EXPECT_TRUE(ReadFile(directory_.Path("k.pt")) == ReadFile(k_));
  EXPECT_TRUE(ReadFile(directory_.Path("v.pt")) == ReadFile(v_));

  ASSERT_EQ(RunCalibrate(Export("v2")).exit_code, 0);
  const auto second = ParsePublished(ReadFile(directory_.Path("k.pt")));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(second->per_head);
  EXPECT_EQ(second->heads, 2u);
}

TEST_F(PublishedProgramTest, AFittedSetIsExportedToo) {
  WriteDump(directory_.Path("dump"), {0, 1}, {}, 1);
  ASSERT_EQ(RunCalibrate(absl::StrCat("fit --dump ", directory_.Path("dump"), " --out ", set_,
                                      " --method hadamard"))
                .exit_code,
            0);
  const RunResult exported = RunCalibrate(Export("v2"));
  ASSERT_EQ(exported.exit_code, 0) << exported.output;
  EXPECT_THAT(exported.output, HasSubstr("bf16 as served"));
  const auto read = ParsePublished(ReadFile(directory_.Path("v.pt")));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->objective, "hadamard");
  // inspect knows no C_Q of this set, and refuses a rotary_dim that no head has all the same.
  EXPECT_EQ(RunCalibrate("inspect --rotary_dim 32 " + set_).exit_code, 0);
  const RunResult wide = RunCalibrate("inspect --rotary_dim 66 " + set_);
  EXPECT_EQ(wide.exit_code, 1);
  EXPECT_THAT(wide.output, HasSubstr("rotary_dim is 66"));
}

TEST_F(PublishedProgramTest, InspectSaysHowSymmetricTheRecoveredCovarianceIs) {
  ASSERT_EQ(RunCalibrate(import_).exit_code, 0);
  const RunResult inspect = RunCalibrate("inspect --json " + set_);
  ASSERT_EQ(inspect.exit_code, 0) << inspect.output;
  const auto json = nlohmann::json::parse(inspect.last_line(), nullptr, false);
  ASSERT_TRUE(json.is_object()) << inspect.output;
  EXPECT_EQ(json["source_objective_v"], "sst_r_h_pbr");
  EXPECT_EQ(json["rope_pair_asymmetry_by_layer"].size(), 2u);
  EXPECT_GT(json["rope_pair_asymmetry"].get<double>(), 0);
  EXPECT_LT(json["rope_pair_asymmetry"].get<double>(), 1);
  EXPECT_EQ(RunCalibrate("inspect --rotary_dim 32 " + set_).exit_code, 0);
  const RunResult wide = RunCalibrate("inspect --rotary_dim 66 " + set_);
  EXPECT_EQ(wide.exit_code, 1);
  EXPECT_THAT(wide.output, HasSubstr("rotary_dim is 66"));
}

TEST_F(PublishedProgramTest, ErrorsExitWithOneAndNameTheThing) {
  struct Case {
    std::string arguments;
    const char* message;
  };
  const std::string files = absl::StrCat("import --k_file ", k_, " --v_file ", v_);
  const std::string out = " --out " + set_;
  const std::string bad = directory_.Path("bad.pt");
  WriteFile(bad, "nothing");
  const std::string other = directory_.Path("other.pt");
  WriteFile(other, *WritePublished(RandomPublished({.layer_ids = {0}, .objective = "sst"}, 1),
                                   PublishedVersion::kLayer, 2, "k"));
  for (const Case& one : {
           Case{"import --v_file " + v_ + out + names_ + clips_, "--k_file is missing"},
           Case{"import --k_file " + k_ + out + names_ + clips_, "--v_file is missing"},
           Case{files + out + " --weights_revision r1 --kv_heads 2" + clips_, "--model is missing"},
           Case{files + out + " --model m --kv_heads 2" + clips_, "--weights_revision is missing"},
           Case{files + out + " --model m --weights_revision r" + clips_, "kv_heads is 0"},
           Case{files + names_ + clips_, "--out is missing"},
           Case{files + out + names_ + " --clip_v 0.9", "--clip_k needs a ratio"},
           Case{files + out + names_ + " --clip_k 0.9 --clip_v auto", "--clip_v needs a ratio"},
           Case{import_ + " --v_file " + bad, "bad.pt: zip: not a ZIP file"},
           Case{import_ + " --v_file " + other, "other.pt: layer 3 is in the file of keys"},
           Case{import_ + " --k_file " + directory_.Path("absent"), "absent"},
           Case{"export --k_out a --v_out b", "--set is missing"},
           Case{Export("v3"), "format 'v3'"},
           Case{"export --set " + bad + " --k_out a --v_out b", "bad.pt: "},
       }) {
    const RunResult result = RunCalibrate(one.arguments);
    EXPECT_EQ(result.exit_code, 1) << one.arguments;
    EXPECT_THAT(result.output, HasSubstr(one.message)) << one.arguments;
  }
  EXPECT_FALSE(std::filesystem::exists(set_));
  EXPECT_THAT(ListDirectory(directory_.path()), Not(testing::Contains(HasSubstr(".tmp"))));
}

TEST_F(PublishedProgramTest, NoFileIsGivenTwice) {
  ASSERT_EQ(RunCalibrate(import_).exit_code, 0);
  const std::string set = ReadFile(set_);
  const std::string link = directory_.Path("link");
  std::filesystem::create_hard_link(set_, link);
  const std::string fresh = directory_.Path("fresh.pt");
  const auto import = [&](const std::string& k, const std::string& v, const std::string& out) {
    return absl::StrCat("import --k_file ", k, " --v_file ", v, " --out ", out, names_, clips_);
  };
  const auto exports = [&](const std::string& from, const std::string& k, const std::string& v) {
    return absl::StrCat("export --set ", from, " --k_out ", k, " --v_out ", v);
  };
  for (const auto& [arguments, flags] : std::vector<std::pair<std::string, const char*>>{
           {import(k_, k_, fresh), "--k_file and --v_file are the same file"},
           {import(k_, v_, k_), "--k_file and --out are the same file"},
           {import(k_, v_, v_), "--v_file and --out are the same file"},
           {exports(set_, set_, fresh), "--set and --k_out are the same file"},
           {exports(set_, fresh, link), "--set and --v_out are the same file"},
           {exports(set_, fresh, fresh), "--k_out and --v_out are the same file"},
           {exports(set_, fresh, directory_.Path("./fresh.pt")), "--k_out and --v_out"},
       }) {
    const RunResult result = RunCalibrate(arguments);
    EXPECT_EQ(result.exit_code, 1) << arguments;
    EXPECT_THAT(result.output, HasSubstr(flags)) << arguments;
  }
  EXPECT_TRUE(ReadFile(set_) == set);
  EXPECT_FALSE(std::filesystem::exists(fresh));
}

TEST_F(PublishedProgramTest, ASetOfRotationsAHeadIsNoVersion1) {
  for (const std::string& path : {k_, v_}) {
    const PublishedShape shape = {
        .heads = 2, .per_head = true, .objective = path == k_ ? "q" : "s"};
    WriteFile(path, *WritePublished(RandomPublished(shape, 1), PublishedVersion::kKvHead, 2, "k"));
  }
  ASSERT_EQ(RunCalibrate(import_).exit_code, 0);
  const RunResult result = RunCalibrate(Export("v1"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("k.pt: format v1 has one rotation a layer"));
  ASSERT_EQ(RunCalibrate(Export("v2")).exit_code, 0);
  EXPECT_EQ(*ParsePublished(ReadFile(directory_.Path("v.pt"))), *ParsePublished(ReadFile(v_)));
}

TEST_F(PublishedProgramTest, FitReadsADumpThatDoesNotSayItsModel) {
  const LayerDump layer = SyntheticLayer({}, 1);
  const auto write = [&](const std::string& name, uint32_t heads, const std::vector<float>& rows) {
    const std::string folder = directory_.Path("dump/layer_4/" + name);
    std::filesystem::create_directories(folder);
    WriteFile(folder + "/0.pt",
              TorchTensorFile(TorchType::kFloat, {160, heads, 64}, BytesOf(rows)));
  };
  write("q", 4, layer.q);
  write("k", 2, layer.k);
  write("v", 2, layer.v);
  std::filesystem::create_directories(directory_.Path("dump/layer_4/seq_lens"));
  WriteFile(directory_.Path("dump/layer_4/seq_lens/0.pt"),
            TorchTensorFile(TorchType::kInt, {2}, BytesOf<int32_t>({100, 60})));
  const std::string fit =
      absl::StrCat("fit --dump ", directory_.Path("dump"), " --out ", set_, " --method hadamard");
  const RunResult unnamed = RunCalibrate(fit);
  EXPECT_EQ(unnamed.exit_code, 1);
  EXPECT_THAT(unnamed.output, HasSubstr("does not say of which model"));
  const RunResult named = RunCalibrate(fit + " --model m --weights_revision r");
  ASSERT_EQ(named.exit_code, 0) << named.output;
  const auto set = RotationSet::Parse(ReadFile(set_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->model, "m");
  EXPECT_EQ(set->layer_ids, std::vector<uint32_t>{4});
}

TEST_F(PublishedProgramTest, DrawnRowsHaveTheSecondMomentsBehindTheFiles) {
  const std::string dump = directory_.Path("drawn");
  const std::string draw = absl::StrCat("draw --query_heads 4 --kv_heads 2 --tokens 6000 --out ",
                                        dump, " --k_file ", k_, " --v_file ", v_);
  EXPECT_THAT(RunCalibrate(draw + " --layer_ids 3,5").output, HasSubstr("has no layer 5"));
  EXPECT_THAT(RunCalibrate("draw --out " + dump + " --layer_ids 3").output,
              HasSubstr("--k_file, which is missing"));
  EXPECT_THAT(RunCalibrate("draw --out " + dump + " --k_file " + k_).output,
              HasSubstr("go together"));
  const RunResult drawn = RunCalibrate(draw + " --layer_ids 3");
  ASSERT_EQ(drawn.exit_code, 0) << drawn.output;
  const auto reader = DumpReader::Open(dump);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_THAT(reader->info().layer_ids, testing::ElementsAre(3u));
  EXPECT_THAT(reader->info().text_source, HasSubstr("keys by the queries'"));
  const auto layer = reader->ReadLayer(0);
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_EQ(layer->head_dim, 64u);
  const auto k = RandomPublished({}, 1);
  const auto v = RandomPublished({.objective = "sst_r_h_pbr"}, 9);
  const Matrix of_k = RecoverCovariance(k.Rotation(1, 0), k.Eigenvalues(1, 0), 64);
  const Matrix of_v = RecoverCovariance(v.Rotation(1, 0), v.Eigenvalues(1, 0), 64);
  // 12,000 rows know a moment of 64 channels to about sqrt(64 / 12000) = 0.07.
  EXPECT_LT(MomentError(layer->q, of_k), 0.1);
  EXPECT_LT(MomentError(layer->k, of_k), 0.1);
  EXPECT_LT(MomentError(layer->v, of_v), 0.1);
  EXPECT_GT(MomentError(layer->v, of_k), 0.2) << "the moments tell the files apart";
}

}  // namespace
}  // namespace okv
