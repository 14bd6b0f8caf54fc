#ifndef OKV_TESTS_CALIB_TORCH_DATA_H_
#define OKV_TESTS_CALIB_TORCH_DATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "calib/published.h"
#include "calib/torch_file.h"

namespace okv {

// A file of torch.save from scratch: `pickle` as data.pkl, storages as data/0, data/1, ...
std::string TorchZip(absl::string_view pickle, const std::vector<std::string>& storages);

// The parts of a pickle of protocol 2, each as Python's pickler writes it but without the memo.
std::string PickledText(absl::string_view text);
std::string PickledInteger(int32_t value);
// A tensor on storage `storage` of `elements` elements; `type` is "FloatStorage" or another class.
struct RawTorchTensor {
  std::string type = "FloatStorage";
  std::string storage = "0";
  int32_t elements = 0;
  int32_t offset = 0;
  std::vector<int32_t> sizes;
  std::vector<int32_t> strides;
};
std::string PickledTensor(const RawTorchTensor& tensor);
// {key: value, ...} of what is pickled already.
std::string PickledDict(const std::vector<std::pair<std::string, std::string>>& entries);
// PROTO, the value, STOP.
std::string PickleOf(absl::string_view value);

// A file that holds one tensor and nothing else.
std::string TorchTensorFile(TorchType type, const std::vector<uint64_t>& sizes,
                            absl::string_view data);

// A file of numpy.save from scratch: its header's text, then its numbers.
std::string NpyFile(const std::string& header, absl::string_view data);

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// A rotation of random directions, [dim, dim] fp32. Deterministic in `seed`.
std::vector<float> RandomRotation(uint32_t dim, uint32_t seed);

struct PublishedShape {
  std::vector<uint32_t> layer_ids = {0, 3};
  uint32_t heads = 1;
  bool per_head = false;
  uint32_t head_dim = 64;
  std::string objective = "qqt_r_h_pbr";
};
// Random rotations; with eigenvalues, 1 to head_dim ascending, where they are one a layer.
PublishedRotations RandomPublished(const PublishedShape& shape, uint32_t seed);

}  // namespace okv

#endif  // OKV_TESTS_CALIB_TORCH_DATA_H_
