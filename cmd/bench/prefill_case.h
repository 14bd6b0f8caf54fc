#ifndef OKV_CMD_BENCH_PREFILL_CASE_H_
#define OKV_CMD_BENCH_PREFILL_CASE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/prefill.h"

namespace okv::cuda {

struct PrefillCaseOptions {
  PrefillShape shape;  // batch, query_tokens_max and history_blocks_max are those of the lengths
  std::vector<int32_t> new_tokens;  // Of each request
  std::vector<int32_t> lengths;     // The new ones included
  uint32_t layers_count = 1;        // With pages of their own
  uint32_t rotation_heads = 1;
  float query_sigma = 1.0f;
  float logit_softcap = 0.0f;
  bool sink_logits = false;
  bool outliers = false;         // Scales of 0, tiny and huge ones among the INT2 pages
  bool whole_bf16 = false;       // bf16_table has every block, not only what the chunk needs
  uint32_t rows_checked = 4096;  // Check() takes about so many rows, spread evenly
  uint64_t seed = 1;
};

struct PrefillError {
  double relative;         // ||out - reference|| / ||reference||, the worst request
  double beyond_rounding;  // What is left of it without the rounding of the output to bf16
  double few_rows;         // The same, of requests of which fewer than 64 rows were checked
  double lse;              // Largest |lse - reference|
};

// Random queries, rotations and pages on the current device, in random slots of pools that also
// hold NaN: behind each sequence's end, and in blocks of nobody. For tests and benchmarks.
// Thread-compatible. A CUDA error ends the program, naming the call.
class PrefillCase {
 public:
  explicit PrefillCase(const PrefillCaseOptions& options);
  ~PrefillCase();

  PrefillParams Params(uint32_t layer) const;
  // PlanPrefill() and Prefill() over a poisoned output, compared with float64: of rounded queries
  // and INT2 values, or of `exact` ones. NaN, and a write to rows of nobody, is an error of
  // infinity.
  PrefillError Check(uint32_t layer, bool exact = false) const;
  // New numbers of tokens, at most the ones of construction; tables stay.
  void SetTokens(const std::vector<int32_t>& new_tokens, const std::vector<int32_t>& lengths);
  // Output of the last Prefill(), bf16 bits.
  std::vector<uint16_t> Output() const;
  // Multiplications and additions of both products over the keys that each query sees.
  double Operations() const;
  uint32_t history_blocks() const;

 private:
  struct Buffers;
  struct Sample;
  Sample RunBoth(uint32_t layer, bool exact) const;
  PrefillError ErrorOf(const Sample& sample, int64_t begin, int64_t end) const;
  void MakePages(std::mt19937_64* random);
  void PoisonTails() const;

  PrefillCaseOptions options_;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_PREFILL_CASE_H_
