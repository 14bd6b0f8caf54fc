#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "calib/all_reduce.h"
#include "calib/all_reduce_tcp.h"
#include "calib/fit.h"
#include "calib/linalg.h"
#include "calib/shared_covariance.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;

enum class Kind { kThreads, kTcp };

// Joins `ranks_count` ranks over loopback, in threads.
std::vector<std::unique_ptr<AllReduce>> MakeTcpRanks(uint32_t ranks_count) {
  TcpRankOptions options{.rank = 0, .ranks_count = ranks_count};
  auto listener = TcpListener::Create(options);
  OKV_CHECK(listener.ok());
  std::vector<std::unique_ptr<AllReduce>> ranks(ranks_count);
  std::vector<std::thread> threads;
  for (uint32_t rank = 1; rank < ranks_count; ++rank) {
    threads.emplace_back([&, rank] {
      TcpRankOptions mine = options;
      mine.rank = rank;
      mine.port = listener->port();
      ranks[rank] = *JoinTcpRanks(mine);
    });
  }
  ranks[0] = *listener->Accept();
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

// Calls `work` once a rank, each in a thread, and waits for all.
void OnEachRank(std::vector<std::unique_ptr<AllReduce>> ranks,
                const std::function<void(AllReduce*)>& work) {
  std::vector<std::thread> threads;
  for (std::unique_ptr<AllReduce>& rank : ranks) {
    threads.emplace_back([&work, mine = std::move(rank)]() mutable {
      work(mine.get());
      mine.reset();  // Leaves as soon as it is done, as a process does.
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class RanksTest : public testing::TestWithParam<std::tuple<Kind, uint32_t>> {
 protected:
  uint32_t count() const { return std::get<1>(GetParam()); }
  std::vector<std::unique_ptr<AllReduce>> Make() const {
    return std::get<0>(GetParam()) == Kind::kTcp ? MakeTcpRanks(count()) : MakeThreadRanks(count());
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest,
                         testing::Combine(testing::Values(Kind::kThreads, Kind::kTcp),
                                          testing::Values(1, 2, 3, 7)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Kind::kTcp ? "Tcp"
                                                                                    : "Threads") +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(RanksTest, EveryRankGetsTheSameSum) {
  const uint32_t n = count();
  std::vector<std::vector<double>> got(n);
  OnEachRank(Make(), [&](AllReduce* ranks) {
    EXPECT_EQ(ranks->ranks_count(), n);
    // Several rounds of several sizes, one of no numbers at all.
    for (const size_t size : {3u, 0u, 100'000u, 1u}) {
      std::vector<double> values(size);
      for (size_t i = 0; i < size; ++i) values[i] = std::sin(1.0 + i + 1000.0 * ranks->rank());
      ASSERT_TRUE(ranks->Sum(absl::MakeSpan(values)).ok());
      got[ranks->rank()].insert(got[ranks->rank()].end(), values.begin(), values.end());
    }
  });
  for (uint32_t rank = 1; rank < n; ++rank) EXPECT_EQ(got[rank], got[0]);
  double expected = 0;
  for (uint32_t rank = 0; rank < n; ++rank) expected += std::sin(2.0 + 1000.0 * rank);
  ASSERT_THAT(got[0], SizeIs(100'004));
  EXPECT_EQ(got[0][1], expected);
}

TEST_P(RanksTest, ARankThatLeavesEndsTheOthersWait) {
  std::vector<absl::StatusCode> codes(count(), absl::StatusCode::kOk);
  OnEachRank(Make(), [&](AllReduce* ranks) {
    double one = 1;
    ASSERT_TRUE(ranks->Sum({&one, 1}).ok());
    if (ranks->rank() == 1) return;
    codes[ranks->rank()] = ranks->Sum({&one, 1}).code();
  });
  if (count() == 1) {  // Nobody to leave.
    EXPECT_THAT(codes, Each(absl::StatusCode::kOk));
    return;
  }
  codes.erase(codes.begin() + 1);
  EXPECT_THAT(codes, Each(absl::StatusCode::kUnavailable));
}

TEST_P(RanksTest, DifferentCountsAreRefusedOnEveryRank) {
  std::vector<absl::StatusCode> codes(count(), absl::StatusCode::kOk);
  OnEachRank(Make(), [&](AllReduce* ranks) {
    std::vector<double> values(ranks->rank() == 1 ? 4 : 5, 1.0);
    codes[ranks->rank()] = ranks->Sum(absl::MakeSpan(values)).code();
  });
  if (count() == 1) {  // Nothing to differ from.
    EXPECT_THAT(codes, Each(absl::StatusCode::kOk));
    return;
  }
  EXPECT_EQ(codes[0], absl::StatusCode::kInvalidArgument);
  // What has not been answered when rank 0 leaves is unavailable.
  EXPECT_THAT(codes, Each(testing::AnyOf(absl::StatusCode::kInvalidArgument,
                                         absl::StatusCode::kUnavailable)));
}

double LargestDifference(const std::vector<Matrix>& a, const std::vector<Matrix>& b) {
  double largest = 0;
  double scale = 0;
  EXPECT_EQ(a.size(), b.size());
  for (size_t head = 0; head < a.size(); ++head) {
    for (size_t i = 0; i < a[head].size(); ++i) {
      largest = std::max(largest, std::fabs(a[head][i] - b[head][i]));
      scale = std::max(scale, std::fabs(a[head][i]));
    }
  }
  EXPECT_GT(scale, 0);
  return largest / scale;
}

TEST_P(RanksTest, CovariancesAreThoseOfOneRank) {
  // Sequences that do not divide evenly; the last one is not part of the text.
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {90, 10, 300, 1, 70, 64, 33}}, 8);
  const std::vector<SequenceRange> text = {{0, 90},  {90, 10},  {100, 300},
                                           {400, 1}, {401, 70}, {471, 50}};
  const ValueSample sample{.tokens_max = 250, .sequence_tokens_max = 120};
  UseSingleThreadedBlas();
  ThreadPool pool(1);
  const LayerDump part = ExtractRanges(layer, text);
  const std::vector<Matrix> queries = QueryCovariance(part, &pool);
  const std::vector<Matrix> keys = KeyCovariance(part, &pool);
  const std::vector<Matrix> softmax =
      SoftmaxValueCovariance(part, SampleSequences(part.sequence_lengths, sample), &pool);
  const std::vector<Matrix> energy = EnergyValueCovariance(part, queries, &pool);
  OnEachRank(Make(), [&](AllReduce* ranks) {
    ThreadPool mine(1);
    CpuCovariance cpu(&mine);
    SharedCovariance shared(layer, text, &cpu, ranks);
    EXPECT_EQ(shared.tokens_count(), 521u);
    const auto c_q = shared.Queries();
    ASSERT_TRUE(c_q.ok()) << c_q.status();
    EXPECT_LT(LargestDifference(queries, *c_q), 1e-13);
    EXPECT_LT(LargestDifference(keys, *shared.Keys()), 1e-13);
    EXPECT_LT(LargestDifference(softmax, *shared.SoftmaxValues(sample)), 1e-13);
    EXPECT_LT(LargestDifference(energy, *shared.EnergyValues(*c_q, &mine)), 1e-13);
    if (ranks->ranks_count() == 1) {
      EXPECT_EQ(*c_q, queries);
    }
  });
}

float LargestDifference(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  EXPECT_EQ(a.size(), b.size());
  float largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(Bf16ToFloat(a[i]) - Bf16ToFloat(b[i])));
  }
  return largest;
}

class RankedFitTest : public testing::Test {
 protected:
  // Everything but the covariances is made cheap.
  static FitOptions Cheap(Method method, RotationScope scope, ValueObjective values) {
    FitOptions options = Quick();
    options.method = method;
    options.scope = scope;
    options.value_objective = values;
    options.refine_steps = 0;
    options.fit_windows = 1;
    options.measure_tokens = 0;
    options.clip_k = 0.9;
    options.clip_v = 0.9;
    return options;
  }
  // The rotation sets of each rank's fits.
  std::vector<std::vector<RotationSet>> Fit(std::vector<std::unique_ptr<AllReduce>> ranks) {
    std::vector<std::vector<RotationSet>> sets(ranks.size());
    OnEachRank(std::move(ranks), [&](AllReduce* mine) {
      const auto dump = DumpReader::Open(directory_.Path("dump"));
      ThreadPool pool(1);
      FitMachine machine(&pool);
      machine.ranks = mine;
      for (const FitOptions& options : fits_) {
        const auto result = FitRotations(*dump, options, machine, nullptr);
        ASSERT_TRUE(result.ok()) << result.status();
        sets[mine->rank()].push_back(result->rotations);
      }
    });
    return sets;
  }

  const TempDirectory directory_;
  const std::vector<FitOptions> fits_ = {
      Cheap(Method::kOscar, RotationScope::kKvHead, ValueObjective::kSoftmax),
      Cheap(Method::kOscar, RotationScope::kLayer, ValueObjective::kEnergy),
      Cheap(Method::kHadamard, RotationScope::kKvHead, ValueObjective::kSoftmax)};
};

TEST_F(RankedFitTest, FitsAreThoseOfOneRank) {
  WriteDump(directory_.Path("dump"), {0, 2}, {.sequence_lengths = {150, 160, 170, 140}}, 3);
  std::vector<std::unique_ptr<AllReduce>> one;
  one.push_back(std::make_unique<OneRank>());
  const std::vector<RotationSet> alone = Fit(std::move(one))[0];
  ASSERT_THAT(alone, SizeIs(fits_.size()));
  std::vector<std::vector<std::vector<RotationSet>>> all;
  all.push_back(Fit(MakeThreadRanks(3)));  // More ranks than heads: one only sums.
  all.push_back(Fit(MakeTcpRanks(2)));
  for (const auto& ranks : all) {
    for (const std::vector<RotationSet>& sets : ranks) {
      ASSERT_THAT(sets, SizeIs(fits_.size()));
      for (size_t i = 0; i < fits_.size(); ++i) {
        EXPECT_EQ(sets[i], ranks[0][i]);  // Every rank has the same.
        EXPECT_LT(LargestDifference(sets[i].r_k, alone[i].r_k), 0.01f);
        EXPECT_LT(LargestDifference(sets[i].r_v, alone[i].r_v), 0.01f);
        EXPECT_EQ(sets[i].clip_rank_k, alone[i].clip_rank_k);
      }
      EXPECT_EQ(sets[2], alone[2]);  // No covariance, no difference.
    }
  }
}

TEST_F(RankedFitTest, EveryRankReportsTheErrorsOfAllHeads) {
  WriteDump(directory_.Path("dump"), {0}, {.sequence_lengths = {150, 160, 170, 140}}, 3);
  const auto dump = DumpReader::Open(directory_.Path("dump"));
  const FitOptions options =
      Cheap(Method::kHadamard, RotationScope::kKvHead, ValueObjective::kSoftmax);
  ThreadPool pool(1);
  const auto alone = FitRotations(*dump, options, FitMachine(&pool), nullptr);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const LayerReport& expected = alone->layers[0];
  EXPECT_GT(expected.reported_k.error, 0);
  EXPECT_NE(expected.reported_k.error, expected.published_clip_k.error);
  OnEachRank(MakeThreadRanks(3), [&](AllReduce* mine) {
    ThreadPool threads(2);
    FitMachine machine(&threads);
    machine.ranks = mine;
    const auto result = FitRotations(*dump, options, machine, nullptr);
    ASSERT_TRUE(result.ok()) << result.status();
    const LayerReport& report = result->layers[0];
    for (const auto field : {&LayerReport::promised_k, &LayerReport::promised_v,
                             &LayerReport::reported_k, &LayerReport::reported_v,
                             &LayerReport::published_clip_k, &LayerReport::published_clip_v}) {
      EXPECT_EQ((report.*field).error, (expected.*field).error);
      EXPECT_EQ((report.*field).signal, (expected.*field).signal);
    }
  });
}

TEST_F(RankedFitTest, AnErrorOfOneRankEndsAllFits) {
  WriteDump(directory_.Path("dump"), {0}, {.sequence_lengths = {40, 70}, .head_dim = 128}, 3);
  const auto dump = DumpReader::Open(directory_.Path("dump"));
  std::vector<absl::Status> statuses(2);
  OnEachRank(MakeThreadRanks(2), [&](AllReduce* mine) {
    if (mine->rank() == 1) return;  // It could not read its dump.
    ThreadPool pool(1);
    FitMachine machine(&pool);
    machine.ranks = mine;
    statuses[0] = FitRotations(*dump, fits_[0], machine, nullptr).status();
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kUnavailable) << statuses[0];
}

TEST(ShareOfRangesTest, EachRangeIsOnOneRankAndSharesAreEven) {
  const std::vector<SequenceRange> ranges(20, SequenceRange{.first_token = 0, .tokens_count = 50});
  for (const uint32_t count : {1u, 2u, 3u, 7u, 30u}) {
    size_t all = 0;
    for (const auto& rank : MakeThreadRanks(count)) {
      const size_t share = ShareOfRanges(ranges, *rank).size();
      EXPECT_LE(share, 20 / count + 1);
      all += share;
    }
    EXPECT_EQ(all, 20u);
  }
}

TEST(TcpRanksTest, OptionsAreChecked) {
  const auto code = [](const TcpRankOptions& options) { return options.Validate().code(); };
  EXPECT_EQ(code({.rank = 0, .ranks_count = 1}), absl::StatusCode::kOk);
  EXPECT_EQ(code({.rank = 0, .ranks_count = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 0, .ranks_count = 1025}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 2, .ranks_count = 2, .port = 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 1, .ranks_count = 2}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 0, .ranks_count = 2, .host = "nowhere"}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TcpListener::Create({.rank = 1, .ranks_count = 2, .port = 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TcpRanksTest, MissingRanksAreADeadline) {
  const auto alone =
      JoinTcpRanks({.rank = 0, .ranks_count = 3, .join_timeout = std::chrono::seconds(0)});
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(alone.status().message(), HasSubstr("1 of 3 ranks"));
  // A port that was free a moment ago.
  const uint16_t port = TcpListener::Create({.rank = 0, .ranks_count = 2})->port();
  const auto lost = JoinTcpRanks(
      {.rank = 1, .ranks_count = 2, .port = port, .join_timeout = std::chrono::seconds(0)});
  EXPECT_EQ(lost.status().code(), absl::StatusCode::kDeadlineExceeded);
}

// Connects to a listener and says `words`.
int Say(uint16_t port, const std::vector<uint32_t>& words) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  OKV_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  OKV_CHECK(send(fd, words.data(), words.size() * 4, 0) == static_cast<ssize_t>(words.size() * 4));
  return fd;
}

TEST(TcpRanksTest, StrangersAreTurnedAwayAndWrongRanksRefused) {
  constexpr uint32_t kMagic = 0x524b564f;
  const auto accept = [](const std::vector<std::vector<uint32_t>>& hellos) {
    auto listener =
        TcpListener::Create({.rank = 0, .ranks_count = 3, .join_timeout = std::chrono::seconds(1)});
    OKV_CHECK(listener.ok());
    std::vector<int> sockets;
    for (const auto& hello : hellos) sockets.push_back(Say(listener->port(), hello));
    // A short hello ends with its connection.
    for (size_t i = 0; i < hellos.size(); ++i) {
      if (hellos[i].size() < 3) shutdown(sockets[i], SHUT_WR);
    }
    const absl::Status status = listener->Accept().status();
    for (const int one : sockets) close(one);
    return status.code();
  };
  EXPECT_EQ(accept({{kMagic, 1, 3}, {kMagic, 2, 3}}), absl::StatusCode::kOk);
  EXPECT_EQ(accept({{0x47455420, 1, 3}, {7}, {kMagic, 2, 3}, {kMagic, 1, 3}}),
            absl::StatusCode::kOk);
  EXPECT_EQ(accept({{kMagic, 1, 3}, {kMagic, 1, 3}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(accept({{kMagic, 0, 3}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(accept({{kMagic, 3, 3}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(accept({{kMagic, 1, 4}}), absl::StatusCode::kInvalidArgument);
}

TEST(TcpRanksTest, ASilentRankIsUnavailable) {
  auto listener =
      TcpListener::Create({.rank = 0, .ranks_count = 2, .sum_timeout = std::chrono::seconds(0)});
  ASSERT_TRUE(listener.ok());
  const int silent = Say(listener->port(), {0x524b564f, 1, 2});
  auto rank = listener->Accept();
  ASSERT_TRUE(rank.ok()) << rank.status();
  double one = 1;
  EXPECT_EQ((*rank)->Sum({&one, 1}).code(), absl::StatusCode::kUnavailable);
  close(silent);
}

}  // namespace
}  // namespace okv
