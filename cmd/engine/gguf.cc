#include "cmd/engine/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/status_macros.h"

namespace okv {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place");

namespace {

constexpr absl::string_view kMagic = "GGUF";
constexpr uint32_t kVersion = 3;
constexpr uint64_t kAlignmentDefault = 32;
constexpr uint64_t kAlignmentMax = 1 << 20;
constexpr int kArrayDepthMax = 4;
constexpr uint32_t kDimsMax = 4;
constexpr uint64_t kDimMax = 1 << 24;
// Bounds what a damaged count makes us reserve or loop over before the bytes run out.
constexpr uint64_t kEntriesMax = 1 << 20;

// Bytes of a scalar; 0 for strings, arrays and unknown types.
uint64_t ScalarBytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  return 0;
}

// Elements and bytes of the unit that a tensor type is stored in; {0, 0} for types we cannot read.
struct Unit {
  uint64_t elements;
  uint64_t bytes;
};
Unit UnitOf(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return {1, 4};
    case TensorType::kF16:
      return {1, 2};
    case TensorType::kQ4_1:
      return {32, 20};  // fp16 scale, fp16 minimum, 32 four-bit codes
    case TensorType::kQ8_0:
      return {32, 34};  // fp16 scale, 32 int8
  }
  return {0, 0};
}

template <typename T>
T Load(absl::string_view raw) {
  T value;
  std::memcpy(&value, raw.data(), sizeof(value));
  return value;
}

// A name as it may be shown: damaged files hold anything.
std::string Shown(absl::string_view name) {
  return absl::StrCat("'", absl::CHexEscape(name.substr(0, 64)), "'");
}

}  // namespace

// Reads forward through the file. Thread-compatible.
class GgufCursor {
 public:
  GgufCursor(absl::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  size_t offset() const { return offset_; }
  // What is being read, for messages.
  void set_what(std::string what) { what_ = std::move(what); }

  absl::StatusOr<absl::string_view> Take(uint64_t bytes_count) {
    if (bytes_count > bytes_.size() - offset_) return TooShort(bytes_count, 1);
    const absl::string_view taken = bytes_.substr(offset_, bytes_count);
    offset_ += bytes_count;
    return taken;
  }

  template <typename T>
  absl::StatusOr<T> Number() {
    OKV_ASSIGN_OR_RETURN(const absl::string_view raw, Take(sizeof(T)));
    return Load<T>(raw);
  }

  absl::StatusOr<absl::string_view> String() {
    OKV_ASSIGN_OR_RETURN(const uint64_t bytes_count, Number<uint64_t>());
    return Take(bytes_count);
  }

  // The value that follows, of `type`.
  absl::StatusOr<GgufValue> Value(GgufType type, int depth) {
    GgufValue value;
    value.type = type;
    value.element_type = type;
    if (const uint64_t bytes_count = ScalarBytes(type); bytes_count > 0) {
      OKV_ASSIGN_OR_RETURN(value.raw, Take(bytes_count));
      return value;
    }
    if (type == GgufType::kString) {
      OKV_ASSIGN_OR_RETURN(value.raw, String());
      return value;
    }
    if (type != GgufType::kArray) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", path_, "': ", what_, " has the unknown type ", static_cast<uint32_t>(type)));
    }
    OKV_ASSIGN_OR_RETURN(const uint32_t element_type, Number<uint32_t>());
    OKV_ASSIGN_OR_RETURN(value.count, Number<uint64_t>());
    value.element_type = static_cast<GgufType>(element_type);
    OKV_RETURN_IF_ERROR(Array(depth, &value));
    return value;
  }

 private:
  absl::Status TooShort(uint64_t count, uint64_t element_bytes) const {
    return absl::DataLossError(absl::StrCat(
        "'", path_, "' is truncated or damaged: ", what_, " at byte ", offset_, " needs ", count,
        " x ", element_bytes, " bytes, ", bytes_.size() - offset_, " are left"));
  }

  absl::Status Array(int depth, GgufValue* value) {
    if (const uint64_t element_bytes = ScalarBytes(value->element_type); element_bytes > 0) {
      if (value->count > bytes_.size() / element_bytes) {
        return TooShort(value->count, element_bytes);
      }
      OKV_ASSIGN_OR_RETURN(value->raw, Take(value->count * element_bytes));
      return absl::OkStatus();
    }
    // An element takes four bytes at least, whatever its type: a count that cannot fit is not
    // tried.
    if (value->count > bytes_.size() / 4) return TooShort(value->count, 4);
    if (depth == kArrayDepthMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", path_, "': ", what_, " nests arrays more than ", kArrayDepthMax, " deep"));
    }
    for (uint64_t i = 0; i < value->count; ++i) {
      // The elements of nested arrays are checked and dropped: nothing here reads them.
      OKV_ASSIGN_OR_RETURN(const GgufValue element, Value(value->element_type, depth + 1));
      if (value->element_type == GgufType::kString) value->strings.push_back(element.raw);
    }
    return absl::OkStatus();
  }

  const absl::string_view bytes_;
  const std::string& path_;
  size_t offset_ = 0;
  std::string what_ = "the header";
};

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  std::unique_ptr<GgufFile> file(new GgufFile(path));
  OKV_RETURN_IF_ERROR(file->Map());
  OKV_RETURN_IF_ERROR(file->Parse());
  return file;
}

GgufFile::~GgufFile() {
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

absl::Status GgufFile::Error(absl::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat("'", path_, "': ", what));
}

absl::Status GgufFile::Map() {
  const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open '", path_, "'"));
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return Error("not a GGUF file (not a regular file)");
  }
  const size_t bytes_count = static_cast<size_t>(info.st_size);
  void* mapping =
      bytes_count == 0 ? nullptr : mmap(nullptr, bytes_count, PROT_READ, MAP_PRIVATE, fd, 0);
  const int map_errno = errno;
  close(fd);
  if (mapping == MAP_FAILED) {
    return absl::ErrnoToStatus(map_errno, absl::StrCat("cannot map '", path_, "'"));
  }
  bytes_ = absl::string_view(static_cast<const char*>(mapping), bytes_count);
  return absl::OkStatus();
}

absl::Status GgufFile::Parse() {
  const absl::string_view magic = bytes_.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) return Error("not a GGUF file (foreign magic)");
  GgufCursor cursor(bytes_, path_);
  OKV_RETURN_IF_ERROR(cursor.Take(kMagic.size()).status());
  OKV_ASSIGN_OR_RETURN(const uint32_t version, cursor.Number<uint32_t>());
  if (version != kVersion) {
    return Error(absl::StrCat("GGUF version ", version, ", only ", kVersion, " is read"));
  }
  OKV_ASSIGN_OR_RETURN(const uint64_t tensors_count, cursor.Number<uint64_t>());
  OKV_ASSIGN_OR_RETURN(const uint64_t values_count, cursor.Number<uint64_t>());
  if (tensors_count > kEntriesMax || values_count > kEntriesMax) {
    return Error(absl::StrCat("announces ", tensors_count, " tensors and ", values_count,
                              " metadata values, more than ", kEntriesMax));
  }
  for (uint64_t i = 0; i < values_count; ++i) {
    cursor.set_what(absl::StrCat("metadata key ", i));
    OKV_ASSIGN_OR_RETURN(const absl::string_view key, cursor.String());
    cursor.set_what(absl::StrCat("metadata ", Shown(key)));
    OKV_ASSIGN_OR_RETURN(const uint32_t type, cursor.Number<uint32_t>());
    OKV_ASSIGN_OR_RETURN(GgufValue value, cursor.Value(static_cast<GgufType>(type), 0));
    if (!values_.emplace(std::string(key), std::move(value)).second) {
      return Error(absl::StrCat("metadata ", Shown(key), " is there twice"));
    }
  }
  return ParseTensors(&cursor, tensors_count);
}

absl::Status GgufFile::ParseTensors(GgufCursor* cursor, uint64_t tensors_count) {
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < tensors_count; ++i) {
    cursor->set_what(absl::StrCat("the description of tensor ", i));
    OKV_ASSIGN_OR_RETURN(GgufTensor tensor, DescribeTensor(cursor));
    OKV_ASSIGN_OR_RETURN(const uint64_t offset, cursor->Number<uint64_t>());
    offsets.push_back(offset);
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
      return Error(absl::StrCat("tensor ", Shown(tensor.name), " is there twice"));
    }
    tensors_.push_back(std::move(tensor));
  }
  return PlaceTensors(cursor->offset(), offsets);
}

absl::StatusOr<GgufTensor> GgufFile::DescribeTensor(GgufCursor* cursor) const {
  GgufTensor tensor;
  OKV_ASSIGN_OR_RETURN(const absl::string_view name, cursor->String());
  tensor.name = std::string(name);
  OKV_ASSIGN_OR_RETURN(const uint32_t dims_count, cursor->Number<uint32_t>());
  if (dims_count < 1 || dims_count > kDimsMax) {
    return Error(absl::StrCat("tensor ", Shown(name), " has ", dims_count, " dimensions"));
  }
  tensor.rows = 1;
  for (uint32_t dim = 0; dim < dims_count; ++dim) {
    OKV_ASSIGN_OR_RETURN(const uint64_t size, cursor->Number<uint64_t>());
    // Neither this product nor one of rows, columns and bytes below can overflow.
    if (size == 0 || size > kDimMax || (dim > 0 && tensor.rows * size > kDimMax)) {
      return Error(absl::StrCat("tensor ", Shown(name), " has an impossible size ", size));
    }
    if (dim == 0) {
      tensor.columns = size;
    } else {
      tensor.rows *= size;
    }
  }
  OKV_ASSIGN_OR_RETURN(const uint32_t type, cursor->Number<uint32_t>());
  tensor.type = static_cast<TensorType>(type);
  const Unit unit = UnitOf(tensor.type);
  if (unit.bytes == 0) {
    return Error(absl::StrCat("tensor ", Shown(name), " has type ", type,
                              "; F32, F16, Q4_1 and Q8_0 are read"));
  }
  if (tensor.columns % unit.elements != 0) {
    return Error(absl::StrCat("tensor ", Shown(name), " has rows of ", tensor.columns,
                              ", no multiple of ", unit.elements));
  }
  return tensor;
}

absl::Status GgufFile::PlaceTensors(uint64_t header_bytes, const std::vector<uint64_t>& offsets) {
  uint64_t alignment = kAlignmentDefault;
  if (Has("general.alignment")) {
    OKV_ASSIGN_OR_RETURN(alignment, Uint("general.alignment"));
    if (!std::has_single_bit(alignment) || alignment > kAlignmentMax) {
      return Error(absl::StrCat("general.alignment is ", alignment, ", no power of two up to ",
                                kAlignmentMax));
    }
  }
  const uint64_t data_start = (header_bytes + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    GgufTensor& tensor = tensors_[i];
    const Unit unit = UnitOf(tensor.type);
    const uint64_t bytes_count = tensor.rows * (tensor.columns / unit.elements) * unit.bytes;
    if (offsets[i] % alignment != 0) {
      return Error(absl::StrCat("tensor ", Shown(tensor.name), " starts at ", offsets[i],
                                ", no multiple of ", alignment));
    }
    if (data_start > bytes_.size() || offsets[i] > bytes_.size() - data_start ||
        bytes_count > bytes_.size() - data_start - offsets[i]) {
      return absl::DataLossError(
          absl::StrCat("'", path_, "' is truncated or damaged: tensor ", Shown(tensor.name),
                       " needs ", bytes_count, " bytes from byte ", offsets[i],
                       " of the data, the file has ", bytes_.size(), " in all"));
    }
    tensor.data = bytes_.substr(data_start + offsets[i], bytes_count);
  }
  return absl::OkStatus();
}

absl::StatusOr<const GgufValue*> GgufFile::Value(absl::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return Error(absl::StrCat("metadata '", key, "' is missing"));
  return &found->second;
}

absl::StatusOr<uint64_t> GgufFile::Uint(absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  int64_t number = -1;
  switch (value->type) {
    case GgufType::kUint8:
      return Load<uint8_t>(value->raw);
    case GgufType::kUint16:
      return Load<uint16_t>(value->raw);
    case GgufType::kUint32:
      return Load<uint32_t>(value->raw);
    case GgufType::kUint64:
      return Load<uint64_t>(value->raw);
    case GgufType::kInt8:
      number = Load<int8_t>(value->raw);
      break;
    case GgufType::kInt16:
      number = Load<int16_t>(value->raw);
      break;
    case GgufType::kInt32:
      number = Load<int32_t>(value->raw);
      break;
    case GgufType::kInt64:
      number = Load<int64_t>(value->raw);
      break;
    default:
      break;
  }
  if (number < 0) return Error(absl::StrCat("metadata '", key, "' is no unsigned integer"));
  return static_cast<uint64_t>(number);
}

absl::StatusOr<double> GgufFile::Float(absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  if (value->type == GgufType::kFloat32) return double{Load<float>(value->raw)};
  if (value->type == GgufType::kFloat64) return Load<double>(value->raw);
  return Error(absl::StrCat("metadata '", key, "' is no floating-point number"));
}

absl::StatusOr<bool> GgufFile::Bool(absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  if (value->type == GgufType::kBool) return value->raw[0] != 0;
  return Error(absl::StrCat("metadata '", key, "' is no boolean"));
}

absl::StatusOr<std::string> GgufFile::String(absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  if (value->type == GgufType::kString) return std::string(value->raw);
  return Error(absl::StrCat("metadata '", key, "' is no string"));
}

absl::StatusOr<const std::vector<absl::string_view>*> GgufFile::Strings(
    absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  if (value->type == GgufType::kArray && value->element_type == GgufType::kString) {
    return &value->strings;
  }
  return Error(absl::StrCat("metadata '", key, "' is no array of strings"));
}

absl::StatusOr<std::vector<int32_t>> GgufFile::Ints(absl::string_view key) const {
  OKV_ASSIGN_OR_RETURN(const GgufValue* value, Value(key));
  if (value->type != GgufType::kArray ||
      (value->element_type != GgufType::kInt32 && value->element_type != GgufType::kUint32)) {
    return Error(absl::StrCat("metadata '", key, "' is no array of 32-bit integers"));
  }
  std::vector<int32_t> numbers(value->count);
  if (value->count > 0) std::memcpy(numbers.data(), value->raw.data(), value->raw.size());
  return numbers;
}

absl::StatusOr<const GgufTensor*> GgufFile::Tensor(absl::string_view name) const {
  const auto found = tensor_index_.find(name);
  if (found == tensor_index_.end()) return Error(absl::StrCat("tensor '", name, "' is missing"));
  return &tensors_[found->second];
}

}  // namespace okv
