// A layout for whoever dumps with numpy: layer_<id>_q.npy, layer_<id>_k.npy, layer_<id>_v.npy, and
// one seq_lens.npy for all layers.

#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/dump_layer.h"
#include "calib/files.h"
#include "calib/npy.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

struct ArrayFile {
  MappedFile file;
  NpyArray array;
};

absl::StatusOr<ArrayFile> OpenArray(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  absl::StatusOr<NpyArray> array = NpyArray::Parse(file.bytes());
  if (!array.ok()) return InFile(path, array.status());
  return ArrayFile{.file = std::move(file), .array = *std::move(array)};
}

class NumpyLayer : public DumpLayer {
 public:
  NumpyLayer(const DumpLayerSource& source, uint32_t layer_id) : directory_(source.directory) {
    layer_id_ = layer_id;
    info_.model = source.names.model;
    info_.weights_revision = source.names.weights_revision;
    info_.text_source = "numpy files";
    info_.layer_ids = source.listing.layer_ids;
  }

  absl::Status Open();
  absl::Status Read(size_t tensor, ThreadPool*, std::vector<float>* rows) const override {
    std::vector<float>().swap(*rows);  // Not beside what replaces it.
    OKV_ASSIGN_OR_RETURN(*rows, arrays_[tensor].array.ReadFloats());
    return absl::OkStatus();
  }

 private:
  const std::string directory_;
  std::vector<ArrayFile> arrays_;  // q, k, v
};

absl::Status NumpyLayer::Open() {
  std::array<Shape, 3> shapes;
  for (size_t i = 0; i < 3; ++i) {
    const std::string path =
        absl::StrCat(directory_, "/layer_", layer_id_, "_", kDumpTensors[i], ".npy");
    OKV_ASSIGN_OR_RETURN(ArrayFile file, OpenArray(path));
    if (!file.array.HasFloats()) return InFile(path, file.array.ReadFloats().status());
    absl::Status status = CheckRowShape(kDumpTensors[i], file.array.shape);
    if (!status.ok()) return InFile(path, status);
    shapes[i] = file.array.shape;
    arrays_.push_back(std::move(file));
  }
  absl::Status status = TakeShapes(shapes);
  if (status.ok()) status = info_.Validate();
  if (!status.ok()) return InFile(LayerPath(directory_, DumpLayout::kNumpy, layer_id_), status);

  const std::string path = absl::StrCat(directory_, "/seq_lens.npy");
  OKV_ASSIGN_OR_RETURN(const ArrayFile file, OpenArray(path));
  if (file.array.shape.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": it is not one-dimensional"));
  }
  const absl::StatusOr<std::vector<int64_t>> lengths = file.array.ReadIntegers();
  status = lengths.status();
  if (status.ok()) status = TakeLengths(*lengths, tokens_count_);
  return status.ok() ? status : InFile(path, status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DumpLayer>> OpenNumpyLayer(const DumpLayerSource& source,
                                                          uint32_t layer_id) {
  auto layer = std::make_unique<NumpyLayer>(source, layer_id);
  OKV_RETURN_IF_ERROR(layer->Open());
  return layer;
}

}  // namespace okv
