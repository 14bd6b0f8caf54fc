#include "tests/calib/torch_data.h"

#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/fields.h"

namespace okv {
namespace {

std::string PickledSizes(const std::vector<int32_t>& sizes) {
  std::string bytes = "(";
  for (const int32_t size : sizes) bytes += PickledInteger(size);
  return bytes + "t";
}

}  // namespace

std::string TorchZip(absl::string_view pickle, const std::vector<std::string>& storages) {
  ZipWriter zip;
  zip.Add("archive/data.pkl", pickle);
  zip.Add("archive/byteorder", "little");
  for (size_t i = 0; i < storages.size(); ++i) {
    zip.Add(absl::StrCat("archive/data/", i), storages[i]);
  }
  zip.Add("archive/version", "3\n");
  auto bytes = zip.Finish();
  OKV_CHECK(bytes.ok());
  return *bytes;
}

std::string PickledText(absl::string_view text) {
  std::string bytes = "X";
  AppendU32(&bytes, static_cast<uint32_t>(text.size()));
  return absl::StrCat(bytes, text);
}

std::string PickledInteger(int32_t value) {
  std::string bytes = "J";
  AppendU32(&bytes, static_cast<uint32_t>(value));
  return bytes;
}

std::string PickledTensor(const RawTorchTensor& tensor) {
  return absl::StrCat("ctorch._utils\n_rebuild_tensor_v2\n((", PickledText("storage"), "ctorch\n",
                      tensor.type, "\n", PickledText(tensor.storage), PickledText("cpu"),
                      PickledInteger(tensor.elements), "tQ", PickledInteger(tensor.offset),
                      PickledSizes(tensor.sizes), PickledSizes(tensor.strides),
                      "\x89"
                      "ccollections\nOrderedDict\n)RtR");
}

std::string PickledDict(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string bytes = "}(";
  for (const auto& [key, value] : entries) absl::StrAppend(&bytes, key, value);
  return bytes + "u";
}

std::string PickleOf(absl::string_view value) {
  return absl::StrCat(absl::string_view("\x80\x02", 2), value, ".");
}

std::string TorchTensorFile(TorchType type, const std::vector<uint64_t>& sizes,
                            absl::string_view data) {
  TorchFileWriter writer("archive");
  writer.Tensor(type, sizes, data);
  auto bytes = writer.Finish();
  OKV_CHECK(bytes.ok());
  return *bytes;
}

std::string NpyFile(const std::string& header, absl::string_view data) {
  constexpr size_t kPrefixBytes = 10;
  std::string text = header;
  text.resize((text.size() + 1 + kPrefixBytes + 63) / 64 * 64 - kPrefixBytes - 1, ' ');
  text += '\n';
  std::string bytes("\x93NUMPY\x01\x00", 8);
  bytes += static_cast<char>(text.size());
  bytes += static_cast<char>(text.size() >> 8);
  return absl::StrCat(bytes, text, data);
}

// Gram and Schmidt, twice for each row: fp32 rounding is what remains of the error.
std::vector<float> RandomRotation(uint32_t dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> rows(size_t{dim} * dim);
  for (double& x : rows) x = normal(random);
  for (size_t i = 0; i < dim; ++i) {
    double* row = &rows[i * dim];
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t j = 0; j < i; ++j) {
        double dot = 0;
        for (size_t c = 0; c < dim; ++c) dot += row[c] * rows[j * dim + c];
        for (size_t c = 0; c < dim; ++c) row[c] -= dot * rows[j * dim + c];
      }
    }
    double norm = 0;
    for (size_t c = 0; c < dim; ++c) norm += row[c] * row[c];
    for (size_t c = 0; c < dim; ++c) row[c] /= std::sqrt(norm);
  }
  return std::vector<float>(rows.begin(), rows.end());
}

PublishedRotations RandomPublished(const PublishedShape& shape, uint32_t seed) {
  PublishedRotations result;
  result.objective = shape.objective;
  result.layer_ids = shape.layer_ids;
  result.heads = shape.heads;
  result.per_head = shape.per_head;
  result.head_dim = shape.head_dim;
  for (size_t i = 0; i < shape.layer_ids.size() * shape.heads; ++i) {
    const std::vector<float> one = RandomRotation(shape.head_dim, seed + static_cast<uint32_t>(i));
    result.rotations.insert(result.rotations.end(), one.begin(), one.end());
    for (uint32_t c = 1; c <= shape.head_dim && !shape.per_head; ++c) {
      result.eigenvalues.push_back(static_cast<float>(c));
    }
  }
  return result;
}

}  // namespace okv
