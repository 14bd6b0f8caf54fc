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

float* ThreadScratch(size_t floats_count) {
  thread_local hwy::AlignedFreeUniquePtr<float[]> scratch;
  thread_local size_t scratch_floats = 0;
  if (scratch_floats < floats_count) {
    scratch = hwy::AllocateAligned<float>(floats_count);
    scratch_floats = floats_count;
  }
  return scratch.get();
}

}  // namespace okv
#endif  // HWY_ONCE
