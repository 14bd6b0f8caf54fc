#ifndef OKV_PROTO_INT2_LAYOUT_H_
#define OKV_PROTO_INT2_LAYOUT_H_

#include <cstdint>

// Device code reads these functions too.
#ifdef __CUDACC__
#define OKV_HOST_DEVICE __host__ __device__
#else
#define OKV_HOST_DEVICE
#endif

// Where a code and a parameter word are inside an int2 run of page layout version 1: the only
// definition of it, for CPU and GPU kernels and for tests. page_layout.md has it in words, and why
// it is so. Plain C++20, so that CUDA sources can include it.
//
// The run of one (layer, KV head), 64 tokens; d = head_dim, g = group_size, G = d / g:
//   [0, 16 d)              K codes
//   [16 d, 32 d)           V codes
//   [32 d, 32 d + 512 G)   parameter words
namespace okv::int2 {

// Codes come in tiles of 512 bytes: 32 lanes of a warp, 16 bytes each.
inline constexpr uint32_t kTileBytes = 512;

// A code is bits [shift, shift + 2) of the run's byte `byte`.
struct CodePosition {
  uint32_t byte;
  uint32_t shift;
};

OKV_HOST_DEVICE constexpr uint32_t KeyCodesOffset() { return 0; }
OKV_HOST_DEVICE constexpr uint32_t ValueCodesOffset(uint32_t head_dim) { return 16 * head_dim; }
OKV_HOST_DEVICE constexpr uint32_t ParamsOffset(uint32_t head_dim) { return 32 * head_dim; }
OKV_HOST_DEVICE constexpr uint32_t RunBytes(uint32_t head_dim, uint32_t groups) {
  return ParamsOffset(head_dim) + 512 * groups;
}

// K code of (token, channel). A byte holds one token's channels r, r + d/4, r + d/2, r + 3d/4. A
// tile is 16 tokens by 32 such bytes, or 32 tokens by 16 of them at d 64.
OKV_HOST_DEVICE constexpr CodePosition KeyCode(uint32_t head_dim, uint32_t token,
                                               uint32_t channel) {
  const uint32_t quarter = head_dim / 4;
  const uint32_t r = channel % quarter;
  const uint32_t shift = 2 * (channel / quarter);
  const uint32_t lane = (token & 7) * 4 + (r >> 2 & 3);
  if (head_dim == 64) {
    const uint32_t word = token >> 3 & 3;
    return {(token >> 5) * kTileBytes + lane * 16 + word * 4 + (r & 3), shift};
  }
  const uint32_t tile = (token >> 4) * (head_dim / 128) + (r >> 5);
  const uint32_t word = (token >> 3 & 1) + 2 * (r >> 4 & 1);
  return {tile * kTileBytes + lane * 16 + word * 4 + (r & 3), shift};
}

// V code of (token, channel). A byte holds channels of one token as K's do; a tile is 32 tokens by
// 16 such bytes, with four tokens in a word.
OKV_HOST_DEVICE constexpr CodePosition ValueCode(uint32_t head_dim, uint32_t token,
                                                 uint32_t channel) {
  const uint32_t quarter = head_dim / 4;
  const uint32_t r = channel % quarter;
  const uint32_t tile = (token >> 5) * (head_dim / 64) + (r >> 4);
  const uint32_t lane = (r & 7) * 4 + (token >> 1 & 3);
  const uint32_t word = (r >> 3 & 1) + 2 * (token >> 4 & 1);
  const uint32_t byte = 2 * (token & 1) + (token >> 3 & 1);
  return {ValueCodesOffset(head_dim) + tile * kTileBytes + lane * 16 + word * 4 + byte,
          2 * (channel / quarter)};
}

// The run's byte where the word of (token, group) starts: u32 little endian, low half scale, high
// half offset (bf16). 16 bytes hold the words of tokens t and t + 8: K, K, V, V.
OKV_HOST_DEVICE constexpr uint32_t KeyParams(uint32_t head_dim, uint32_t groups, uint32_t token,
                                             uint32_t group) {
  const uint32_t pair = (token >> 4) * 8 + (token & 7);
  return ParamsOffset(head_dim) + (pair * groups + group) * 16 + (token >> 3 & 1) * 4;
}
OKV_HOST_DEVICE constexpr uint32_t ValueParams(uint32_t head_dim, uint32_t groups, uint32_t token,
                                               uint32_t group) {
  return KeyParams(head_dim, groups, token, group) + 8;
}

}  // namespace okv::int2

#endif  // OKV_PROTO_INT2_LAYOUT_H_
