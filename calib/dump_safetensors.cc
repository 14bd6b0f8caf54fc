// The project's own layout: one safetensors file a layer.

#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "calib/dump_layer.h"
#include "calib/files.h"
#include "proto/bf16.h"
#include "proto/safetensors.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

absl::StatusOr<std::string> Field(const std::map<std::string, std::string>& metadata,
                                  const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) {
    return absl::InvalidArgumentError(absl::StrCat("__metadata__ has no ", name));
  }
  return found->second;
}

absl::StatusOr<uint32_t> LayerId(absl::string_view text) {
  uint32_t id = 0;
  if (!absl::SimpleAtoi(text, &id)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a layer id"));
  }
  return id;
}

// The numbers of seq_lens, whatever their type.
absl::StatusOr<std::vector<int64_t>> Lengths(const Safetensors::Tensor& tensor) {
  const bool wide = tensor.dtype == "I64";
  if (!wide && tensor.dtype != "I32" && tensor.dtype != "U32") {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor seq_lens has dtype ", tensor.dtype, ", not I32, U32 or I64"));
  }
  if (tensor.shape.size() != 1) {
    return absl::InvalidArgumentError("tensor seq_lens is not one-dimensional");
  }
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < tensor.shape[0]; ++i) {
    int64_t length = 0;
    if (wide) {
      std::memcpy(&length, tensor.data.data() + i * 8, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, tensor.data.data() + i * 4, 4);
      length = narrow;
    }
    lengths.push_back(length);
  }
  return lengths;
}

// Keeps the file mapped.
class SafetensorsLayer : public DumpLayer {
 public:
  explicit SafetensorsLayer(MappedFile file) : file_(std::move(file)) {}

  absl::Status Open(uint32_t layer_id);
  absl::Status Read(size_t tensor, ThreadPool* pool, std::vector<float>* rows) const override;

 private:
  absl::Status TakeMetadata();

  const MappedFile file_;
  Safetensors parsed_;
  std::array<const Safetensors::Tensor*, 3> tensors_ = {};  // They point into parsed_.
};

absl::Status SafetensorsLayer::TakeMetadata() {
  const std::map<std::string, std::string>& metadata = parsed_.metadata();
  OKV_ASSIGN_OR_RETURN(info_.model, Field(metadata, "model"));
  OKV_ASSIGN_OR_RETURN(info_.weights_revision, Field(metadata, "weights_revision"));
  OKV_ASSIGN_OR_RETURN(info_.text_source, Field(metadata, "text_source"));
  OKV_ASSIGN_OR_RETURN(const std::string id, Field(metadata, "layer"));
  OKV_ASSIGN_OR_RETURN(layer_id_, LayerId(id));
  OKV_ASSIGN_OR_RETURN(const std::string ids, Field(metadata, "layer_ids"));
  for (const absl::string_view text : absl::StrSplit(ids, ',')) {
    OKV_ASSIGN_OR_RETURN(const uint32_t one, LayerId(text));
    info_.layer_ids.push_back(one);
  }
  return absl::OkStatus();
}

absl::Status SafetensorsLayer::Open(uint32_t layer_id) {
  OKV_ASSIGN_OR_RETURN(parsed_, Safetensors::Parse(file_.bytes()));
  std::array<Shape, 3> shapes;
  for (size_t i = 0; i < 3; ++i) {
    const char* name = kDumpTensors[i];
    tensors_[i] = parsed_.Find(name);
    if (tensors_[i] == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " is missing"));
    }
    if (tensors_[i]->dtype != "BF16" && tensors_[i]->dtype != "F32") {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", name, " has dtype ", tensors_[i]->dtype, ", not BF16 or F32"));
    }
    OKV_RETURN_IF_ERROR(CheckRowShape(name, tensors_[i]->shape));
    shapes[i] = tensors_[i]->shape;
  }
  OKV_RETURN_IF_ERROR(TakeShapes(shapes));
  OKV_RETURN_IF_ERROR(TakeMetadata());
  OKV_RETURN_IF_ERROR(info_.Validate());
  const Safetensors::Tensor* lengths = parsed_.Find("seq_lens");
  if (lengths == nullptr) return absl::InvalidArgumentError("tensor seq_lens is missing");
  OKV_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, Lengths(*lengths));
  OKV_RETURN_IF_ERROR(TakeLengths(numbers, tokens_count_));
  if (layer_id_ == layer_id) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("__metadata__ says layer ", layer_id_));
}

absl::Status SafetensorsLayer::Read(size_t tensor, ThreadPool* pool,
                                    std::vector<float>* rows) const {
  const char* const data = tensors_[tensor]->data.data();
  const bool wide = tensors_[tensor]->dtype == "F32";
  const size_t count = tensors_[tensor]->data.size() / (wide ? sizeof(float) : sizeof(uint16_t));
  rows->resize(count);
  float* const to = rows->data();
  ForEachPiece(count, pool, [&](size_t begin, size_t end) {
    if (wide) {
      std::memcpy(to + begin, data + begin * sizeof(float), (end - begin) * sizeof(float));
      return;
    }
    for (size_t i = begin; i < end; ++i) {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, sizeof(bits));
      to[i] = Bf16ToFloat(bits);
    }
  });
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DumpLayer>> OpenSafetensorsLayer(const DumpLayerSource& source,
                                                                uint32_t layer_id) {
  const std::string path = LayerPath(source.directory, DumpLayout::kSafetensors, layer_id);
  OKV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  auto layer = std::make_unique<SafetensorsLayer>(std::move(file));
  if (absl::Status status = layer->Open(layer_id); !status.ok()) return InFile(path, status);
  return layer;
}

}  // namespace okv
