#include "cmd/engine/row_ops.h"

#include <algorithm>
#include <cmath>

#include "kernels/simd_targets.h"
#include "proto/check.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cmd/engine/row_ops.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h.
#include "cmd/engine/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

// A row is read 16 floats a step, whatever a vector holds: sums keep 16 lanes on every target.
constexpr size_t kStep = 16;
constexpr size_t kLanes = hn::MaxLanes(D());
constexpr size_t kVectors = kStep / kLanes;

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2: ln 2 in two parts, e^r by its Taylor
// series to r^7, whose remainder is under 2^-27.
HWY_INLINE V ExpVector(D d, V x) {
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -87.0f)), hn::Set(d, 88.7f));
  const V n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  V r = Fma(d, n, hn::Set(d, -0.693359375f), clamped);
  r = Fma(d, n, hn::Set(d, 2.12194440e-4f), r);
  V sum = hn::Set(d, 1.0f / 5040);
  sum = Fma(d, sum, r, hn::Set(d, 1.0f / 720));
  sum = Fma(d, sum, r, hn::Set(d, 1.0f / 120));
  sum = Fma(d, sum, r, hn::Set(d, 1.0f / 24));
  sum = Fma(d, sum, r, hn::Set(d, 1.0f / 6));
  sum = Fma(d, sum, r, hn::Set(d, 0.5f));
  sum = Fma(d, sum, r, hn::Set(d, 1.0f));
  sum = Fma(d, sum, r, hn::Set(d, 1.0f));
  // 2^n in two factors: n = 128 has no float, its halves do.
  const hn::RebindToSigned<D> di;
  const auto exponent = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const V low = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V high = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  const V result = hn::Mul(hn::Mul(sum, low), high);
  const V zero_or_result = hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.0f)), hn::Zero(d), result);
  const V infinity = hn::Set(d, HUGE_VALF);
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.7f)), infinity, zero_or_result);
}

void ExpKernel(const float* x, float* y) {
  const D d;
  for (size_t i = 0; i < kStep; i += kLanes) {
    hn::StoreU(ExpVector(d, hn::LoadU(d, x + i)), d, y + i);
  }
}

float SquareSumKernel(const float* x, size_t size) {
  const D d;
  V sums[kVectors];
  for (V& sum : sums) sum = hn::Zero(d);
  for (size_t i = 0; i < size; i += kStep) {
    for (size_t v = 0; v < kVectors; ++v) {
      const V value = hn::LoadU(d, x + i + v * kLanes);
      sums[v] = Fma(d, value, value, sums[v]);
    }
  }
  HWY_ALIGN float lanes[kStep];
  for (size_t v = 0; v < kVectors; ++v) hn::Store(sums[v], d, lanes + v * kLanes);
  float total = 0;
  for (const float lane : lanes) total += lane;
  return total;
}

void ScaleKernel(const float* x, const float* weight, float scale, float* y, size_t size) {
  const D d;
  const V factor = hn::Set(d, scale);
  for (size_t i = 0; i < size; i += kLanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), factor), hn::LoadU(d, weight + i)), d, y + i);
  }
}

void SwiGluKernel(const float* gate, const float* up, float* y, size_t size) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  for (size_t i = 0; i < size; i += kLanes) {
    const V g = hn::LoadU(d, gate + i);
    const V silu = hn::Div(g, hn::Add(one, ExpVector(d, hn::Neg(g))));
    hn::StoreU(hn::Mul(silu, hn::LoadU(d, up + i)), d, y + i);
  }
}

// sum exp(x - max), fp32 in 16 lanes over stretches of 1024, those in double.
double ExpSumKernel(const float* x, float max, size_t size) {
  const D d;
  const V shift = hn::Set(d, max);
  double total = 0;
  for (size_t start = 0; start < size; start += 1024) {
    V sums[kVectors];
    for (V& sum : sums) sum = hn::Zero(d);
    for (size_t i = start; i < std::min(size, start + 1024); i += kStep) {
      for (size_t v = 0; v < kVectors; ++v) {
        const V value = hn::Sub(hn::LoadU(d, x + i + v * kLanes), shift);
        sums[v] = hn::Add(sums[v], ExpVector(d, value));
      }
    }
    HWY_ALIGN float lanes[kStep];
    for (size_t v = 0; v < kVectors; ++v) hn::Store(sums[v], d, lanes + v * kLanes);
    for (const float lane : lanes) total += lane;
  }
  return total;
}

void TurnKernel(const float* cos, const float* sin, size_t half, float* x) {
  const D d;
  for (size_t i = 0; i < half; i += kLanes) {
    const V c = hn::LoadU(d, cos + i);
    const V s = hn::LoadU(d, sin + i);
    const V first = hn::LoadU(d, x + i);
    const V second = hn::LoadU(d, x + half + i);
    hn::StoreU(hn::Sub(hn::Mul(first, c), hn::Mul(second, s)), d, x + i);
    hn::StoreU(hn::Add(hn::Mul(second, c), hn::Mul(first, s)), d, x + half + i);
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(ExpKernel);
HWY_EXPORT(SquareSumKernel);
HWY_EXPORT(ScaleKernel);
HWY_EXPORT(SwiGluKernel);
HWY_EXPORT(ExpSumKernel);
HWY_EXPORT(TurnKernel);

void RmsNorm(absl::Span<const float> x, absl::Span<const float> weight, float eps,
             absl::Span<float> y) {
  OKV_CHECK(x.size() % 16 == 0 && weight.size() == x.size() && y.size() == x.size());
  const float square_sum = HWY_DYNAMIC_DISPATCH(SquareSumKernel)(x.data(), x.size());
  const float scale = 1.0f / std::sqrt(square_sum / static_cast<float>(x.size()) + eps);
  HWY_DYNAMIC_DISPATCH(ScaleKernel)(x.data(), weight.data(), scale, y.data(), x.size());
}

void SwiGlu(absl::Span<const float> gate, absl::Span<const float> up, absl::Span<float> y) {
  OKV_CHECK(gate.size() % 16 == 0 && up.size() == gate.size() && y.size() == gate.size());
  HWY_DYNAMIC_DISPATCH(SwiGluKernel)(gate.data(), up.data(), y.data(), gate.size());
}

float NegativeLogLikelihood(absl::Span<const float> logits, uint32_t token) {
  OKV_CHECK(logits.size() % 16 == 0 && token < logits.size());
  const float max = *std::max_element(logits.begin(), logits.end());
  const double sum = HWY_DYNAMIC_DISPATCH(ExpSumKernel)(logits.data(), max, logits.size());
  return static_cast<float>(std::log(sum) + (double{max} - double{logits[token]}));
}

float Exp(float x) {
  float lanes[16];
  std::fill(std::begin(lanes), std::end(lanes), x);
  float results[16];
  HWY_DYNAMIC_DISPATCH(ExpKernel)(lanes, results);
  return results[0];
}

Rope::Rope(uint32_t dim, double theta, uint32_t positions_count) : dim_(dim) {
  OKV_CHECK(dim % 32 == 0);
  const uint32_t half = dim / 2;
  cos_.reserve(size_t{positions_count} * half);
  sin_.reserve(size_t{positions_count} * half);
  std::vector<double> frequencies(half);
  for (uint32_t i = 0; i < half; ++i) frequencies[i] = std::pow(theta, -2.0 * i / dim);
  for (uint32_t position = 0; position < positions_count; ++position) {
    for (const double frequency : frequencies) {
      cos_.push_back(static_cast<float>(std::cos(position * frequency)));
      sin_.push_back(static_cast<float>(std::sin(position * frequency)));
    }
  }
}

void Rope::Apply(uint32_t position, float* x) const {
  const size_t half = dim_ / 2;
  const size_t row = position * half;
  OKV_CHECK(row + half <= cos_.size());
  HWY_DYNAMIC_DISPATCH(TurnKernel)(cos_.data() + row, sin_.data() + row, half, x);
}

}  // namespace okv
#endif  // HWY_ONCE
