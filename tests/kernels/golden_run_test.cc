// Golden int2 runs: bytes that leave the process and must never change by accident. The rows come
// from integers alone, so any implementation in any language can make them.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/golden/golden.h"
#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

struct GoldenCase {
  const char* name;
  uint32_t dim;
  uint32_t group_size;
  uint32_t clip_rank_k;
  uint32_t clip_rank_v;
};
constexpr GoldenCase kCases[] = {
    {"int2_run_d64_g64", 64, 64, 61, 58},       {"int2_run_d64_g32", 64, 32, 0, 0},
    {"int2_run_d128_g128", 128, 128, 122, 117}, {"int2_run_d128_g32", 128, 32, 122, 0},
    {"int2_run_d256_g256", 256, 256, 245, 250}, {"int2_run_d256_g64", 256, 64, 0, 240},
};

// x <- x * 1664525 + 1013904223 (mod 2^32) from 1; an element is sign: bit 31, exponent: 121 + bits
// 28..30, mantissa: bits 16..22. Every 37th is a zero, -0, subnormal or 64 in turn; rows of token 7
// are one number throughout. K rows first, then V rows.
std::vector<uint16_t> GoldenRows(uint32_t dim) {
  const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x4280, 0xc280};
  std::vector<uint16_t> rows(2 * 64 * dim);
  uint32_t x = 1;
  for (size_t i = 0; i < rows.size(); ++i) {
    x = x * 1664525u + 1013904223u;
    rows[i] =
        static_cast<uint16_t>((x >> 31) << 15 | (121 + (x >> 28 & 7)) << 7 | (x >> 16 & 0x7f));
    if (i % 37 == 0) rows[i] = special[i / 37 % 6];
    if (i / dim % 64 == 7) rows[i] = 0x3fa0;
  }
  return rows;
}

std::vector<uint8_t> GoldenRun(const GoldenCase& c) {
  const std::vector<uint16_t> rows = GoldenRows(c.dim);
  std::vector<uint8_t> run(OneRun(c.dim, c.group_size).run_bytes(Codec::kInt2));
  BadRow bad;
  EXPECT_TRUE(QuantizeRun({.k = rows.data(),
                           .v = rows.data() + 64 * c.dim,
                           .row_stride = c.dim,
                           .dim = c.dim,
                           .group_size = c.group_size,
                           .clip_rank_k = c.clip_rank_k,
                           .clip_rank_v = c.clip_rank_v},
                          run.data(), &bad)
                  .ok());
  return run;
}

TEST(GoldenRunTest, Int2RunsHaveTheBytesOfTheGoldenFilesOnEveryTarget) {
  for (const GoldenCase& c : kCases) {
    const std::string what = absl::StrCat(
        "int2 run, layout version 1: d ", c.dim, ", g ", c.group_size, ", clip ranks K ",
        c.clip_rank_k, ", V ", c.clip_rank_v, "; rows: tests/kernels/golden_run_test.cc");
    OnEveryTarget([&] {
      const std::vector<uint8_t> run = GoldenRun(c);
      golden::ExpectGolden(
          c.name, what, absl::string_view(reinterpret_cast<const char*>(run.data()), run.size()));
    });
  }
}

}  // namespace
}  // namespace okv::kernels_test
