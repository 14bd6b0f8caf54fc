#ifndef OKV_CMD_ENGINE_MATMUL_H_
#define OKV_CMD_ENGINE_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "kernels/thread_pool.h"

namespace okv {

// Outputs of one weight panel: three AVX-512 vectors, six AVX2 ones. Divides 576, 1536 and 49152.
inline constexpr size_t kPanelOutputs = 48;

// A weight matrix [outputs, inputs] in fp32, packed as [outputs / 48][inputs][48]: a kernel reads
// it front to back and has 48 outputs in registers. Thread-compatible.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // Zeros. REQUIRES: outputs, inputs >= 1.
  PackedMatrix(size_t outputs, size_t inputs);

  size_t outputs() const { return outputs_; }
  size_t inputs() const { return inputs_; }
  size_t panels_count() const { return (outputs_ + kPanelOutputs - 1) / kPanelOutputs; }

  // [inputs, 48], inputs as rows.
  const float* panel(size_t index) const { return data_.get() + index * inputs_ * kPanelOutputs; }

  // Writes row `output`, [inputs]. Rows of different panels may be written from several threads.
  void SetRow(size_t output, absl::Span<const float> row);
  // Copies row `output` out: [inputs].
  void CopyRow(size_t output, absl::Span<float> row) const;

 private:
  struct Free {
    void operator()(float* data) const;
  };

  size_t outputs_ = 0;
  size_t inputs_ = 0;
  std::unique_ptr<float[], Free> data_;  // 64-byte aligned; the last panel is padded with zeros.
};

struct MatMulParams {
  const float* x;  // [rows_count, inputs] fp32, row i at x + i * x_stride
  size_t x_stride;
  size_t rows_count;
  const PackedMatrix* w;
  float* y;  // [rows_count, outputs] fp32 out, row i at y + i * y_stride
  size_t y_stride;
};

// y[m, n] = sum over k ascending of fma(x[m, k], w[n, k], acc), acc fp32 from 0: a plain chain,
// never split, so that a row's bits depend on no other row, nor on rows_count, the number of
// threads, the tiling or the instruction set. SIMD runs across outputs. Blocks until done. `y` may
// not overlap x.
void MatMul(const MatMulParams& params, ThreadPool* pool);

}  // namespace okv

#endif  // OKV_CMD_ENGINE_MATMUL_H_
