#ifndef OKV_CALIB_NPY_H_
#define OKV_CALIB_NPY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// An array of numpy.save, in memory. Its data is a view into the bytes that Parse was given, which
// must outlive it. A plain value.
struct NpyArray {
  std::string type;  // As the file spells it: "<f4".
  std::vector<uint64_t> shape;
  absl::string_view data;  // Row-major.

  // Versions 1 to 3, row-major, of little-endian float32 (<f4), float16 (<f2), bfloat16 (V2, as
  // ml_dtypes saves it), int32 (<i4), uint32 (<u4) and int64 (<i8). kDataLoss: the bytes end before
  // the array does. kInvalidArgument: not such a file, another type, column-major, or bytes behind
  // the array.
  static absl::StatusOr<NpyArray> Parse(absl::string_view bytes);

  bool HasFloats() const;
  // The numbers, widened exactly. kInvalidArgument naming the type when it is not one of these.
  absl::StatusOr<std::vector<float>> ReadFloats() const;
  absl::StatusOr<std::vector<int64_t>> ReadIntegers() const;
};

}  // namespace okv

#endif  // OKV_CALIB_NPY_H_
