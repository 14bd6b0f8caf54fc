#ifndef OKV_KERNELS_CUDA_VERIFY_DEVICE_CUH_
#define OKV_KERNELS_CUDA_VERIFY_DEVICE_CUH_

#include <cstdint>

#include "proto/int2_layout.h"

// XXH3-64 with a seed, for inputs of over 240 bytes and a multiple of 64, as one warp computes it;
// and of the 41 bytes that the seed is made of. Functions of one lane, plain C++ so that a test can
// go through them on the CPU.
//
// XXH3 goes through blocks of 16 stripes of 64 bytes. Inside a block it adds, to 8 accumulators of
// 64 bits, terms that do not depend on them: so lanes take stripes side by side, and their sums are
// added up before the block's end, where the accumulators are scrambled. Lane 4 s + m takes stripes
// s and s + 8 and of them the accumulators 2 m and 2 m + 1: 16 bytes, and 512 in sequence a warp.
namespace okv::cuda::xxh3 {

// The algorithm's constants: the first 192 bytes of its secret as little-endian words, and primes.
#define OKV_XXH3_SECRET \
  { \
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, \
        0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, \
        0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938, \
        0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, \
        0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3, \
        0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af \
  }
inline constexpr uint64_t kSecret[24] = OKV_XXH3_SECRET;
#ifdef __CUDACC__
static __constant__ uint64_t kSecretOnDevice[24] = OKV_XXH3_SECRET;
#endif
#undef OKV_XXH3_SECRET
OKV_HOST_DEVICE inline uint64_t SecretWord(uint32_t index) {
#ifdef __CUDA_ARCH__
  return kSecretOnDevice[index];
#else
  return kSecret[index];
#endif
}

inline constexpr uint64_t kPrime32_1 = 0x9e3779b1;
inline constexpr uint64_t kPrime32_2 = 0x85ebca77;
inline constexpr uint64_t kPrime32_3 = 0xc2b2ae3d;
inline constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87;
inline constexpr uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4f;
inline constexpr uint64_t kPrime64_3 = 0x165667b19e3779f9;
inline constexpr uint64_t kPrime64_4 = 0x85ebca77c2b2ae63;
inline constexpr uint64_t kPrime64_5 = 0x27d4eb2f165667c5;
// Of the avalanche; not kPrime64_3, although only one digit differs.
inline constexpr uint64_t kAvalanche = 0x165667919e3779f9;

inline constexpr uint32_t kStripeBytes = 64;
inline constexpr uint32_t kBlockBytes = 1024;

// Two neighboring 64-bit words: of data, of a secret or accumulators.
struct Pair {
  uint64_t first;
  uint64_t second;
};

OKV_HOST_DEVICE inline Pair AddPairs(const Pair& a, const Pair& b) {
  return {a.first + b.first, a.second + b.second};
}

OKV_HOST_DEVICE inline uint64_t MultiplyFold(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return (a * b) ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}
OKV_HOST_DEVICE inline uint64_t Avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kAvalanche;
  return x ^ x >> 32;
}

// Word `index` of the secret that the seed makes.
OKV_HOST_DEVICE inline uint64_t SeededWord(uint64_t seed, uint32_t index) {
  return SecretWord(index) + (index % 2 == 0 ? seed : 0 - seed);
}
// The pair that starts `bytes` (1 to 7) bytes behind word `index`.
OKV_HOST_DEVICE inline Pair SeededPair(uint64_t seed, uint32_t index, uint32_t bytes) {
  const uint64_t a = SeededWord(seed, index);
  const uint64_t b = SeededWord(seed, index + 1);
  const uint64_t c = SeededWord(seed, index + 2);
  const uint32_t shift = 8 * bytes;
  return {a >> shift | b << (64 - shift), b >> shift | c << (64 - shift)};
}

// What a lane adds up with: its secrets, made once a run.
struct LaneSecrets {
  Pair stripe[2];  // Of stripes s and s + 8
  Pair last;       // Of the input's last stripe, in the place of `stripe`
  Pair scramble;
};
OKV_HOST_DEVICE inline LaneSecrets MakeLaneSecrets(uint64_t seed, uint32_t lane) {
  const uint32_t s = lane / 4;
  const uint32_t m = lane % 4;
  LaneSecrets secrets;
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t word = s + 8 * i + 2 * m;
    secrets.stripe[i] = {SeededWord(seed, word), SeededWord(seed, word + 1)};
  }
  secrets.last = SeededPair(seed, 15 + 2 * m, 1);  // 192 - 64 - 7 = 121 bytes = 15 words and 1 byte
  secrets.scramble = {SeededWord(seed, 16 + 2 * m), SeededWord(seed, 17 + 2 * m)};
  return secrets;
}

// One stripe's terms for the lane's two accumulators.
OKV_HOST_DEVICE inline void Accumulate(const Pair& data, const Pair& secret, Pair* sums) {
  const uint64_t a = data.first ^ secret.first;
  const uint64_t b = data.second ^ secret.second;
  sums->first += data.second + (a & 0xffffffff) * (a >> 32);
  sums->second += data.first + (b & 0xffffffff) * (b >> 32);
}

OKV_HOST_DEVICE inline Pair Scramble(const Pair& accumulators, const Pair& secret) {
  const uint64_t a = accumulators.first;
  const uint64_t b = accumulators.second;
  return {(a ^ a >> 47 ^ secret.first) * kPrime32_1, (b ^ b >> 47 ^ secret.second) * kPrime32_1};
}

// Accumulators 2 m and 2 m + 1 at the beginning.
OKV_HOST_DEVICE inline Pair InitialAccumulators(uint32_t m) {
  switch (m) {
    case 0:
      return {kPrime32_3, kPrime64_1};
    case 1:
      return {kPrime64_2, kPrime64_3};
    case 2:
      return {kPrime64_4, kPrime32_2};
    default:
      return {kPrime64_5, kPrime32_1};
  }
}

// The part of accumulators 2 m and 2 m + 1 in the result; Finish() takes the sum of the four parts.
OKV_HOST_DEVICE inline uint64_t FinalPart(const Pair& accumulators, uint64_t seed, uint32_t m) {
  // 11 bytes are 1 word and 3 bytes.
  const Pair secret = SeededPair(seed, 1 + 2 * m, 3);
  return MultiplyFold(accumulators.first ^ secret.first, accumulators.second ^ secret.second);
}
OKV_HOST_DEVICE inline uint64_t Finish(uint64_t parts, uint64_t bytes) {
  return Avalanche(parts + bytes * kPrime64_1);
}

// XXH3-64 without seed of the 41 bytes key[32], codec, layer (u32 LE), head (u32 LE): four
// overlapping pieces of 16 bytes.
OKV_HOST_DEVICE inline uint64_t RunSeed(const uint64_t* key, uint8_t codec, uint32_t layer,
                                        uint32_t head) {
  const uint64_t from25 = key[3] >> 8 | static_cast<uint64_t>(codec) << 56;
  const uint64_t from33 = layer | static_cast<uint64_t>(head) << 32;
  const uint64_t from9 = key[1] >> 8 | key[2] << 56;
  const uint64_t from17 = key[2] >> 8 | key[3] << 56;
  const uint64_t sum = MultiplyFold(key[0] ^ SecretWord(0), key[1] ^ SecretWord(1)) +
                       MultiplyFold(from25 ^ SecretWord(2), from33 ^ SecretWord(3)) +
                       MultiplyFold(key[2] ^ SecretWord(4), key[3] ^ SecretWord(5)) +
                       MultiplyFold(from9 ^ SecretWord(6), from17 ^ SecretWord(7));
  return Finish(sum, 41);
}

}  // namespace okv::cuda::xxh3

#endif  // OKV_KERNELS_CUDA_VERIFY_DEVICE_CUH_
