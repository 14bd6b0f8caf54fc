#include "kernels/simd.h"

#include "hwy/aligned_allocator.h"
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {
int64_t Target() { return HWY_TARGET; }
}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(Target);

absl::string_view SimdTargetName() { return hwy::TargetName(HWY_DYNAMIC_DISPATCH(Target)()); }

std::vector<int64_t> SimdTargetsForTest() {
  std::vector<int64_t> targets;
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target != HWY_STATIC_TARGET) targets.push_back(target);
  }
  targets.push_back(HWY_STATIC_TARGET);
  return targets;
}

void SetSimdTargetForTest(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

namespace {

struct Scratch {
  hwy::AlignedFreeUniquePtr<float[]> floats;
  size_t floats_count = 0;

  float* AtLeast(size_t count) {
    if (floats_count < count) {
      floats = hwy::AllocateAligned<float>(count);
      floats_count = count;
    }
    return floats.get();
  }
};

}  // namespace

float* ThreadScratch(size_t floats_count) {
  thread_local Scratch scratch;
  return scratch.AtLeast(floats_count);
}

float* CallScratch(size_t floats_count) {
  thread_local Scratch scratch;
  return scratch.AtLeast(floats_count);
}

}  // namespace okv
#endif  // HWY_ONCE
