#ifndef OKV_CMD_BENCH_REFERENCE_ATTENTION_CUH_
#define OKV_CMD_BENCH_REFERENCE_ATTENTION_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "proto/int2_layout.h"

// What the float64 references of decode and of prefill attention share. One thread block of
// kReferenceThreads works on a query row. Written to be read; speed does not matter.
namespace okv::cuda {

inline constexpr int kReferenceThreads = 256;

// A channel of a token in an INT2 run: offset + scale * code.
struct PageShape {
  uint32_t head_dim;
  uint32_t group_size;
};
__device__ inline double PageValue(const uint8_t* run, const PageShape& shape, int inside,
                                   int channel, bool is_value) {
  const uint32_t dim = shape.head_dim;
  const uint32_t groups = dim / shape.group_size;
  const uint32_t group = channel / shape.group_size;
  const int2::CodePosition at =
      is_value ? int2::ValueCode(dim, inside, channel) : int2::KeyCode(dim, inside, channel);
  const uint32_t word_at = is_value ? int2::ValueParams(dim, groups, inside, group)
                                    : int2::KeyParams(dim, groups, inside, group);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(run + word_at);
  const double scale = __uint_as_float(word << 16);
  const double offset = __uint_as_float(word & 0xffff0000u);
  return offset + scale * (run[at.byte] >> at.shift & 3);
}

// Maximum or sum over the block, in all its threads; `shared` is [kReferenceThreads].
__device__ inline double Reduce(double value, bool maximum, double* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kReferenceThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      const double other = shared[threadIdx.x + half];
      shared[threadIdx.x] =
          maximum ? fmax(shared[threadIdx.x], other) : shared[threadIdx.x] + other;
    }
    __syncthreads();
  }
  const double result = shared[0];
  __syncthreads();
  return result;
}

// x R (or x R^T) of one row: x in shared memory, this thread's channel of the result.
__device__ inline double Rotate(const double* x, const __nv_bfloat16* r, int dim, bool transpose) {
  double sum = 0.0;
  const int channel = threadIdx.x;
  for (int k = 0; k < dim; ++k) {
    sum += x[k] * __bfloat162float(r[transpose ? channel * dim + k : k * dim + channel]);
  }
  return sum;
}

// Fills `scores` with exp(score - maximum); returns maximum and sum. An Element has the query's
// position, Visible(token) and Get(token, channel, is_value); Params the options of a layer.
template <class Element, class Params>
__device__ double2 Softmax(const Element& element, const Params& params, int dim,
                           const double* query, int head, double* scores, double* reduce) {
  double largest = -INFINITY;
  for (int token = threadIdx.x; token <= element.position; token += kReferenceThreads) {
    double score = -INFINITY;
    if (element.Visible(token)) {
      score = 0.0;
      for (int c = 0; c < dim; ++c) score += query[c] * element.Get(token, c, false);
      score *= params.softmax_scale;
      if (params.logit_softcap > 0.0f) {
        score = params.logit_softcap * tanh(score / params.logit_softcap);
      }
    }
    scores[token] = score;
    largest = fmax(largest, score);
  }
  largest = Reduce(largest, true, reduce);
  if (params.sink_logits != nullptr) largest = fmax(largest, double{params.sink_logits[head]});
  double sum = 0.0;
  for (int token = threadIdx.x; token <= element.position; token += kReferenceThreads) {
    scores[token] = exp(scores[token] - largest);
    sum += scores[token];
  }
  sum = Reduce(sum, false, reduce);
  if (params.sink_logits != nullptr) sum += exp(params.sink_logits[head] - largest);
  return {largest, sum};
}

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_REFERENCE_ATTENTION_CUH_
