#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "calib/all_reduce_tcp.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/rotation_set.h"
#include "tests/calib/run_calibrate.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::HasSubstr;

class RanksProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    const RunResult draw = RunCalibrate(
        absl::StrCat("draw --layers 2 --query_heads 4 --kv_heads 2 --head_dim 64 --tokens 1900 ",
                     "--sequence_tokens 400 --out ", dump_));
    ASSERT_EQ(draw.exit_code, 0) << draw.output;
  }
  std::string Fit(const std::string& out) const {
    return absl::StrCat("fit --json --refine_steps 0 --fit_windows 1 --measure_tokens 0 --dump ",
                        dump_, " --out ", directory_.Path(out), " ");
  }
  RotationSet Read(const std::string& out) const {
    return *RotationSet::Parse(ReadFile(directory_.Path(out)));
  }

  const TempDirectory directory_;
  const std::string dump_ = directory_.Path("dump");
};

TEST_F(RanksProgramTest, RanksInThreadsAndInProcessesFindTheSame) {
  ASSERT_EQ(RunCalibrate(Fit("alone")).exit_code, 0);
  const RunResult threads = RunCalibrate(Fit("threads") + "--ranks 3");
  ASSERT_EQ(threads.exit_code, 0) << threads.output;
  EXPECT_EQ(nlohmann::json::parse(threads.last_line())["ranks"], 3);

  const uint16_t port = TcpListener::Create({.rank = 0, .ranks_count = 2})->port();
  const std::string ranks = absl::StrCat("--ranks 2 --rendezvous 127.0.0.1:", port, " --rank ");
  RunResult other;
  std::thread thread([&] { other = RunCalibrate(Fit("unused") + ranks + "1"); });
  const RunResult first = RunCalibrate(Fit("processes") + ranks + "0");
  thread.join();
  ASSERT_EQ(first.exit_code, 0) << first.output;
  ASSERT_EQ(other.exit_code, 0) << other.output;
  EXPECT_EQ(other.output, "");  // Rank 0 says it all.
  const std::vector<std::string> files = ListDirectory(directory_.path());
  EXPECT_THAT(files, testing::Not(testing::Contains("unused")));

  const RotationSet alone = Read("alone");
  for (const char* out : {"threads", "processes"}) {
    const RotationSet set = Read(out);
    EXPECT_EQ(set.layer_ids, alone.layer_ids);
    EXPECT_EQ(set.clip_rank_v, alone.clip_rank_v);
    size_t different = 0;
    for (size_t i = 0; i < set.r_v.size(); ++i) different += set.r_v[i] != alone.r_v[i];
    EXPECT_LT(different, set.r_v.size() / 1000) << out;
  }
}

TEST_F(RanksProgramTest, NamesWhatIsWrong) {
  EXPECT_THAT(RunCalibrate(Fit("x") + "--rank 0").output, HasSubstr("--rendezvous"));
  EXPECT_THAT(RunCalibrate(Fit("x") + "--rendezvous 127.0.0.1:80").output, HasSubstr("--rank"));
  EXPECT_THAT(RunCalibrate(Fit("x") + "--rank 0 --rendezvous 127.0.0.1:1").output,
              HasSubstr("--ranks"));
  EXPECT_THAT(RunCalibrate(Fit("x") + "--rank 0 --ranks 2 --rendezvous here").output,
              HasSubstr("HOST:PORT"));
  EXPECT_THAT(RunCalibrate(Fit("x") + "--rank 2 --ranks 2 --rendezvous 127.0.0.1:9").output,
              HasSubstr("rank is 2"));
  EXPECT_THAT(RunCalibrate(Fit("x") + "--ranks 2000").output, HasSubstr("1,024"));
  // With CUDA but without a GPU, or without either.
  const RunResult nccl = RunCalibrate(Fit("x") + "--nccl");
  if (nccl.exit_code != 0) {
    EXPECT_THAT(nccl.output, testing::AnyOf(HasSubstr("NCCL"), HasSubstr("GPU")));
  }
}

TEST_F(RanksProgramTest, DrawsTheSameFilesFromTheSameSeed) {
  const std::string again = directory_.Path("again");
  const std::string draw =
      absl::StrCat("draw --layers 2 --query_heads 4 --kv_heads 2 --head_dim 64 --tokens 1900 ",
                   "--sequence_tokens 400 --threads 1 --out ", again);
  ASSERT_EQ(RunCalibrate(draw).exit_code, 0);
  EXPECT_EQ(ReadFile(again + "/layer_1.safetensors"), ReadFile(dump_ + "/layer_1.safetensors"));
  EXPECT_THAT(RunCalibrate(draw).output, HasSubstr("already holds"));
  EXPECT_THAT(RunCalibrate("draw").output, HasSubstr("--out is missing"));
}

}  // namespace
}  // namespace okv
