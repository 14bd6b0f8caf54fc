// Times the CPU kernels on random data and prints one line each (kernels/README.md has the
// results), for one head_dim or for all:
//   okv_kernels_bench [head_dim]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "tests/kernels/plain_attention.h"
#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

constexpr uint32_t kTokens = 4096;

// The fastest of many calls: others share the machine.
double BestMicros(const std::function<void()>& call) {
  double best_us = 1e12;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
  do {
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    best_us = std::min(best_us, took.count());
  } while (std::chrono::steady_clock::now() < end);
  return best_us;
}

void BenchAttend(uint32_t dim, Codec codec) {
  const LayerShape shape{.query_heads = 9, .kv_heads = 3, .head_dim = dim, .group_size = dim};
  Layer layer(shape, 0, 1);
  Lcg lcg(2);
  for (uint32_t b = 0; b < kTokens / kBlockTokens; ++b) layer.AddPage(codec, &lcg);
  ThreadPool pool(1);
  std::vector<AttendBlock> blocks;
  for (const uint32_t queries : {64u, 1u}) {
    std::vector<float> out(layer.out_floats(queries));
    const AttendParams params = layer.Params(0, queries, 65 - queries, &blocks, out.data());
    const double us = BestMicros([&] { (void)Attend(params, &pool); });
    const double flops = 4.0 * queries * shape.query_heads * dim * kTokens;
    std::printf(
        "attend, %2u quer%s x 9 heads, %u tokens, %s: %.1f us, %.1f GFLOP/s, %.2f ns per token "
        "and KV head\n",
        queries, queries == 1 ? "y  " : "ies", kTokens, std::string(CodecName(codec)).c_str(), us,
        flops / us * 1e-3, us * 1e3 / (kTokens * 3.0));
  }
}

// One query of 4 heads per KV head, on each instruction set: the int2 pages, rotations included,
// beside plain attention over a bf16 cache.
void BenchDecode(uint32_t dim, uint32_t tokens) {
  constexpr uint32_t kHeads = 2;
  const LayerShape shape{
      .query_heads = 4 * kHeads, .kv_heads = kHeads, .head_dim = dim, .group_size = dim};
  Layer layer(shape, 0, 1);
  Lcg lcg(2);
  for (uint32_t b = 0; b < tokens / kBlockTokens; ++b) layer.AddPage(Codec::kInt2, &lcg);
  const std::vector<uint16_t> cache =
      RandomBf16(&lcg, size_t{2} * kHeads * tokens * dim, 1.0f);  // [head][K, V][token][dim]
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(1));
  const AttendParams params = layer.Params(0, 1, 64, &blocks, out.data());
  ThreadPool pool(1);
  for (const int64_t target : SimdTargetsForTest()) {
    SetSimdTargetForTest(target);
    bool has_plain = true;
    const double plain_us = BestMicros([&] {
      for (uint32_t head = 0; head < kHeads; ++head) {
        const uint16_t* const k = cache.data() + size_t{2} * head * tokens * dim;
        has_plain &= AttendPlain({.q = params.q + size_t{4} * head * dim,
                                  .k = k,
                                  .v = k + size_t{tokens} * dim,
                                  .tokens = tokens,
                                  .rows = 4,
                                  .dim = dim,
                                  .softmax_scale = params.softmax_scale,
                                  .out = out.data() + size_t{4} * head * dim});
      }
    });
    if (!has_plain) continue;  // The scalar twins.
    const double int2_us = BestMicros([&] { (void)Attend(params, &pool); });
    std::printf(
        "decode, 4 heads per KV head, %6u tokens, %-7s: int2 %.2f, plain fp32 over bf16 %.2f ns "
        "per "
        "token and KV head\n",
        tokens, std::string(SimdTargetName()).c_str(), int2_us * 1e3 / (tokens * kHeads),
        plain_us * 1e3 / (tokens * kHeads));
  }
  SetSimdTargetForTest(0);
}

void BenchRun(uint32_t dim) {
  Lcg lcg(3);
  const std::vector<uint16_t> rows = RandomBf16(&lcg, 2 * 64 * dim, 1.0f);
  const std::vector<uint16_t> r = RandomBf16(&lcg, dim * dim, 0.1f);
  std::vector<uint16_t> out(2 * 64 * dim);
  std::vector<uint8_t> run(OneRun(dim, dim).run_bytes(Codec::kInt2));
  BadRow bad;
  const QuantizeRunParams quantize{.k = rows.data(),
                                   .v = rows.data() + 64 * dim,
                                   .row_stride = dim,
                                   .dim = dim,
                                   .group_size = dim,
                                   .clip_rank_k = dim - 6,
                                   .clip_rank_v = dim - 11};
  const RotateParams rotate{
      .x = rows.data(), .x_stride = dim, .r = r.data(), .rows_count = 128, .dim = dim};
  const DequantizeRunParams dequantize{.run = run.data(), .dim = dim, .group_size = dim};
  const double quantize_us = BestMicros([&] { (void)QuantizeRun(quantize, run.data(), &bad); });
  const double rotate_us = BestMicros([&] { RotateRows(rotate, out.data(), dim); });
  const double dequantize_us =
      BestMicros([&] { DequantizeRun(dequantize, out.data(), out.data() + 64 * dim); });
  std::printf("rotate     %.1f ns per token and KV head (K and V)\n", rotate_us * 1e3 / 64);
  std::printf("quantize   %.1f ns per token and KV head\n", quantize_us * 1e3 / 64);
  std::printf("dequantize %.1f ns per token and KV head, to bf16\n", dequantize_us * 1e3 / 64);
}

}  // namespace
}  // namespace okv::kernels_test

int main(int argc, char** argv) {
  const uint32_t only = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 0;
  if (argc > 1 && only != 64 && only != 128 && only != 256) {
    std::fprintf(stderr, "head_dim is 64, 128 or 256\n");
    return 2;
  }
  for (const uint32_t dim : {64u, 128u, 256u}) {
    if (argc > 1 && dim != only) continue;
    std::printf("head_dim %u, one thread, %s\n", dim, std::string(okv::SimdTargetName()).c_str());
    okv::kernels_test::BenchDecode(dim, 4096);
    okv::kernels_test::BenchDecode(dim, 32768);
    okv::kernels_test::BenchAttend(dim, okv::Codec::kInt2);
    okv::kernels_test::BenchAttend(dim, okv::Codec::kBf16);
    okv::kernels_test::BenchRun(dim);
  }
  return 0;
}
