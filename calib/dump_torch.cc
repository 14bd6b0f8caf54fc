// The layout of the OSCAR project's own dumps: a folder a layer, in it a folder for each of q, k, v
// and seq_lens, in it a file of torch.save for each batch of a prefill, numbered without gaps
// from 0, or from 1 where the warm-up was taken out.

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "calib/dump_layer.h"
#include "calib/files.h"
#include "calib/torch_file.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kSuffix = ".pt";
constexpr const char* kLengthsName = "seq_lens";

// A file and the tensor that is all of it.
struct TensorFile {
  MappedFile file;
  TorchFile torch;

  const TorchTensor& tensor() const { return torch.pickle().tensor(torch.pickle().root()); }
};

absl::StatusOr<TensorFile> OpenTensor(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  absl::StatusOr<TorchFile> torch = TorchFile::Open(file.bytes());
  if (!torch.ok()) return InFile(path, torch.status());
  const Pickle& pickle = torch->pickle();
  if (const Pickle::Kind kind = pickle.at(pickle.root()).kind; kind != Pickle::Kind::kTensor) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": it holds a ", KindName(kind), ", not a tensor"));
  }
  if (absl::Status status = torch->CheckStorage(pickle.tensor(pickle.root())); !status.ok()) {
    return InFile(path, status);
  }
  return TensorFile{.file = std::move(file), .torch = *std::move(torch)};
}

// The numbers of the files in a folder, ascending.
absl::StatusOr<std::vector<uint32_t>> ListNumbers(const std::string& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  std::vector<uint32_t> numbers;
  for (const std::filesystem::directory_iterator end; !error && entries != end;
       entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    absl::string_view text = name;
    if (!absl::ConsumeSuffix(&text, kSuffix)) continue;
    uint32_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || absl::StrCat(number) != text) {
      return absl::InvalidArgumentError(
          absl::StrCat(folder, "/", name, ": '", text, "' is not the number of a file"));
    }
    numbers.push_back(number);
  }
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read ", folder));
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// Opens files as they are needed: a dump may have more of them than a process may map.
class TorchLayer : public DumpLayer {
 public:
  TorchLayer(const DumpLayerSource& source, uint32_t layer_id)
      : folder_(LayerPath(source.directory, DumpLayout::kTorch, layer_id)) {
    layer_id_ = layer_id;
    info_.model = source.names.model;
    info_.weights_revision = source.names.weights_revision;
    info_.text_source = "PyTorch files";
    info_.layer_ids = source.listing.layer_ids;
  }

  absl::Status Open();
  absl::Status Read(size_t tensor, ThreadPool*, std::vector<float>* rows) const override;

 private:
  std::string Path(absl::string_view tensor, uint32_t number) const {
    return absl::StrCat(folder_, "/", tensor, "/", number, kSuffix);
  }
  // Reads q, k or v's header in file `number`.
  absl::StatusOr<Shape> RowShape(size_t tensor, uint32_t number) const;
  absl::Status TakeFileLengths(uint32_t number, uint64_t tokens_count);

  const std::string folder_;
  std::vector<uint32_t> numbers_;             // Of the files, ascending.
  std::vector<std::array<Shape, 3>> shapes_;  // Of q, k, v in each.
};

absl::Status TorchLayer::Open() {
  OKV_ASSIGN_OR_RETURN(numbers_, ListNumbers(absl::StrCat(folder_, "/q")));
  if (numbers_.empty()) return absl::NotFoundError(absl::StrCat("no <n>.pt in ", folder_, "/q"));
  for (const char* name : {"k", "v", kLengthsName}) {
    const std::string folder = absl::StrCat(folder_, "/", name);
    OKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> others, ListNumbers(folder));
    std::vector<uint32_t> different;
    std::set_symmetric_difference(numbers_.begin(), numbers_.end(), others.begin(), others.end(),
                                  std::back_inserter(different));
    if (different.empty()) continue;
    return absl::NotFoundError(
        absl::StrCat(folder_, ": file ", different[0], " is in only one of q and ", name));
  }
  std::array<Shape, 3> all;
  for (const uint32_t number : numbers_) {
    if (number - numbers_[0] != shapes_.size()) {
      return absl::NotFoundError(absl::StrCat(Path("q", number - 1), " is missing"));
    }
    std::array<Shape, 3> shapes;
    for (size_t i = 0; i < 3; ++i) {
      OKV_ASSIGN_OR_RETURN(shapes[i], RowShape(i, number));
      if (all[i].empty()) all[i] = {0, shapes[i][1], shapes[i][2]};
      if (shapes[i][1] != all[i][1] || shapes[i][2] != all[i][2]) {
        return absl::InvalidArgumentError(
            absl::StrCat(Path(kDumpTensors[i], number), ": shape [", absl::StrJoin(shapes[i], ", "),
                         "] differs in heads or head_dim from file ", numbers_[0]));
      }
      all[i][0] += shapes[i][0];
    }
    // Here and not from the sums alone: a token missing in one file and extra in another would
    // pass.
    if (shapes[0][0] != shapes[1][0] || shapes[0][0] != shapes[2][0]) {
      return absl::InvalidArgumentError(absl::StrCat(folder_, ": file ", number, " has ",
                                                     shapes[0][0], " tokens of q, ", shapes[1][0],
                                                     " of k, ", shapes[2][0], " of v"));
    }
    OKV_RETURN_IF_ERROR(TakeFileLengths(number, shapes[0][0]));
    shapes_.push_back(std::move(shapes));
  }
  absl::Status status = TakeShapes(all);
  if (status.ok()) status = info_.Validate();
  return status.ok() ? status : InFile(folder_, status);
}

absl::StatusOr<DumpLayer::Shape> TorchLayer::RowShape(size_t tensor, uint32_t number) const {
  const std::string path = Path(kDumpTensors[tensor], number);
  OKV_ASSIGN_OR_RETURN(const TensorFile file, OpenTensor(path));
  const TorchType type = file.tensor().type;
  if (type != TorchType::kFloat && type != TorchType::kBFloat16 && type != TorchType::kHalf) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": tensor is ", TorchTensorText(file.tensor()), ", not of Float, BFloat16 or Half"));
  }
  absl::Status status = CheckRowShape(kDumpTensors[tensor], file.tensor().sizes);
  if (!status.ok()) return InFile(path, status);
  return file.tensor().sizes;
}

absl::Status TorchLayer::TakeFileLengths(uint32_t number, uint64_t tokens_count) {
  const std::string path = Path(kLengthsName, number);
  OKV_ASSIGN_OR_RETURN(const TensorFile file, OpenTensor(path));
  if (file.tensor().sizes.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": seq_lens is not one-dimensional"));
  }
  const absl::StatusOr<std::vector<int64_t>> lengths = file.torch.ReadIntegers(file.tensor());
  absl::Status status = lengths.status();
  if (status.ok()) status = TakeLengths(*lengths, tokens_count);
  return status.ok() ? status : InFile(path, status);
}

absl::Status TorchLayer::Read(size_t tensor, ThreadPool*, std::vector<float>* rows) const {
  const size_t heads = tensor == 0 ? info_.query_heads : info_.kv_heads;
  rows->clear();
  rows->reserve(size_t{tokens_count_} * heads * info_.head_dim);
  for (size_t i = 0; i < numbers_.size(); ++i) {
    const std::string path = Path(kDumpTensors[tensor], numbers_[i]);
    OKV_ASSIGN_OR_RETURN(const TensorFile file, OpenTensor(path));
    if (file.tensor().sizes != shapes_[i][tensor]) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": it has changed since it was opened"));
    }
    const absl::StatusOr<std::vector<float>> part = file.torch.ReadFloats(file.tensor());
    if (!part.ok()) return InFile(path, part.status());
    rows->insert(rows->end(), part->begin(), part->end());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DumpLayer>> OpenTorchLayer(const DumpLayerSource& source,
                                                          uint32_t layer_id) {
  auto layer = std::make_unique<TorchLayer>(source, layer_id);
  OKV_RETURN_IF_ERROR(layer->Open());
  return layer;
}

}  // namespace okv
