#include "cmd/engine/matmul.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/simd_targets.h"
#include "proto/check.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cmd/engine/matmul.cc"
#include "hwy/foreach_target.h"
// Behind foreach_target.h.
#include "cmd/engine/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

// The kernel keeps kRows x kVectors sums in registers, and the vectors of one input of the panel.
// AVX-512 has 32 registers: 8 x 3 sums, 3 weights, 1 input. AVX2 has 16: 6 x 2, 2, 1.
#if HWY_TARGET <= HWY_AVX3
constexpr size_t kTileRows = 8;
constexpr size_t kTileVectors = 3;
#else
constexpr size_t kTileRows = 6;
constexpr size_t kTileVectors = 2;
#endif

using D = hn::CappedTag<float, 16>;

// kRows rows by kTileVectors vectors of outputs, starting at `w` inside a panel.
template <size_t kRows>
HWY_INLINE void Tile(const float* HWY_RESTRICT x, size_t x_stride, const float* HWY_RESTRICT w,
                     size_t inputs, float* HWY_RESTRICT y, size_t y_stride) {
  const D d;
  constexpr size_t kLanes = hn::MaxLanes(D());
  hn::Vec<D> sums[kRows][kTileVectors];
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kTileVectors; ++v) sums[r][v] = hn::Zero(d);
  }
  for (size_t k = 0; k < inputs; ++k) {
    hn::Vec<D> weights[kTileVectors];
    for (size_t v = 0; v < kTileVectors; ++v) weights[v] = hn::Load(d, w + v * kLanes);
    w += kPanelOutputs;
    for (size_t r = 0; r < kRows; ++r) {
      const hn::Vec<D> input = hn::Set(d, x[r * x_stride + k]);
      for (size_t v = 0; v < kTileVectors; ++v) {
        sums[r][v] = Fma(d, input, weights[v], sums[r][v]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kTileVectors; ++v) {
      hn::StoreU(sums[r][v], d, y + r * y_stride + v * kLanes);
    }
  }
}

// The same for a number of rows that is known at run time only.
HWY_INLINE void TileOf(size_t rows, const float* x, size_t x_stride, const float* w, size_t inputs,
                       float* y, size_t y_stride) {
  switch (rows) {
    case 1:
      return Tile<1>(x, x_stride, w, inputs, y, y_stride);
    case 2:
      return Tile<2>(x, x_stride, w, inputs, y, y_stride);
    case 3:
      return Tile<3>(x, x_stride, w, inputs, y, y_stride);
    case 4:
      return Tile<4>(x, x_stride, w, inputs, y, y_stride);
    case 5:
      return Tile<5>(x, x_stride, w, inputs, y, y_stride);
    case 6:
      return Tile<6>(x, x_stride, w, inputs, y, y_stride);
#if HWY_TARGET <= HWY_AVX3
    case 7:
      return Tile<7>(x, x_stride, w, inputs, y, y_stride);
    case 8:
      return Tile<8>(x, x_stride, w, inputs, y, y_stride);
#endif
    default:
      OKV_CHECK(false);
  }
}

// All rows of one panel.
void PanelKernel(const float* x, size_t x_stride, size_t rows, const float* panel, size_t inputs,
                 float* y, size_t y_stride) {
  constexpr size_t kTileOutputs = kTileVectors * hn::MaxLanes(D());
  static_assert(kPanelOutputs % kTileOutputs == 0);
  for (size_t row = 0; row < rows; row += kTileRows) {
    const size_t tile_rows = std::min(kTileRows, rows - row);
    for (size_t n = 0; n < kPanelOutputs; n += kTileOutputs) {
      TileOf(tile_rows, x + row * x_stride, x_stride, panel + n, inputs, y + row * y_stride + n,
             y_stride);
    }
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(PanelKernel);

namespace {

constexpr size_t kAlignment = 64;
// Rows of one task: 128 x 1536 inputs x 4 B = 786 KB beside a 295 KB panel still fit a 2 MB L2.
constexpr size_t kTaskRows = 128;
// Panels of one task at least: a decode step must not spend its time handing out tasks.
constexpr size_t kTaskPanelsOfOneRow = 8;

// One panel whose last outputs are padding: computed beside, then copied.
void PaddedPanel(const MatMulParams& params, size_t row, size_t rows, size_t panel) {
  const size_t first = panel * kPanelOutputs;
  const size_t outputs = params.w->outputs() - first;
  float scratch[kPanelOutputs];
  for (size_t r = row; r < row + rows; ++r) {
    HWY_DYNAMIC_DISPATCH(PanelKernel)
    (params.x + r * params.x_stride, params.x_stride, 1, params.w->panel(panel), params.w->inputs(),
     scratch, kPanelOutputs);
    std::memcpy(params.y + r * params.y_stride + first, scratch, outputs * sizeof(float));
  }
}

}  // namespace

void MatMul(const MatMulParams& params, ThreadPool* pool) {
  const PackedMatrix& w = *params.w;
  OKV_CHECK(params.x_stride >= w.inputs() && params.y_stride >= w.outputs());
  const size_t row_tasks = (params.rows_count + kTaskRows - 1) / kTaskRows;
  const size_t task_panels = params.rows_count == 1 ? kTaskPanelsOfOneRow : 1;
  const size_t panel_tasks = (w.panels_count() + task_panels - 1) / task_panels;
  pool->ParallelFor(row_tasks * panel_tasks, [&](size_t task) {
    const size_t row = task / panel_tasks * kTaskRows;
    const size_t rows = std::min(kTaskRows, params.rows_count - row);
    const size_t first = task % panel_tasks * task_panels;
    for (size_t panel = first; panel < std::min(first + task_panels, w.panels_count()); ++panel) {
      if ((panel + 1) * kPanelOutputs > w.outputs()) {
        PaddedPanel(params, row, rows, panel);
        continue;
      }
      HWY_DYNAMIC_DISPATCH(PanelKernel)
      (params.x + row * params.x_stride, params.x_stride, rows, w.panel(panel), w.inputs(),
       params.y + row * params.y_stride + panel * kPanelOutputs, params.y_stride);
    }
  });
}

void PackedMatrix::Free::operator()(float* data) const { std::free(data); }

PackedMatrix::PackedMatrix(size_t outputs, size_t inputs) : outputs_(outputs), inputs_(inputs) {
  OKV_CHECK(outputs >= 1 && inputs >= 1);
  const size_t bytes_count = panels_count() * kPanelOutputs * inputs * sizeof(float);
  const size_t aligned_bytes = (bytes_count + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, aligned_bytes)));
  OKV_CHECK(data_ != nullptr);
  std::memset(data_.get(), 0, aligned_bytes);
}

void PackedMatrix::SetRow(size_t output, absl::Span<const float> row) {
  OKV_CHECK(output < outputs_ && row.size() == inputs_);
  float* column =
      data_.get() + output / kPanelOutputs * inputs_ * kPanelOutputs + output % kPanelOutputs;
  for (size_t k = 0; k < inputs_; ++k) column[k * kPanelOutputs] = row[k];
}

void PackedMatrix::CopyRow(size_t output, absl::Span<float> row) const {
  OKV_CHECK(output < outputs_ && row.size() == inputs_);
  const float* column = panel(output / kPanelOutputs) + output % kPanelOutputs;
  for (size_t k = 0; k < inputs_; ++k) row[k] = column[k * kPanelOutputs];
}

}  // namespace okv
#endif  // HWY_ONCE
