#ifndef OKV_CMD_BENCH_ATTEND_CASE_H_
#define OKV_CMD_BENCH_ATTEND_CASE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "cmd/bench/load_only.h"
#include "cmd/bench/row_draws.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/device_buffer.h"
#include "proto/page_layout.h"

namespace okv::cuda {

struct AttendCaseOptions {
  DecodeShape shape;             // batch is that of `lengths`
  std::vector<int32_t> lengths;  // Tokens of each sequence
  uint32_t layers_count = 1;     // With data of their own
  uint32_t rotation_heads = 1;
  float query_sigma = 1.0f;
  float logit_softcap = 0.0f;
  bool sink_logits = false;
  bool early_history = false;
  bool outliers = false;  // Scales of 0, tiny and huge ones among the pages
  // Null: normal queries and random codes and scales. Otherwise queries, keys and values of a
  // model: rotated, clipped and quantized.
  const RowDraws* draws = nullptr;
  uint64_t seed = 1;
};

struct AttendError {
  double relative;         // ||out - reference|| / ||reference||, the worst request
  double beyond_rounding;  // What is left of it without the rounding of the output to bf16
  double lse;              // Largest |lse - reference|
};

// Random queries, rotations and pages on the current device, in random slots of a pool that also
// holds NaN: behind each sequence's end, and in blocks of nobody. For tests and benchmarks.
// Thread-compatible. A CUDA error ends the program, naming the call.
class AttendCase {
 public:
  explicit AttendCase(const AttendCaseOptions& options);
  ~AttendCase();

  DecodeParams Params(uint32_t layer) const;
  void Plan(cudaStream_t stream) const;
  // PlanDecode() and one Attend() over a poisoned output, compared with float64. NaN is an error of
  // infinity.
  AttendError Check(uint32_t layer) const;
  // New lengths, at most the ones of construction; tables stay.
  void SetLengths(const std::vector<int32_t>& lengths);
  // Output of the last Attend(), bf16 bits.
  std::vector<uint16_t> Output() const;
  // Bytes of keys and values that one layer's queries see, windows included.
  uint64_t BytesRead() const;
  // The same bytes as copies for LoadOnly(), in the order in which attention reads them; and what a
  // layer's launch needs besides.
  std::vector<LoadItem> LoadItems() const;
  LoadOnlyParams LoadParams(const DeviceBuffer& items, uint32_t layer) const;

 private:
  struct Buffers;
  // Blocks of a sequence as its last query sees them. Token counts and blocks; history from
  // sink_blocks on.
  struct View {
    int64_t length;
    int64_t sink_tokens;
    int64_t history_blocks;
    int64_t recent_begin;
  };
  View ViewOf(int32_t length) const;
  PageLayout Layout() const;
  void MakeQueries(std::mt19937_64* random);
  // Tables with random slots; three blocks of the pool belong to nobody and hold NaN.
  void MakePages(std::mt19937_64* random);
  void FillPages(uint32_t int2_blocks, uint32_t bf16_blocks, std::mt19937_64* random);

  AttendCaseOptions options_;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_ATTEND_CASE_H_
