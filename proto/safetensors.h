#ifndef OKV_PROTO_SAFETENSORS_H_
#define OKV_PROTO_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// A safetensors file in memory: u64 LE header length, a JSON header (name -> dtype, shape,
// data_offsets; "__metadata__" -> strings), the tensors' bytes. Tensors are views into the bytes
// that Parse was given, which must outlive it; they are aligned no better than the file makes them.
// A plain value. Thread-compatible.
class Safetensors {
 public:
  struct Tensor {
    std::string dtype;  // "BF16", "F16", "F32", "F64", "U8", "I8", "U32", "I32", "U64", "I64"
    std::vector<uint64_t> shape;
    absl::string_view data;

    bool operator==(const Tensor&) const = default;
  };

  // Strict: offsets must cover the data exactly, without holes or overlaps, and no name may stand
  // twice. kDataLoss when the bytes end before what the header describes; kInvalidArgument for
  // anything else that is not safetensors.
  static absl::StatusOr<Safetensors> Parse(absl::string_view bytes);

  // Null when there is no such tensor.
  const Tensor* Find(absl::string_view name) const;
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// One file of `tensors` and `metadata`: the same content gives the same bytes (names sorted, header
// padded with blanks to 8 bytes). Metadata that is not UTF-8 is written with U+FFFD in the place of
// what is not. REQUIRES: each data size fits its dtype and shape; the names of tensors and
// metadata are UTF-8, no tensor's is "__metadata__".
std::string WriteSafetensors(const std::map<std::string, Safetensors::Tensor>& tensors,
                             const std::map<std::string, std::string>& metadata);

}  // namespace okv

#endif  // OKV_PROTO_SAFETENSORS_H_
