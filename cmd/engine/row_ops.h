#ifndef OKV_CMD_ENGINE_ROW_OPS_H_
#define OKV_CMD_ENGINE_ROW_OPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace okv {

// What a transformer does to single rows between matrix products. Each result is a function of its
// row alone, in a fixed order of operations: the same bits in any batch, on any instruction set.

// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]. The sum runs in 16 lanes that are added at the
// end. `y` may be x. All of one size, a multiple of 16.
void RmsNorm(absl::Span<const float> x, absl::Span<const float> weight, float eps,
             absl::Span<float> y);

// y[i] = gate[i] / (1 + exp(-gate[i])) * up[i]. All of one size, a multiple of 16.
void SwiGlu(absl::Span<const float> gate, absl::Span<const float> up, absl::Span<float> y);

// -log softmax(logits)[token]. A size that is a multiple of 16. REQUIRES: token < logits.size().
float NegativeLogLikelihood(absl::Span<const float> logits, uint32_t token);

// e^x within 2 units in the last place; 0 below -87, +Inf above 88.7.
float Exp(float x);

// Rotary position embedding with half-split pairs: (x[i], x[i + dim / 2]) turns by
// position * theta^(-2 i / dim). Thread-safe.
class Rope {
 public:
  // The angles are computed in double, once. REQUIRES: dim a multiple of 32.
  Rope(uint32_t dim, double theta, uint32_t positions_count);

  // Turns one head, [dim]. REQUIRES: position < positions_count.
  void Apply(uint32_t position, float* x) const;

 private:
  const uint32_t dim_;
  std::vector<float> cos_;  // [positions_count, dim / 2]
  std::vector<float> sin_;
};

}  // namespace okv

#endif  // OKV_CMD_ENGINE_ROW_OPS_H_
