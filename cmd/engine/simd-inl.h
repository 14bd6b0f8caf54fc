// What the engine's SIMD sources share, compiled once for each target. Include
// kernels/simd_targets.h first. The guard is Highway's: it flips for every target.
#if defined(OKV_CMD_ENGINE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_CMD_ENGINE_SIMD_INL_H_
#undef OKV_CMD_ENGINE_SIMD_INL_H_
#else
#define OKV_CMD_ENGINE_SIMD_INL_H_
#endif

#include <cmath>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// a * b + c, rounded once, on every target: slow where the CPU has no fma, and the same bits.
template <class D, class V>
HWY_INLINE V Fma(D d, V a, V b, V c) {
#if !OKV_TARGET_IS_SIMD
  HWY_ALIGN float lanes[3][hn::MaxLanes(d)];
  hn::Store(a, d, lanes[0]);
  hn::Store(b, d, lanes[1]);
  hn::Store(c, d, lanes[2]);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    lanes[0][i] = std::fma(lanes[0][i], lanes[1][i], lanes[2][i]);
  }
  return hn::Load(d, lanes[0]);
#else
  (void)d;
  return hn::MulAdd(a, b, c);
#endif
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // OKV_CMD_ENGINE_SIMD_INL_H_
