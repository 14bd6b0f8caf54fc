#ifndef OKV_CALIB_REFINE_BATCH_H_
#define OKV_CALIB_REFINE_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "calib/history.h"
#include "calib/row_codec.h"

namespace okv {

// Rows of one head, and what they weigh. Borrowed.
struct WeightedRows {
  const RowSample* rows;      // A row at least.
  const RowWeights* weights;  // One of each kind per row.
};

// Draws rows of one head with replacement: half of them by weight, half evenly, each with what
// makes the sums over it those over all rows on average. Always in the same order.
// Thread-compatible.
class RowDeck {
 public:
  explicit RowDeck(const WeightedRows& head);
  // `x`: [count, dim]. `weights` sums to about 1, `masses` to 1.
  void Deal(size_t count, float* x, float* weights, float* masses);
  const RowWeights& row_weights() const { return weights_; }

 private:
  const RowSample& rows_;
  const RowWeights& weights_;
  std::mt19937_64 random_;
  std::vector<double> chances_;  // Cumulative.
};

// RowWeights' error of one batch of rows of one head in the codec at a rotation R, and its gradient
// by R: with e a row's error in the rotated basis, w and a its weight and mass, W and M the two
// metrics in that basis,
//   sum_t w_t (e_t - m)^T diag(W) (e_t - m)
//     + f (m^T M m - sum_t a_t^2 e_t^T diag(M) e_t) / (1 - s),  m = sum_t a_t e_t, s = sum_t a_t^2.
// - Of W the diagonal counts: errors of different channels are nearly independent, and where a row
//   crosses from one code to the next only products across channels jump on average.
// - Rows' own squares leave m's: otherwise a batch would overrate the mean of its errors by a row's
//   variance over the batch's size.
// - The squares' gradient is that at fixed codes: a square does not jump where a code changes. The
//   mean's is that of the ends alone: between them codes follow a row on average, and an error's
//   mean moves only with what is clipped.
// In fp32 and without the rounding of scales. Thread-compatible.
class HeadBatch {
 public:
  HeadBatch(uint32_t dim, size_t rows_count, uint32_t group_size);

  void Draw(RowDeck* deck);
  // The batch's loss at `rotation`, [dim, dim]; AddGradient is about the last one asked for.
  // Infinite or NaN where rows are too large.
  double Loss(const std::vector<float>& rotation, uint32_t clip_rank);
  // Adds scale times the loss' gradient by the rotation to `sum`. Once after each Loss.
  void AddGradient(double scale, std::vector<float>* sum);

 private:
  // Where one end of a group comes from: y[channel] * sign.
  struct End {
    float value;
    uint32_t channel;
    float sign;
  };
  // One row through the codec.
  struct CodedRow {
    std::vector<float> codes;  // Over 3: an element is lo + (hi - lo) * code.
    std::vector<End> low;      // One per group.
    std::vector<End> high;
  };
  void Code(const float* y, uint32_t clip_rank, CodedRow* coded, float* errors);
  // d loss / d y of one row in place of y, from d loss / d error of the squares and of the mean.
  void Back(const CodedRow& coded, const float* by_square, const float* by_mean, float* y);
  // The metrics in the rotated basis.
  void RotateMetrics();

  const uint32_t dim_;
  const size_t rows_count_;
  const uint32_t group_size_;
  const RowWeights* head_ = nullptr;
  std::vector<float> rotation_;  // [dim, dim]
  std::vector<float> x_;         // [rows_count, dim]
  std::vector<float> y_;         // The same, rotated; then the gradient by it.
  std::vector<float> errors_;    // The same.
  std::vector<float> weights_;
  std::vector<float> masses_;
  std::vector<float> magnitudes_;
  std::vector<CodedRow> coded_;
  std::vector<float> by_ends_;        // Of one row's groups: d loss / d low, d loss / d high.
  double own_ = 0;                    // 1: rows' own squares are taken off m's; 0: they are not.
  double unbiased_ = 1;               // 1 / (1 - s) where they are.
  std::vector<double> mean_;          // Of the errors, by mass.
  std::vector<double> weighted_;      // Their sum by weight.
  std::vector<double> squares_;       // sum_t w_t (e_t - m)^2, by channel.
  std::vector<double> mass_squares_;  // sum_t a_t^2 e_t^2, by channel.
  double weights_sum_ = 0;
  std::vector<float> metric_of_basis_;  // W R, [dim, dim]; empty without.
  std::vector<float> mean_of_basis_;    // M R before R^T, the same.
  std::vector<double> diagonal_;        // Of R^T W R.
  std::vector<double> mean_diagonal_;   // Of R^T M R.
  std::vector<double> pulled_mean_;     // R^T M R m
};

}  // namespace okv

#endif  // OKV_CALIB_REFINE_BATCH_H_
