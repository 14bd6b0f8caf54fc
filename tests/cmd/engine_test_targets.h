#ifndef OKV_TESTS_CMD_ENGINE_TEST_TARGETS_H_
#define OKV_TESTS_CMD_ENGINE_TEST_TARGETS_H_

#include <gtest/gtest.h>

#include "hwy/targets.h"

namespace okv::testing_support {

// Calls `body` once with each instruction set that this CPU has and the engine is compiled for, the
// emulation included. Not from several threads.
template <typename Body>
void OnEveryTarget(const Body& body) {
  const int64_t supported = hwy::SupportedTargets();
  for (const int64_t target : {int64_t{HWY_EMU128}, int64_t{HWY_AVX2}, int64_t{HWY_AVX3}}) {
    if (target != HWY_EMU128 && (supported & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CMD_ENGINE_TEST_TARGETS_H_
