#ifndef OKV_CALIB_DUMP_LAYER_H_
#define OKV_CALIB_DUMP_LAYER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "calib/dump.h"
#include "kernels/thread_pool.h"
#include "proto/format.h"

namespace okv {

// How the files of a dump lie in its directory (dump.h).
enum class DumpLayout { kSafetensors, kTorch, kNumpy };

inline constexpr uint32_t kQueryHeadsMax = 16 * kKvHeadsMax;  // GQA 1 to 16.
inline constexpr std::array<const char*, 3> kDumpTensors = {"q", "k", "v"};

// What a directory holds.
struct DumpListing {
  DumpLayout layout;
  std::vector<uint32_t> layer_ids;  // Ascending.
};
// kNotFound: no directory, or no layer in it. kInvalidArgument: layers of two layouts, a layer that
// stands twice, or a name that is no layer's.
absl::StatusOr<DumpListing> ListDump(const std::string& directory);

// The path of the layer that messages name: a file, of kTorch a folder, of kNumpy that of q.
std::string LayerPath(const std::string& directory, DumpLayout layout, uint32_t layer_id);

// The same status, its message behind the path.
absl::Status InFile(const std::string& path, const absl::Status& status);

// One layer's files, all checked but for the numbers in q, k and v. Thread-compatible.
class DumpLayer {
 public:
  virtual ~DumpLayer() = default;

  // Tensor 0 (q), 1 (k) or 2 (v), [tokens, heads, head_dim] as fp32, in place of what `rows` held.
  // Errors as DumpReader::Open, should a file have changed, and kDataLoss for a checksum that does
  // not match; `rows` are then unspecified.
  virtual absl::Status Read(size_t tensor, ThreadPool* pool, std::vector<float>* rows) const = 0;

  const DumpInfo& info() const { return info_; }
  uint32_t layer_id() const { return layer_id_; }
  uint32_t tokens_count() const { return tokens_count_; }
  const std::vector<uint32_t>& sequence_lengths() const { return sequence_lengths_; }

 protected:
  using Shape = std::vector<uint64_t>;
  // Sets tokens, heads and head_dim from the shapes of q, k, v. kInvalidArgument: they do not fit
  // together, or are beyond the limits.
  absl::Status TakeShapes(const std::array<Shape, 3>& shapes);
  // Appends lengths that must sum to `tokens_count`. kInvalidArgument naming what is wrong.
  absl::Status TakeLengths(const std::vector<int64_t>& lengths, uint64_t tokens_count);

  DumpInfo info_;
  uint32_t layer_id_ = 0;
  uint32_t tokens_count_ = 0;
  std::vector<uint32_t> sequence_lengths_;
};

// Calls `visit(begin, end)` for each piece of [0, count), on the pool's threads.
void ForEachPiece(size_t count, ThreadPool* pool, absl::FunctionRef<void(size_t, size_t)> visit);

// Checks that a tensor of rows has three dimensions. kInvalidArgument naming the tensor.
absl::Status CheckRowShape(absl::string_view name, const std::vector<uint64_t>& shape);

// What a layer is opened from.
struct DumpLayerSource {
  std::string directory;
  DumpListing listing;
  DumpNames names;  // For the layouts that do not say them.
};

// Each opens one layer of its layout. Errors as DumpReader::Open, naming the file.
absl::StatusOr<std::unique_ptr<DumpLayer>> OpenSafetensorsLayer(const DumpLayerSource& source,
                                                                uint32_t layer_id);
absl::StatusOr<std::unique_ptr<DumpLayer>> OpenTorchLayer(const DumpLayerSource& source,
                                                          uint32_t layer_id);
absl::StatusOr<std::unique_ptr<DumpLayer>> OpenNumpyLayer(const DumpLayerSource& source,
                                                          uint32_t layer_id);

}  // namespace okv

#endif  // OKV_CALIB_DUMP_LAYER_H_
