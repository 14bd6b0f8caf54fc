#include "calib/npy.h"

#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "calib/quoted.h"
#include "calib/torch_file.h"
#include "proto/bf16.h"
#include "proto/fields.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kDimensionsMax = 8;

struct Type {
  absl::string_view name;
  size_t bytes;
};
constexpr Type kTypes[] = {{"<f4", 4}, {"<f2", 2}, {"|V2", 2}, {"<V2", 2},
                           {"<i4", 4}, {"<u4", 4}, {"<i8", 8}};

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("not a .npy file that is read: ", why));
}

// What stands behind 'key': in the header, from there on. The header is Python's text of a dict
// whose three keys numpy fixes.
absl::StatusOr<absl::string_view> ValueOf(absl::string_view header, absl::string_view key) {
  const size_t at = header.find(absl::StrCat("'", key, "':"));
  if (at == absl::string_view::npos) return Bad(absl::StrCat("its header has no ", key));
  return absl::StripLeadingAsciiWhitespace(header.substr(at + key.size() + 3));
}

absl::StatusOr<std::vector<uint64_t>> ReadShape(absl::string_view text) {
  const size_t end = text.find(')');
  if (!absl::StartsWith(text, "(") || end == absl::string_view::npos) return Bad("its shape");
  std::vector<uint64_t> shape;
  for (absl::string_view item : absl::StrSplit(text.substr(1, end - 1), ',')) {
    item = absl::StripAsciiWhitespace(item);
    if (item.empty()) continue;  // "(3,)"
    uint64_t size = 0;
    if (!absl::SimpleAtoi(item, &size) || shape.size() == kDimensionsMax) return Bad("its shape");
    shape.push_back(size);
  }
  return shape;
}

absl::Status ReadHeader(absl::string_view header, NpyArray* array) {
  OKV_ASSIGN_OR_RETURN(absl::string_view type, ValueOf(header, "descr"));
  if (!absl::ConsumePrefix(&type, "'") || type.find('\'') == absl::string_view::npos) {
    return Bad("its type is not a plain one");
  }
  array->type = std::string(type.substr(0, type.find('\'')));
  OKV_ASSIGN_OR_RETURN(const absl::string_view order, ValueOf(header, "fortran_order"));
  if (!absl::StartsWith(order, "False")) return Bad("it is column-major");
  OKV_ASSIGN_OR_RETURN(const absl::string_view shape, ValueOf(header, "shape"));
  OKV_ASSIGN_OR_RETURN(array->shape, ReadShape(shape));
  return absl::OkStatus();
}

template <typename T, typename Out, typename Convert>
std::vector<Out> Widen(absl::string_view data, const Convert& convert) {
  std::vector<Out> values(data.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
    values[i] = convert(value);
  }
  return values;
}

}  // namespace

absl::StatusOr<NpyArray> NpyArray::Parse(absl::string_view bytes) {
  if (!absl::StartsWith(bytes, kMagic)) return Bad("it does not begin as one");
  FieldReader reader(bytes.substr(kMagic.size()));
  const uint64_t version = reader.Unsigned(1);
  reader.Unsigned(1);  // Minor.
  if (reader.ok() && (version < 1 || version > 3)) return Bad(absl::StrCat("version ", version));
  const absl::string_view header = reader.Take(reader.Unsigned(version == 1 ? 2 : 4));
  if (!reader.ok()) return absl::DataLossError("npy: it ends in its header");
  NpyArray array;
  OKV_RETURN_IF_ERROR(ReadHeader(header, &array));
  uint64_t expected_bytes = 0;
  for (const Type& type : kTypes) {
    if (type.name == array.type) expected_bytes = type.bytes;
  }
  if (expected_bytes == 0) {
    return Bad(absl::StrCat("type ", Quoted(array.type)));
  }
  for (const uint64_t size : array.shape) {
    if (__builtin_mul_overflow(expected_bytes, size, &expected_bytes)) return Bad("its shape");
  }
  array.data = reader.rest();
  if (array.data.size() < expected_bytes) {
    return absl::DataLossError(absl::StrCat("npy: it has ", array.data.size(),
                                            " bytes of numbers, ", expected_bytes, " needed"));
  }
  if (array.data.size() > expected_bytes) return Bad("bytes stand behind its array");
  return array;
}

bool NpyArray::HasFloats() const {
  return type == "<f4" || type == "<f2" || type == "|V2" || type == "<V2";
}

absl::StatusOr<std::vector<float>> NpyArray::ReadFloats() const {
  if (type == "<f4") return Widen<float, float>(data, [](float x) { return x; });
  if (type == "<f2") return Widen<uint16_t, float>(data, HalfToFloat);
  if (HasFloats()) return Widen<uint16_t, float>(data, Bf16ToFloat);
  return absl::InvalidArgumentError(absl::StrCat("type '", type,
                                                 "' is not of float32, float16 or "
                                                 "bfloat16"));
}

absl::StatusOr<std::vector<int64_t>> NpyArray::ReadIntegers() const {
  const auto widen = [](auto x) { return static_cast<int64_t>(x); };
  if (type == "<i8") return Widen<int64_t, int64_t>(data, widen);
  if (type == "<i4") return Widen<int32_t, int64_t>(data, widen);
  if (type == "<u4") return Widen<uint32_t, int64_t>(data, widen);
  return absl::InvalidArgumentError(
      absl::StrCat("type '", type, "' is not of int32, uint32 or int64"));
}

}  // namespace okv
