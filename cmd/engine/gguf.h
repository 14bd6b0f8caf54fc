#ifndef OKV_CMD_ENGINE_GGUF_H_
#define OKV_CMD_ENGINE_GGUF_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// The type of a metadata value, as the file numbers it.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// The element types that the engine reads, as the file numbers them.
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_1 = 3,
  kQ8_0 = 8,
};

// One metadata value. A plain value; views point into the file's mapping.
struct GgufValue {
  GgufType type;
  GgufType element_type;  // Of an array.
  uint64_t count = 1;     // Elements of an array.
  absl::string_view raw;  // The bytes of a scalar, a string, or an array of scalars.
  std::vector<absl::string_view> strings;  // The elements of an array of strings.
};

// One tensor. A plain value; `data` points into the file's mapping.
struct GgufTensor {
  std::string name;
  TensorType type;
  uint64_t columns = 0;    // The contiguous dimension.
  uint64_t rows = 0;       // 1 for a vector.
  absl::string_view data;  // [rows, columns], row after row
};

class GgufCursor;

// A GGUF version 3 file, mapped. Every length is checked against the file before it is used, so
// that a damaged file is an error and never a read outside the mapping. Views stay valid as long as
// the object lives and nobody truncates the file. Thread-safe after Open.
class GgufFile {
 public:
  // kNotFound: no such file. kInvalidArgument: not a GGUF file, another version, a tensor of a type
  // or shape that the engine cannot read, a thing named twice. kDataLoss: the file ends before what
  // it announces. Every message names the file and the thing.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  // The value of `key`; kInvalidArgument when it is missing or of another type. Uint takes every
  // integer type whose value fits; Float takes both widths.
  absl::StatusOr<uint64_t> Uint(absl::string_view key) const;
  absl::StatusOr<double> Float(absl::string_view key) const;
  absl::StatusOr<bool> Bool(absl::string_view key) const;
  absl::StatusOr<std::string> String(absl::string_view key) const;
  absl::StatusOr<const std::vector<absl::string_view>*> Strings(absl::string_view key) const;
  absl::StatusOr<std::vector<int32_t>> Ints(absl::string_view key) const;
  bool Has(absl::string_view key) const { return values_.contains(key); }

  // kInvalidArgument when there is no such tensor.
  absl::StatusOr<const GgufTensor*> Tensor(absl::string_view name) const;
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

  const std::string& path() const { return path_; }
  absl::string_view bytes() const { return bytes_; }  // The whole file.

 private:
  explicit GgufFile(std::string path) : path_(std::move(path)) {}
  absl::Status Map();
  absl::Status Parse();
  absl::Status ParseTensors(GgufCursor* cursor, uint64_t tensors_count);
  absl::StatusOr<GgufTensor> DescribeTensor(GgufCursor* cursor) const;
  absl::Status PlaceTensors(uint64_t header_bytes, const std::vector<uint64_t>& offsets);
  absl::Status Error(absl::string_view what) const;
  absl::StatusOr<const GgufValue*> Value(absl::string_view key) const;

  const std::string path_;
  absl::string_view bytes_;
  absl::flat_hash_map<std::string, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> tensor_index_;
};

}  // namespace okv

#endif  // OKV_CMD_ENGINE_GGUF_H_
