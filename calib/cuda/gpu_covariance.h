#ifndef OKV_CALIB_CUDA_GPU_COVARIANCE_H_
#define OKV_CALIB_CUDA_GPU_COVARIANCE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/shared_covariance.h"

namespace okv {

// Matrix products in float64 and the time that the GPU spent in them.
struct GpuWork {
  double flop = 0;  // 2 n d^2 for X^T X of n rows, although half of it is the other half's mirror.
  double seconds = 0;  // Of the products alone.
  double flop_per_s() const { return seconds > 0 ? flop / seconds : 0; }
};

// Covariances on a GPU: rows go there as fp32, become float64, and are multiplied by cuBLAS in
// float64, so that C_Q and C_K are the CPU's to about 1e-15. The attention behind C_S is fp32 with
// fp64 sums in the softmax, as on the CPU: equal to about 1e-6; a sequence's part of it does not
// depend on the other sequences, so that ranks agree as closely as their sums do. Device memory is
// 64 MiB x 3 for rows, and for C_S the scores of one sequence's heads, 1 GiB of them at a time or
// one head. Owned by one thread.
class GpuCovariance : public CovarianceDevice {
 public:
  // kNotFound: no such device. kInternal: cuBLAS or the driver fails.
  static absl::StatusOr<std::unique_ptr<GpuCovariance>> Create(int device);
  // kNotFound: no driver.
  static absl::StatusOr<int> DevicesCount();
  ~GpuCovariance() override;

  // Errors of all: kResourceExhausted: not enough device memory. kInternal naming the call.
  absl::StatusOr<std::vector<Matrix>> Queries(const LayerDump& layer,
                                              const SequenceRange& tokens) override;
  absl::StatusOr<std::vector<Matrix>> Keys(const LayerDump& layer,
                                           const SequenceRange& tokens) override;
  absl::StatusOr<std::vector<Matrix>> SoftmaxValues(
      const LayerDump& layer, const std::vector<SequenceRange>& ranges) override;

  // Of all calls so far.
  GpuWork work() const;
  // What the device reaches in one product of 4,096 x 4,096 matrices: the limit to compare with.
  absl::StatusOr<GpuWork> MeasureLimit();

 private:
  class State;
  explicit GpuCovariance(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace okv

#endif  // OKV_CALIB_CUDA_GPU_COVARIANCE_H_
