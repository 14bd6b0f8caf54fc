#ifndef OKV_PROTO_BF16_H_
#define OKV_PROTO_BF16_H_

#include <bit>
#include <cstdint>

namespace okv {

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest, ties to even. NaN stays NaN (quiet).
inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace okv

#endif  // OKV_PROTO_BF16_H_
