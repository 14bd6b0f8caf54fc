#ifndef OKV_CMD_ENGINE_SAMPLER_H_
#define OKV_CMD_ENGINE_SAMPLER_H_

#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace okv {

struct SamplerOptions {
  float temperature = 0;  // 0: always the likeliest token.
  uint32_t top_k = 0;     // 0: off.
  float top_p = 1;        // 1: off.
  uint64_t seed = 0;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// Chooses the next token. The same options and the same logits give the same tokens on any machine.
// Thread-compatible.
class Sampler {
 public:
  // REQUIRES: options.Validate().ok().
  explicit Sampler(const SamplerOptions& options);

  // Of equally likely tokens the lowest goes first. REQUIRES: logits not empty, no NaN.
  uint32_t Sample(absl::Span<const float> logits);

 private:
  const SamplerOptions options_;
  std::mt19937_64
      random_;  // Its output is fixed by the C++ standard; that of distributions is not.
};

// The likeliest token, the lowest of equals. REQUIRES: logits not empty.
uint32_t GreedyToken(absl::Span<const float> logits);

}  // namespace okv

#endif  // OKV_CMD_ENGINE_SAMPLER_H_
