#ifndef OKV_CALIB_TORCH_FILE_H_
#define OKV_CALIB_TORCH_FILE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "calib/pickle.h"
#include "calib/zip.h"

namespace okv {

// A file of torch.save, in memory: a ZIP container with one pickle and one entry a storage. Nothing
// of it is run: see Pickle for what it may hold. The bytes that Open was given must outlive it.
// For one thread at a time: const functions remember what they have checked.
class TorchFile {
 public:
  static constexpr size_t kPickleBytesMax = 16 << 20;

  // Reads the pickle, and of the storages only their sizes. Errors as ZipReader and Pickle; also
  // kInvalidArgument: the file of a PyTorch before 1.6, no data.pkl, one of more than
  // kPickleBytesMax, big-endian numbers.
  static absl::StatusOr<TorchFile> Open(absl::string_view bytes);

  const Pickle& pickle() const { return pickle_; }

  // kInvalidArgument when the storage's entry is missing or not of the size that the tensor says.
  // Without this no size of a tensor is to be believed.
  absl::Status CheckStorage(const TorchTensor& tensor) const;

  // The tensor's numbers, row-major, whatever its strides: of kFloat, kBFloat16 and kHalf, widened
  // exactly. kInvalidArgument: another type, or as CheckStorage. kDataLoss: a storage whose CRC-32
  // is not that of its entry, which is computed once a storage: many tensors may share one.
  absl::StatusOr<std::vector<float>> ReadFloats(const TorchTensor& tensor) const;
  // The same for kLong and kInt.
  absl::StatusOr<std::vector<int64_t>> ReadIntegers(const TorchTensor& tensor) const;

 private:
  TorchFile(ZipReader zip, Pickle pickle, std::string folder)
      : zip_(std::move(zip)), pickle_(std::move(pickle)), folder_(std::move(folder)) {}
  std::string EntryName(const TorchTensor& tensor) const;
  absl::StatusOr<absl::string_view> ReadStorage(const TorchTensor& tensor) const;

  ZipReader zip_;
  Pickle pickle_;
  // Those whose CRC-32 was found right, by the entry's name.
  mutable std::map<std::string, absl::string_view> storages_;
  std::string folder_;  // What precedes each entry's name: "k_rotation/".
};

// "Float [36, 128, 128]", for messages.
std::string TorchTensorText(const TorchTensor& tensor);

// fp32 of an IEEE half, exactly.
float HalfToFloat(uint16_t bits);

// Writes a file of torch.save: the same opcodes of protocol 2 in the same order as Python's pickler
// gives them, which is what restricted loaders (weights_only) accept. Values are written depth
// first, as they stand in the file. Thread-compatible.
class TorchFileWriter {
 public:
  // `folder` is the name inside the container; torch takes the file's, without its suffix.
  explicit TorchFileWriter(absl::string_view folder);

  // A dict: BeginDict, then its keys and values in turn, then EndDict. REQUIRES: as many entries as
  // both are told, at most 1,000 (beyond that Python's pickler writes several batches).
  void BeginDict(size_t entries_count);
  void EndDict(size_t entries_count);
  void Text(absl::string_view text);  // REQUIRES: UTF-8. Equal constants share one object.
  void Integer(int64_t value);
  // A contiguous tensor with a storage of its own, `data` being its numbers.
  void Tensor(TorchType type, const std::vector<uint64_t>& sizes, absl::string_view data);

  // The whole file. kInvalidArgument as ZipWriter::Finish.
  absl::StatusOr<std::string> Finish();

 private:
  void Memoize();                  // What was pushed last.
  void Remembered(uint32_t slot);  // Pushes it again.
  void FreshText(absl::string_view text);
  void Global(absl::string_view module, absl::string_view name);
  void Sizes(const std::vector<uint64_t>& sizes);

  const std::string folder_;
  std::string pickle_;
  uint32_t memo_count_ = 0;
  std::map<std::string, uint32_t> texts_;    // Memo slots.
  std::map<std::string, uint32_t> globals_;  // By "module name".
  std::vector<std::string> storages_;
};

}  // namespace okv

#endif  // OKV_CALIB_TORCH_FILE_H_
