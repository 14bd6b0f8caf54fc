#ifndef OKV_CALIB_PICKLE_H_
#define OKV_CALIB_PICKLE_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// Element types of a PyTorch storage.
enum class TorchType { kFloat, kDouble, kHalf, kBFloat16, kLong, kInt };
uint32_t TorchTypeBytes(TorchType type);
absl::string_view TorchTypeName(TorchType type);  // "Float", ...: "torch FloatStorage".

// A tensor as a pickle describes it: its numbers lie in a storage beside the pickle.
struct TorchTensor {
  TorchType type = TorchType::kFloat;
  std::string storage;            // Names the entry data/<storage>.
  uint64_t storage_elements = 0;  // The whole storage.
  uint64_t offset = 0;            // Of the first element, in elements.
  std::vector<uint64_t> sizes;    // At most kDimensionsMax.
  std::vector<uint64_t> strides;  // In elements, one a size.

  static constexpr size_t kDimensionsMax = 8;
  uint64_t elements() const;
};

// What a pickle holds, of the few kinds that a saved dict of tensors needs. Values are nodes of one
// array and name each other by index, so that a value which holds itself (the memo allows it)
// is harmless: nothing here follows values by recursion. Texts are views into the pickle's bytes,
// which must outlive it. Thread-compatible.
class Pickle {
 public:
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kTuple,
    kList,
    kDict,
    kTensor,
    kGlobal,
    kStorage
  };
  using Index = uint32_t;
  struct Node {
    Kind kind = Kind::kNone;
    int64_t number = 0;        // kBool, kInt; kGlobal, kStorage, kTensor: an index of their own.
    double real = 0;           // kFloat
    absl::string_view text;    // kText
    std::vector<Index> items;  // kTuple, kList; kDict: key, value, key, value, ...
  };

  // One opcode makes at most one node, pushes at most one value and writes at most one memo entry,
  // so that this bounds memory and time. A file of 36 layers has 2,640 opcodes.
  static constexpr uint32_t kOpcodesMax = 262'144;
  static constexpr size_t kMarksMax = 64;  // Nesting.

  // Runs a pickle of protocol 2 to 5 and keeps to this: None, bools, integers of 64 bits, floats,
  // texts, tuples, lists, dicts with texts or integers as keys; calls of torch._utils
  // _rebuild_tensor_v2 on a storage of TorchType and of collections.OrderedDict without arguments.
  // kInvalidArgument naming opcode and offset for all else, for a limit above, and for a tensor
  // beyond its storage. kDataLoss: the bytes end before STOP.
  static absl::StatusOr<Pickle> Parse(absl::string_view bytes);

  Index root() const { return root_; }
  // REQUIRES: the index comes from this pickle.
  const Node& at(Index index) const { return nodes_[index]; }
  // REQUIRES: at(index).kind is kTensor.
  const TorchTensor& tensor(Index index) const {
    return tensors_[static_cast<size_t>(nodes_[index].number)];
  }

  // The value of `key` in a dict, null when absent. kInvalidArgument when `dict` is not a dict, or
  // the key stands there twice.
  absl::StatusOr<const Node*> Find(const Node& dict, absl::string_view key) const;
  // Find, and its value's index; kInvalidArgument when absent or of another kind.
  absl::StatusOr<Index> Get(const Node& dict, absl::string_view key, Kind kind) const;

 private:
  class Machine;
  Pickle() = default;

  std::vector<Node> nodes_;
  std::vector<TorchTensor> tensors_;
  Index root_ = 0;
};

absl::string_view KindName(Pickle::Kind kind);  // "dict", "tensor", ...

}  // namespace okv

#endif  // OKV_CALIB_PICKLE_H_
