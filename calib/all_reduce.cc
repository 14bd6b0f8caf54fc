#include "calib/all_reduce.h"

#include <algorithm>

#include "proto/check.h"
#include "proto/mutex.h"

namespace okv {
namespace {

// What the ranks of one process meet at. Thread-safe.
class Meeting {
 public:
  explicit Meeting(uint32_t ranks_count) : given_(ranks_count) {}

  absl::Status Sum(uint32_t rank, absl::Span<double> values) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // All have arrived: fills sum_ or status_.
  void AddUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  std::vector<absl::Span<double>> given_ ABSL_GUARDED_BY(mu_);  // By rank.
  size_t arrived_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t rounds_ ABSL_GUARDED_BY(mu_) = 0;  // Added up so far.
  std::vector<double> sum_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);  // Of the last round; an error is for good.
  bool broken_ ABSL_GUARDED_BY(mu_) = false;
};

void Meeting::AddUp() {
  sum_.assign(given_[0].begin(), given_[0].end());
  for (size_t rank = 1; rank < given_.size(); ++rank) {
    if (given_[rank].size() != sum_.size()) {
      status_ = absl::InvalidArgumentError("the ranks sum different counts of numbers");
      broken_ = true;
      return;
    }
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += given_[rank][i];
  }
}

absl::Status Meeting::Sum(uint32_t rank, absl::Span<double> values) {
  MutexLock lock(&mu_);
  if (!broken_) {
    given_[rank] = values;
    const uint64_t round = rounds_;
    if (++arrived_ == given_.size()) {
      AddUp();
      arrived_ = 0;
      ++rounds_;
      changed_.SignalAll();
    }
    while (rounds_ == round && !broken_) changed_.Wait(&mu_);
    // A rank that leaves after the sum is made takes nothing from it: sum_ lasts until all ranks,
    // this one too, have come again.
    if (rounds_ > round && status_.ok()) {
      std::copy(sum_.begin(), sum_.end(), values.begin());
      return absl::OkStatus();
    }
  }
  return status_.ok() ? absl::UnavailableError("another rank has left") : status_;
}

void Meeting::Leave() {
  MutexLock lock(&mu_);
  broken_ = true;
  changed_.SignalAll();
}

class ThreadRank : public AllReduce {
 public:
  ThreadRank(uint32_t rank, uint32_t ranks_count, std::shared_ptr<Meeting> meeting)
      : rank_(rank), ranks_count_(ranks_count), meeting_(std::move(meeting)) {}
  ~ThreadRank() override { meeting_->Leave(); }

  uint32_t rank() const override { return rank_; }
  uint32_t ranks_count() const override { return ranks_count_; }
  absl::Status Sum(absl::Span<double> values) override { return meeting_->Sum(rank_, values); }

 private:
  const uint32_t rank_;
  const uint32_t ranks_count_;
  // Shared: the last rank to leave takes it along.
  const std::shared_ptr<Meeting> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<AllReduce>> MakeThreadRanks(uint32_t ranks_count) {
  OKV_CHECK(ranks_count >= 1);
  const auto meeting = std::make_shared<Meeting>(ranks_count);
  std::vector<std::unique_ptr<AllReduce>> ranks;
  for (uint32_t rank = 0; rank < ranks_count; ++rank) {
    ranks.push_back(std::make_unique<ThreadRank>(rank, ranks_count, meeting));
  }
  return ranks;
}

}  // namespace okv
