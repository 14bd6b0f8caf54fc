#include <cmath>

#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

std::vector<float> RunWithThreads(const Layer& layer, uint32_t count, uint32_t seen,
                                  ThreadPool* pool) {
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(count), std::nanf(""));
  EXPECT_TRUE(Attend(layer.Params(0, count, seen, &blocks, out.data()), pool).ok());
  return out;
}

TEST(AttendThreadsTest, BitsDoNotDependOnTheNumberOfThreads) {
  const Layer prefill({}, 7 * 64, 1);
  const Layer decode({.query_heads = 7, .kv_heads = 1, .head_dim = 128, .group_size = 128}, 900, 2);
  // Several spans: more threads than KV heads share them out.
  const Layer spans({.query_heads = 8, .kv_heads = 2, .head_dim = 128, .group_size = 64},
                    70 * 64 + 9, 3);
  ThreadPool one(1);
  const std::vector<float> prefill_one = RunWithThreads(prefill, 64, 1, &one);
  const std::vector<float> decode_one = RunWithThreads(decode, 1, decode.last_tokens(), &one);
  const std::vector<float> spans_one = RunWithThreads(spans, 1, spans.last_tokens(), &one);
  for (const size_t threads : {2u, 3u, 8u}) {
    ThreadPool pool(threads);
    for (int repeat = 0; repeat < 3; ++repeat) {
      EXPECT_TRUE(SameBits(RunWithThreads(prefill, 64, 1, &pool), prefill_one)) << threads;
      EXPECT_TRUE(SameBits(RunWithThreads(decode, 1, decode.last_tokens(), &pool), decode_one))
          << threads;
      EXPECT_TRUE(SameBits(RunWithThreads(spans, 1, spans.last_tokens(), &pool), spans_one))
          << threads;
    }
  }
}

}  // namespace
}  // namespace okv::kernels_test
