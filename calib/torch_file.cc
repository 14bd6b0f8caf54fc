#include "calib/torch_file.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "calib/quoted.h"
#include "proto/bf16.h"
#include "proto/fields.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kPickleName = "data.pkl";

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("not a PyTorch file: ", why));
}

template <typename T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Calls `take(address of element)` for the tensor's elements in row-major order. `storage` covers
// the whole storage, as CheckStorage has found.
template <typename Take>
void ForEachElement(const TorchTensor& tensor, absl::string_view storage, const Take& take) {
  const size_t width = TorchTypeBytes(tensor.type);
  const size_t dims = tensor.sizes.size();
  std::vector<uint64_t> at(dims, 0);
  uint64_t element = tensor.offset;
  for (uint64_t left = tensor.elements(); left > 0; --left) {
    take(storage.data() + element * width);
    for (size_t d = dims; d-- > 0;) {
      element += tensor.strides[d];
      if (++at[d] < tensor.sizes[d]) break;
      element -= tensor.sizes[d] * tensor.strides[d];
      at[d] = 0;
    }
  }
}

}  // namespace

float HalfToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent > 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
  return sign != 0 ? -magnitude : magnitude;
}

std::string TorchTensorText(const TorchTensor& tensor) {
  return absl::StrCat(TorchTypeName(tensor.type), " [", absl::StrJoin(tensor.sizes, ", "), "]");
}

absl::StatusOr<TorchFile> TorchFile::Open(absl::string_view bytes) {
  // A pickle in the place of a ZIP file: what PyTorch wrote before 1.6.
  if (absl::StartsWith(bytes, absl::string_view("\x80\x02\x8a\x0a", 4))) {
    return Bad("it has the format of before PyTorch 1.6; load and save it again");
  }
  OKV_ASSIGN_OR_RETURN(ZipReader zip, ZipReader::Open(bytes));
  const absl::string_view first = zip.first_name();
  const std::string folder(first.substr(0, first.find('/') + 1));  // npos + 1 is 0.
  const std::string pickle_name = absl::StrCat(folder, kPickleName);
  if (folder.empty() || !zip.Contains(pickle_name)) return Bad("it has no FOLDER/data.pkl");
  OKV_ASSIGN_OR_RETURN(const uint64_t pickle_bytes, zip.Size(pickle_name));
  if (pickle_bytes > kPickleBytesMax) {
    return Bad(absl::StrCat("data.pkl has ", pickle_bytes, " bytes, at most ", kPickleBytesMax));
  }
  const std::string order_name = absl::StrCat(folder, "byteorder");
  if (zip.Contains(order_name)) {  // Older versions do not say; they were little-endian.
    OKV_ASSIGN_OR_RETURN(const absl::string_view order, zip.Read(order_name));
    if (order != "little") return Bad("its byteorder is not little");
  }
  OKV_ASSIGN_OR_RETURN(const absl::string_view data, zip.Read(pickle_name));
  OKV_ASSIGN_OR_RETURN(Pickle pickle, Pickle::Parse(data));
  return TorchFile(std::move(zip), std::move(pickle), folder);
}

std::string TorchFile::EntryName(const TorchTensor& tensor) const {
  return absl::StrCat(folder_, "data/", tensor.storage);
}

absl::Status TorchFile::CheckStorage(const TorchTensor& tensor) const {
  OKV_ASSIGN_OR_RETURN(const uint64_t bytes, zip_.Size(EntryName(tensor)));
  const uint64_t width = TorchTypeBytes(tensor.type);
  if (bytes % width == 0 && bytes / width == tensor.storage_elements) return absl::OkStatus();
  return Bad(absl::StrCat("storage ", Quoted(tensor.storage), " has ", bytes, " bytes for ",
                          tensor.storage_elements, " elements of type ",
                          TorchTypeName(tensor.type)));
}

absl::StatusOr<absl::string_view> TorchFile::ReadStorage(const TorchTensor& tensor) const {
  OKV_RETURN_IF_ERROR(CheckStorage(tensor));
  const std::string name = EntryName(tensor);
  if (const auto found = storages_.find(name); found != storages_.end()) return found->second;
  OKV_ASSIGN_OR_RETURN(const absl::string_view data, zip_.Read(name));
  return storages_.emplace(name, data).first->second;
}

absl::StatusOr<std::vector<float>> TorchFile::ReadFloats(const TorchTensor& tensor) const {
  OKV_ASSIGN_OR_RETURN(const absl::string_view storage, ReadStorage(tensor));
  std::vector<float> floats;
  floats.reserve(tensor.elements());
  switch (tensor.type) {
    case TorchType::kFloat:
      ForEachElement(tensor, storage, [&](const char* at) { floats.push_back(Load<float>(at)); });
      break;
    case TorchType::kBFloat16:
      ForEachElement(tensor, storage,
                     [&](const char* at) { floats.push_back(Bf16ToFloat(Load<uint16_t>(at))); });
      break;
    case TorchType::kHalf:
      ForEachElement(tensor, storage,
                     [&](const char* at) { floats.push_back(HalfToFloat(Load<uint16_t>(at))); });
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("a tensor is ", TorchTensorText(tensor),
                                                     ", not of Float, BFloat16 or Half"));
  }
  return floats;
}

absl::StatusOr<std::vector<int64_t>> TorchFile::ReadIntegers(const TorchTensor& tensor) const {
  OKV_ASSIGN_OR_RETURN(const absl::string_view storage, ReadStorage(tensor));
  std::vector<int64_t> integers;
  integers.reserve(tensor.elements());
  switch (tensor.type) {
    case TorchType::kLong:
      ForEachElement(tensor, storage,
                     [&](const char* at) { integers.push_back(Load<int64_t>(at)); });
      break;
    case TorchType::kInt:
      ForEachElement(tensor, storage,
                     [&](const char* at) { integers.push_back(Load<int32_t>(at)); });
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("a tensor is ", TorchTensorText(tensor), ", not of Long or Int"));
  }
  return integers;
}

TorchFileWriter::TorchFileWriter(absl::string_view folder)
    : folder_(absl::StrCat(folder, "/")), pickle_("\x80\x02", 2) {}

void TorchFileWriter::Memoize() {
  if (memo_count_ < 256) {
    pickle_ += 'q';
    pickle_ += static_cast<char>(memo_count_);
  } else {
    pickle_ += 'r';
    AppendU32(&pickle_, memo_count_);
  }
  ++memo_count_;
}

void TorchFileWriter::Remembered(uint32_t slot) {
  if (slot < 256) {
    pickle_ += 'h';
    pickle_ += static_cast<char>(slot);
  } else {
    pickle_ += 'j';
    AppendU32(&pickle_, slot);
  }
}

void TorchFileWriter::BeginDict(size_t entries_count) {
  pickle_ += '}';
  Memoize();
  if (entries_count > 1) pickle_ += '(';
}

void TorchFileWriter::EndDict(size_t entries_count) {
  if (entries_count > 0) pickle_ += entries_count == 1 ? 's' : 'u';
}

void TorchFileWriter::FreshText(absl::string_view text) {
  pickle_ += 'X';
  AppendU32(&pickle_, static_cast<uint32_t>(text.size()));
  absl::StrAppend(&pickle_, text);
  Memoize();
}

void TorchFileWriter::Text(absl::string_view text) {
  const auto [slot, is_new] = texts_.emplace(std::string(text), memo_count_);
  if (is_new) {
    FreshText(text);
  } else {
    Remembered(slot->second);
  }
}

void TorchFileWriter::Integer(int64_t value) {
  const uint64_t bits = static_cast<uint64_t>(value);
  if (value >= 0 && value < 256) {
    pickle_ += 'K';
    pickle_ += static_cast<char>(value);
  } else if (value >= 0 && value < 65'536) {
    pickle_ += 'M';
    pickle_ += static_cast<char>(bits);
    pickle_ += static_cast<char>(bits >> 8);
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    pickle_ += 'J';
    AppendU32(&pickle_, static_cast<uint32_t>(bits));
  } else {
    pickle_ += "\x8a\x08";
    AppendU64(&pickle_, bits);
  }
}

void TorchFileWriter::Global(absl::string_view module, absl::string_view name) {
  const auto [slot, is_new] = globals_.emplace(absl::StrCat(module, " ", name), memo_count_);
  if (is_new) {
    absl::StrAppend(&pickle_, "c", module, "\n", name, "\n");
    Memoize();
  } else {
    Remembered(slot->second);
  }
}

void TorchFileWriter::Sizes(const std::vector<uint64_t>& sizes) {
  if (sizes.empty()) {
    pickle_ += ')';
    return;
  }
  if (sizes.size() > 3) pickle_ += '(';
  for (const uint64_t size : sizes) Integer(static_cast<int64_t>(size));
  pickle_ += sizes.size() > 3 ? 't' : static_cast<char>(0x84 + sizes.size());  // TUPLE1 to TUPLE3
  Memoize();
}

void TorchFileWriter::Tensor(TorchType type, const std::vector<uint64_t>& sizes,
                             absl::string_view data) {
  const uint64_t elements = data.size() / TorchTypeBytes(type);
  std::vector<uint64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];

  Global("torch._utils", "_rebuild_tensor_v2");
  pickle_ += "((";
  Text("storage");
  Global("torch", absl::StrCat(TorchTypeName(type), "Storage"));
  FreshText(absl::StrCat(storages_.size()));
  Text("cpu");
  Integer(static_cast<int64_t>(elements));
  pickle_ += 't';
  Memoize();
  pickle_ += 'Q';
  Integer(0);
  Sizes(sizes);
  Sizes(strides);
  pickle_ += '\x89';  // requires_grad: false
  Global("collections", "OrderedDict");
  pickle_ += ")R";
  Memoize();
  pickle_ += 't';
  Memoize();
  pickle_ += 'R';
  Memoize();
  storages_.emplace_back(data);
}

absl::StatusOr<std::string> TorchFileWriter::Finish() {
  ZipWriter zip;
  zip.Add(absl::StrCat(folder_, kPickleName), pickle_ + ".");
  zip.Add(absl::StrCat(folder_, "byteorder"), "little");
  for (size_t i = 0; i < storages_.size(); ++i) {
    zip.Add(absl::StrCat(folder_, "data/", i), storages_[i]);
  }
  zip.Add(absl::StrCat(folder_, "version"), "3\n");
  return zip.Finish();
}

}  // namespace okv
