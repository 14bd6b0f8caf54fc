#ifndef OKV_TESTS_CALIB_TEST_DATA_H_
#define OKV_TESTS_CALIB_TEST_DATA_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "calib/dump.h"
#include "calib/fit.h"
#include "calib/linalg.h"
#include "calib/row_codec.h"

namespace okv {

// A directory of its own, removed with what is in it.
class TempDirectory {
 public:
  TempDirectory();
  ~TempDirectory();
  std::string Path(absl::string_view name) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, absl::string_view bytes);
std::vector<std::string> ListDirectory(const std::string& path);

struct SyntheticShape {
  std::vector<uint32_t> sequence_lengths = {100, 60};
  uint32_t query_heads = 4;
  uint32_t kv_heads = 2;
  uint32_t head_dim = 64;
  uint32_t layer_id = 0;
};

// A layer with the structure that matters: queries, keys and values mostly in a few random
// directions, queries and keys in the same ones, keys with a few channels of large offset besides.
// Deterministic in `seed`; every number is a bf16.
LayerDump SyntheticLayer(const SyntheticShape& shape, uint32_t seed);

// Unit Gaussian rows around `mean` in each of the first `channels` channels.
RowSample GaussianRows(uint32_t dim, uint32_t rows_count, float mean, uint32_t channels,
                       uint32_t seed);
// Unit Gaussian rows with large parts along `directions` random directions, the same for
// all seeds below 50, others for the next 50.
RowSample SpikedRows(uint32_t dim, uint32_t rows_count, uint32_t directions, uint32_t seed);

// The options with descents of few steps: for tests of what is around them.
FitOptions Quick(FitOptions options = {});

// max |R R^T - I|.
double OrthogonalityErrorOf(const Matrix& rotation, uint32_t dim);

// Metadata of a good layer file; tests change an entry to make it bad.
std::map<std::string, std::string> LayerMetadata(uint32_t layer_id, absl::string_view layer_ids);

struct RawTensor {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  std::string bytes;
};
// q, k, v as F32 and seq_lens as I64: what a Python dump would look like.
std::vector<RawTensor> RawTensors(const LayerDump& layer);
// A safetensors file from scratch, whatever it is told to hold.
std::string RawSafetensors(const std::map<std::string, std::string>& metadata,
                           const std::vector<RawTensor>& tensors);

// A dump of SyntheticLayers, by DumpWriter.
void WriteDump(const std::string& directory, const std::vector<uint32_t>& layer_ids,
               const SyntheticShape& shape, uint32_t seed);

}  // namespace okv

#endif  // OKV_TESTS_CALIB_TEST_DATA_H_
