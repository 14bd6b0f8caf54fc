#ifndef OKV_CMD_BENCH_QUALITY_CONTROLS_H_
#define OKV_CMD_BENCH_QUALITY_CONTROLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cmd/bench/bootstrap.h"
#include "cmd/bench/contender.h"
#include "cmd/bench/windows.h"
#include "cmd/engine/model.h"
#include "proto/rotation_set.h"

namespace okv {

// Variants whose outcome is known beforehand: a measurement that cannot tell them from the
// reference (a rotation set under the windows that it is used with) measures nothing.
//   control-none     no rotation, no clipping, and of the windows only what the format cannot do
//                    without: the sink block and the block that is being written. Must fail badly:
//                    fail, and ten times the reference's KL.
//   control-shifted  the reference with every layer's rotations and clip ranks taken from the layer
//                    behind it, the last one's from the first: a valid set, with a hash of its own,
//                    of the wrong layers. Must fail: KL and NLL above the reference's by paired
//                    intervals, and twice its KL.
//   control-int8     the reference's rotations and windows with 8-bit codes, which the client
//                    library has not: a FakeQuantizedCache. Must pass: within 0.005 nats of BF16's
//                    NLL by its interval, and at most a tenth of the reference's KL.
struct Control {
  enum class Must { kFailBadly, kFail, kPass };
  Must must;
  Contender contender;
};

// In that order. kInvalidArgument: the reference has the same rotations in all layers, so that
// nothing would be shifted.
absl::StatusOr<std::vector<Control>> MakeControls(const ModelConfig& config,
                                                  const Contender& reference);

// Layer l with the rotations and clip ranks of layer (l + 1) % layers.
RotationSet ShiftLayers(const RotationSet& set);

struct ControlVerdict {
  std::string name;
  std::string expectation;  // For people.
  Interval gap;             // NLL minus BF16's, paired.
  Interval gap_difference;  // Gap minus the reference's, paired.
  Interval kl_difference;   // KL(BF16 || it) minus the reference's, paired.
  double kl_ratio = 0;      // Of the means; 0 when the reference's is 0.
  bool held = false;
};

// Over the same windows.
struct ControlScores {
  const WindowScores* control;
  const WindowScores* reference;
  const WindowScores* baseline;
};
// By the rules above.
ControlVerdict JudgeControl(const Control& control, const ControlScores& scores, uint64_t seed);

}  // namespace okv

#endif  // OKV_CMD_BENCH_QUALITY_CONTROLS_H_
