#ifndef OKV_KERNELS_SOFTMAX_EXP2_H_
#define OKV_KERNELS_SOFTMAX_EXP2_H_

#include <bit>
#include <cmath>
#include <cstdint>

namespace okv {

// The softmax's exponential: 2^x for x <= 0, the same bits on every CPU, which no libm promises.
// x = n + f with n = round_half_even(x) and |f| <= 1/2 (exact); 2^f = 1 + f * q(f), Horner by fma;
// 2^n goes into the exponent. Below -126 the result is 0: a probability of 1e-38 is nothing.
// q is the minimax polynomial of degree 5 of (2^f - 1) / f, error 7.8e-9 before rounding of the
// coefficients: the result is within 1 ulp of the true value, and exactly 1 at 0.
inline constexpr float kExp2C1 = 0x1.62e43p-1f;
inline constexpr float kExp2C2 = 0x1.ebfbep-3f;
inline constexpr float kExp2C3 = 0x1.c6af6cp-5f;
inline constexpr float kExp2C4 = 0x1.3b2a54p-7f;
inline constexpr float kExp2C5 = 0x1.5f089p-10f;
inline constexpr float kExp2C6 = 0x1.44138ap-13f;
inline constexpr float kExp2Min = -126.0f;

// exp(x) = 2^(x log2 e): the factor is folded into the softmax scale, once per call.
inline constexpr float kLog2E = 0x1.715476p+0f;

// The scalar twin of what attend.cc does in vectors. REQUIRES: x <= 0 (-Inf
// allowed) or NaN, which is passed on: a broken key must not look like one that nobody reads.
inline float Exp2Softmax(float x) {
  if (std::isnan(x)) return x;
  if (x < kExp2Min) return 0.0f;
  const float n = std::nearbyintf(x);
  const float f = x - n;
  float q = kExp2C6;
  q = std::fmaf(q, f, kExp2C5);
  q = std::fmaf(q, f, kExp2C4);
  q = std::fmaf(q, f, kExp2C3);
  q = std::fmaf(q, f, kExp2C2);
  q = std::fmaf(q, f, kExp2C1);
  const float power =
      std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return std::fmaf(q, f, 1.0f) * power;
}

}  // namespace okv

#endif  // OKV_KERNELS_SOFTMAX_EXP2_H_
