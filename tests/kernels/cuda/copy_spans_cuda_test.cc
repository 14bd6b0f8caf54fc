// Copies of many pieces within the device's memory.
#include <algorithm>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/copy_spans.h"
#include "tests/kernels/cuda/device.h"
#include "tests/kernels/support.h"

namespace okv::cuda_test {
namespace {

using kernels_test::Lcg;

TEST(CopySpansArgumentsTest, WhatIsNoMultipleOf16OrTooMuchIsRefused) {
  uint8_t* const at = nullptr;
  for (const cuda::CopySpan& span :
       {cuda::CopySpan{.to = at + 8, .from = at, .bytes = 16},
        cuda::CopySpan{.to = at, .from = at + 4, .bytes = 16},
        cuda::CopySpan{.to = at, .from = at, .bytes = 24},
        cuda::CopySpan{.to = at, .from = at, .bytes = uint64_t{1} << 45}}) {
    EXPECT_EQ(cuda::CopySpans(&span, 1, nullptr), cudaErrorInvalidValue);
  }
  const std::vector<cuda::CopySpan> many(cuda::kCopySpansMax + 1);
  EXPECT_EQ(cuda::CopySpans(many.data(), cuda::kCopySpansMax + 1, nullptr), cudaErrorInvalidValue);
}

class CopySpansTest : public CudaTest {};

TEST_F(CopySpansTest, PiecesOfAnySizeArriveAndNothingElseIsWritten) {
  Lcg lcg(1);
  // About the sizes of a chunk, and none.
  std::vector<uint64_t> sizes = {16, 0, 4096, 16384 - 16, 16384, 16384 + 16, 1327104, 258048, 32};
  while (sizes.size() < cuda::kCopySpansMax) sizes.push_back(16 * (lcg.Next() % 5000));
  const uint64_t total = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  const uint64_t gaps = 32 * sizes.size();  // 32 bytes behind each, that stay as they are
  std::vector<uint8_t> source(total + gaps);
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(lcg.Next() >> 9);
  std::vector<uint8_t> expected(total + gaps, 0xa5);
  const OnDevice<uint8_t> from(source);
  const OnDevice<uint8_t> to(expected);
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[lcg.Next() % (i + 1)]);
  std::vector<uint64_t> places(sizes.size());  // At the destination, in another order.
  uint64_t at = 0;
  for (const size_t i : order) {
    places[i] = at;
    at += sizes[i] + 32;
  }
  std::vector<cuda::CopySpan> spans;
  at = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    spans.push_back({.to = to.get() + places[i], .from = from.get() + at, .bytes = sizes[i]});
    std::copy_n(source.begin() + static_cast<ptrdiff_t>(at), sizes[i],
                expected.begin() + static_cast<ptrdiff_t>(places[i]));
    at += sizes[i] + 32;
  }
  ASSERT_CUDA_OK(cuda::CopySpans(spans.data(), static_cast<uint32_t>(spans.size()), stream_));
  Wait();
  EXPECT_TRUE(to.Read() == expected);
}

}  // namespace
}  // namespace okv::cuda_test
