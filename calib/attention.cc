#include "calib/attention.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>

namespace okv {

void TiledAttention::Run(const AttentionHead& head,
                         absl::FunctionRef<void(uint32_t, uint32_t, const float*)> visit) {
  const int dim = static_cast<int>(head.head_dim);
  scores_.resize(size_t{kTileRows} * head.tokens_count);
  outputs_.resize(size_t{kTileRows} * head.head_dim);
  row_scale_.resize(kTileRows);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head.head_dim));
  for (uint32_t first = 0; first < head.tokens_count; first += kTileRows) {
    const uint32_t rows = std::min(kTileRows, head.tokens_count - first);
    const uint32_t columns = first + rows;  // Keys behind the tile's last row are never read.
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows),
                static_cast<int>(columns), dim, scale, head.q + first * head.q_stride,
                static_cast<int>(head.q_stride), head.k, static_cast<int>(head.k_stride), 0.0f,
                scores_.data(), static_cast<int>(columns));
    SoftmaxTile(first, rows, columns);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows), dim,
                static_cast<int>(columns), 1.0f, scores_.data(), static_cast<int>(columns), head.v,
                static_cast<int>(head.v_stride), 0.0f, outputs_.data(), dim);
    for (uint32_t row = 0; row < rows; ++row) {
      float* output = outputs_.data() + size_t{row} * head.head_dim;
      for (uint32_t c = 0; c < head.head_dim; ++c) output[c] *= row_scale_[row];
    }
    visit(first, rows, outputs_.data());
  }
}

void TiledAttention::SoftmaxTile(uint32_t first_row, uint32_t rows_count, uint32_t columns_count) {
  for (uint32_t row = 0; row < rows_count; ++row) {
    float* scores = scores_.data() + size_t{row} * columns_count;
    const uint32_t visible = first_row + row + 1;
    const float highest = *std::max_element(scores, scores + visible);
    double sum = 0;
    for (uint32_t column = 0; column < visible; ++column) {
      scores[column] = std::exp(scores[column] - highest);
      sum += scores[column];
    }
    std::fill(scores + visible, scores + columns_count, 0.0f);
    row_scale_[row] = static_cast<float>(1.0 / sum);  // sum >= 1: the highest score gives exp(0).
  }
}

}  // namespace okv
