#include "cmd/calibrate/ranks.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "calib/all_reduce.h"
#include "calib/all_reduce_tcp.h"
#include "proto/status_macros.h"
#ifdef OKV_HAVE_NCCL
#include "calib/all_reduce_nccl.h"
#include "calib/cuda/gpu_covariance.h"
#endif

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<TcpRankOptions> ParseRendezvous(const RankOptions& options) {
  const size_t colon = options.rendezvous.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(options.rendezvous.substr(colon + 1), &port) || port == 0 ||
      port > 65'535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rendezvous '", options.rendezvous, "' is not HOST:PORT"));
  }
  return TcpRankOptions{.rank = *options.rank,
                        .ranks_count = options.ranks_count,
                        .host = options.rendezvous.substr(0, colon),
                        .port = static_cast<uint16_t>(port)};
}

// What a rank brings along. On a GPU when there is nccl.
struct RankWork {
  absl::StatusOr<FitResult> result = absl::UnknownError("");
  Json facts;
};

#ifdef OKV_HAVE_NCCL

absl::StatusOr<uint32_t> GpusCount() {
  OKV_ASSIGN_OR_RETURN(const int count, GpuCovariance::DevicesCount());
  return static_cast<uint32_t>(count);
}

// Products in float64 against what one large product reaches on the same GPU.
Json GpuFacts(const GpuWork& work, const GpuWork& limit) {
  return {{"products_tflop_per_s", work.flop_per_s() / 1e12},
          {"products_seconds", work.seconds},
          {"limit_tflop_per_s", limit.flop_per_s() / 1e12},
          {"fraction_of_limit", work.flop_per_s() / std::max(limit.flop_per_s(), 1.0)}};
}

absl::StatusOr<FitResult> FitOnGpu(const DumpReader& dump, const FitOptions& options,
                                   std::unique_ptr<AllReduce> control, FitMachine machine,
                                   const std::function<void(const LayerReport&)>& progress,
                                   Json* facts) {
  OKV_ASSIGN_OR_RETURN(const uint32_t gpus, GpusCount());
  const int device = static_cast<int>(control->rank() % std::max(gpus, 1u));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<GpuCovariance> gpu, GpuCovariance::Create(device));
  OKV_ASSIGN_OR_RETURN(const GpuWork limit, gpu->MeasureLimit());
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<AllReduce> ranks,
                       MakeNcclRank(std::move(control), device));
  machine.ranks = ranks.get();
  machine.device = gpu.get();
  OKV_ASSIGN_OR_RETURN(FitResult result, FitRotations(dump, options, machine, progress));
  *facts = GpuFacts(gpu->work(), limit);
  return result;
}

#else

absl::StatusOr<uint32_t> GpusCount() {
  return absl::FailedPreconditionError("--nccl: this program was built without CUDA and NCCL");
}

absl::StatusOr<FitResult> FitOnGpu(const DumpReader&, const FitOptions&, std::unique_ptr<AllReduce>,
                                   FitMachine, const std::function<void(const LayerReport&)>&,
                                   Json*) {
  return GpusCount().status();
}

#endif

// One rank's part, to its end: whatever it waits for ends when `control` does.
RankWork FitAsRank(const DumpReader& dump, const FitOptions& options, const RankOptions& flags,
                   std::unique_ptr<AllReduce> control, uint32_t threads,
                   const std::function<void(const LayerReport&)>& progress) {
  ThreadPool pool(threads);
  FitMachine machine(&pool);
  const bool first = control->rank() == 0;
  RankWork work;
  if (flags.nccl) {
    work.result = FitOnGpu(dump, options, std::move(control), machine, first ? progress : nullptr,
                           &work.facts);
    return work;
  }
  machine.ranks = control.get();
  work.result = FitRotations(dump, options, machine, first ? progress : nullptr);
  return work;
}

// All ranks in this process.
absl::StatusOr<FitResult> FitInThreads(const DumpReader& dump, const FitOptions& options,
                                       const RankOptions& flags, uint32_t ranks_count,
                                       const std::function<void(const LayerReport&)>& progress,
                                       Json* facts) {
  std::vector<std::unique_ptr<AllReduce>> ranks = MakeThreadRanks(ranks_count);
  std::vector<RankWork> work(ranks_count);
  std::vector<std::thread> threads;
  const uint32_t threads_each = std::max(1u, flags.threads / ranks_count);
  for (uint32_t rank = 0; rank < ranks_count; ++rank) {
    threads.emplace_back([&, rank] {
      work[rank] = FitAsRank(dump, options, flags, std::move(ranks[rank]), threads_each, progress);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // One rank fails, and the others find it gone: the one that knows why is to be heard.
  for (const RankWork& one : work) {
    if (!one.result.ok() && !absl::IsUnavailable(one.result.status())) return one.result.status();
  }
  if (flags.nccl) {
    for (const RankWork& one : work) (*facts)["gpus"].push_back(one.facts);
  }
  return std::move(work[0].result);
}

}  // namespace

absl::Status RankOptions::Validate() const {
  if (ranks_count > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("--ranks is ", ranks_count, ", over 1,024"));
  }
  if (!rank.has_value()) {
    if (rendezvous.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--rendezvous needs --rank: which one is this process?");
  }
  if (rendezvous.empty()) return absl::InvalidArgumentError("--rank needs --rendezvous HOST:PORT");
  if (ranks_count == 0) return absl::InvalidArgumentError("--rank needs --ranks");
  OKV_ASSIGN_OR_RETURN(const TcpRankOptions tcp, ParseRendezvous(*this));
  return tcp.Validate();
}

absl::StatusOr<FitResult> FitOverRanks(const DumpReader& dump, const FitOptions& options,
                                       const RankOptions& ranks,
                                       const std::function<void(const LayerReport&)>& progress,
                                       Json* facts) {
  OKV_RETURN_IF_ERROR(ranks.Validate());
  uint32_t ranks_count = std::max(1u, ranks.ranks_count);
  if (ranks.nccl) {
    OKV_ASSIGN_OR_RETURN(const uint32_t gpus, GpusCount());
    if (gpus == 0) return absl::NotFoundError("--nccl: there is no GPU");
    if (ranks.ranks_count == 0) ranks_count = gpus;
    if (!ranks.rank.has_value() && ranks_count > gpus) {
      return absl::NotFoundError(
          absl::StrCat("--nccl: there are ", gpus, " GPUs for ", ranks_count, " ranks"));
    }
  }
  (*facts)["ranks"] = ranks_count;
  if (!ranks.rank.has_value()) {
    return FitInThreads(dump, options, ranks, ranks_count, progress, facts);
  }
  OKV_ASSIGN_OR_RETURN(const TcpRankOptions tcp, ParseRendezvous(ranks));
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<AllReduce> control, JoinTcpRanks(tcp));
  RankWork work = FitAsRank(dump, options, ranks, std::move(control), ranks.threads, progress);
  if (ranks.nccl) (*facts)["gpus"].push_back(work.facts);
  return std::move(work.result);
}

}  // namespace okv
