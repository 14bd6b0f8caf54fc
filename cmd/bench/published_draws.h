#ifndef OKV_CMD_BENCH_PUBLISHED_DRAWS_H_
#define OKV_CMD_BENCH_PUBLISHED_DRAWS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "cmd/bench/row_draws.h"

namespace okv {

// Files of the OSCAR project's format, version 1, which hold eigenvalues.
struct PublishedDrawsOptions {
  std::string k_file;
  std::string v_file;
  uint32_t layer = 0;  // By the model's id
};

// Rows with the second moments that the files were fitted to: queries by C_Q, values by C_S. The
// files do not know the keys' own: keys are drawn by C_Q too. kNotFound: a file. kInvalidArgument
// naming it: ParsePublished()'s errors, no such layer, no eigenvalues, more than one rotation a
// layer, or dimensions that differ.
absl::StatusOr<RowDraws> LoadPublishedDraws(const PublishedDrawsOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_PUBLISHED_DRAWS_H_
