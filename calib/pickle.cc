#include "calib/pickle.h"

#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "calib/quoted.h"
#include "proto/fields.h"
#include "proto/status_macros.h"
#include "proto/utf8.h"

namespace okv {
namespace {

enum Opcode : uint8_t {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNoneValue = 'N',
  kBinPersistentId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kGlobalName = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTupleOfMark = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

// The globals that a pickle may name. Storages first, in the order of TorchType.
struct AllowedGlobal {
  absl::string_view module;
  absl::string_view name;
};
constexpr AllowedGlobal kGlobals[] = {
    {"torch", "FloatStorage"},      {"torch", "DoubleStorage"},
    {"torch", "HalfStorage"},       {"torch", "BFloat16Storage"},
    {"torch", "LongStorage"},       {"torch", "IntStorage"},
    {"collections", "OrderedDict"}, {"torch._utils", "_rebuild_tensor_v2"},
};
constexpr int64_t kStorageTypes = 6;
constexpr int64_t kOrderedDict = 6;
constexpr int64_t kRebuildTensor = 7;
constexpr size_t kNameBytesMax = 256;

// The number of elements up to the last one that a tensor reaches in its storage, or false on
// overflow.
bool ReachedElements(const TorchTensor& tensor, uint64_t* reached) {
  *reached = tensor.offset;
  if (tensor.elements() == 0) return true;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    const uint64_t steps = tensor.sizes[i] - 1;
    uint64_t distance = 0;
    if (__builtin_mul_overflow(steps, tensor.strides[i], &distance) ||
        __builtin_add_overflow(*reached, distance, reached)) {
      return false;
    }
  }
  return !__builtin_add_overflow(*reached, uint64_t{1}, reached);
}

// False when the product of the sizes overflows.
bool SizesFit(const TorchTensor& tensor) {
  uint64_t product = 1;
  for (const uint64_t size : tensor.sizes) {
    if (size == 0) return true;
  }
  for (const uint64_t size : tensor.sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return false;
  }
  return true;
}

}  // namespace

uint32_t TorchTypeBytes(TorchType type) {
  switch (type) {
    case TorchType::kHalf:
    case TorchType::kBFloat16:
      return 2;
    case TorchType::kFloat:
    case TorchType::kInt:
      return 4;
    case TorchType::kDouble:
    case TorchType::kLong:
      return 8;
  }
  return 0;
}

absl::string_view TorchTypeName(TorchType type) {
  constexpr size_t kSuffixBytes = 7;  // "Storage"
  const absl::string_view name = kGlobals[static_cast<size_t>(type)].name;
  return name.substr(0, name.size() - kSuffixBytes);
}

absl::string_view KindName(Pickle::Kind kind) {
  constexpr absl::string_view kNames[] = {"None", "bool", "integer", "float",  "text",   "tuple",
                                          "list", "dict", "tensor",  "global", "storage"};
  return kNames[static_cast<size_t>(kind)];
}

uint64_t TorchTensor::elements() const {
  uint64_t product = 1;
  for (const uint64_t size : sizes) product *= size;
  return product;
}

// The stack machine. One instance runs one pickle.
class Pickle::Machine {
 public:
  explicit Machine(absl::string_view bytes) : bytes_(bytes), reader_(bytes) {}

  absl::StatusOr<Pickle> Run();

 private:
  // kInvalidArgument that names the opcode at work and its offset.
  absl::Status Bad(absl::string_view why) const;
  // kDataLoss: the bytes end inside that opcode.
  absl::Status Truncated() const;

  // Runs the opcode at work. Each group gives false when the opcode is not one of its own.
  absl::Status Step();
  absl::StatusOr<bool> StepScalar();
  absl::StatusOr<bool> StepContainer();
  absl::StatusOr<bool> StepMemo();
  absl::StatusOr<bool> StepObject();

  absl::Status Put(uint64_t slot);
  absl::Status Get(uint64_t slot);
  absl::Status TextOfBytes(uint64_t bytes_count);
  absl::Status Long(uint64_t bytes_count);
  absl::Status TupleOfTop(size_t count);
  absl::Status AppendItems(std::vector<Index> items);
  absl::Status SetItems(std::vector<Index> items);
  absl::Status Global(absl::string_view module, absl::string_view name);
  absl::Status PersistentId();
  absl::Status Reduce();
  absl::Status RebuildTensor(const std::vector<Index>& arguments);
  absl::Status ReadSizes(Index tuple, absl::string_view what, std::vector<uint64_t>* sizes) const;

  Index Push(Node node);
  absl::Status PushKind(Kind kind) {
    Push({.kind = kind, .number = 0, .real = 0, .text = {}, .items = {}});
    return absl::OkStatus();
  }
  absl::Status PushNumber(Kind kind, int64_t number) {
    Push({.kind = kind, .number = number, .real = 0, .text = {}, .items = {}});
    return absl::OkStatus();
  }
  absl::StatusOr<Index> Pop();
  // What was pushed since the last mark, which is taken too.
  absl::StatusOr<std::vector<Index>> PopToMark();
  // The container that an APPENDS or SETITEMS adds to: below the items, which are popped already.
  absl::StatusOr<Node*> Top(Kind kind);
  const Node& at(Index index) const { return pickle_.nodes_[index]; }
  size_t StackFloor() const { return marks_.empty() ? 0 : marks_.back(); }

  const absl::string_view bytes_;
  FieldReader reader_;
  size_t offset_ = 0;  // Of the opcode at work.
  uint8_t opcode_ = 0;
  Pickle pickle_;
  std::vector<Index> stack_;
  std::vector<size_t> marks_;  // Stack sizes.
  std::unordered_map<uint32_t, Index> memo_;
  struct Storage {
    TorchType type;
    absl::string_view key;
    uint64_t elements;
  };
  std::vector<Storage> storages_;
};

absl::Status Pickle::Machine::Bad(absl::string_view why) const {
  return absl::InvalidArgumentError(
      absl::StrFormat("pickle: opcode 0x%02x at offset %d: %s", opcode_, offset_, why));
}

absl::Status Pickle::Machine::Truncated() const {
  return absl::DataLossError(
      absl::StrFormat("pickle: it ends inside the opcode 0x%02x at offset %d", opcode_, offset_));
}

absl::StatusOr<Pickle> Pickle::Machine::Run() {
  for (uint32_t opcodes = 0;; ++opcodes) {
    offset_ = bytes_.size() - reader_.rest().size();
    if (reader_.rest().empty()) {
      return absl::DataLossError(
          absl::StrCat("pickle: it ends at offset ", offset_, " without STOP"));
    }
    opcode_ = static_cast<uint8_t>(reader_.Unsigned(1));
    if (opcodes == kOpcodesMax) return Bad(absl::StrCat("more than ", kOpcodesMax, " opcodes"));
    if (opcodes == 0 && opcode_ != kProto) return Bad("a pickle of protocol 2 or later has PROTO");
    if (opcode_ == kStop) break;
    const absl::Status status = Step();
    if (!reader_.ok()) return Truncated();
    OKV_RETURN_IF_ERROR(status);
  }
  if (stack_.size() != 1 || !marks_.empty()) {
    return Bad(absl::StrCat("STOP with ", stack_.size(), " values"));
  }
  pickle_.root_ = stack_[0];
  return std::move(pickle_);
}

absl::Status Pickle::Machine::Step() {
  for (const auto step :
       {&Machine::StepScalar, &Machine::StepContainer, &Machine::StepMemo, &Machine::StepObject}) {
    OKV_ASSIGN_OR_RETURN(const bool done, (this->*step)());
    if (done) return absl::OkStatus();
  }
  return Bad("it is not one of those that are read");
}

absl::StatusOr<bool> Pickle::Machine::StepScalar() {
  absl::Status status;
  switch (opcode_) {
    case kNoneValue:
      status = PushKind(Kind::kNone);
      break;
    case kNewTrue:
    case kNewFalse:
      status = PushNumber(Kind::kBool, opcode_ == kNewTrue);
      break;
    case kBinInt1:
      status = PushNumber(Kind::kInt, static_cast<int64_t>(reader_.Unsigned(1)));
      break;
    case kBinInt2:
      status = PushNumber(Kind::kInt, static_cast<int64_t>(reader_.Unsigned(2)));
      break;
    case kBinInt:
      status = PushNumber(Kind::kInt, static_cast<int32_t>(reader_.Unsigned(4)));
      break;
    case kLong1:
      status = Long(reader_.Unsigned(1));
      break;
    case kBinFloat: {
      const uint64_t bits = __builtin_bswap64(reader_.Unsigned(8));  // Big-endian.
      Push({.kind = Kind::kFloat,
            .number = 0,
            .real = std::bit_cast<double>(bits),
            .text = {},
            .items = {}});
      break;
    }
    case kBinUnicode:
      status = TextOfBytes(reader_.Unsigned(4));
      break;
    case kShortBinUnicode:
      status = TextOfBytes(reader_.Unsigned(1));
      break;
    default:
      return false;
  }
  if (!status.ok()) return status;
  return true;
}

absl::StatusOr<bool> Pickle::Machine::StepContainer() {
  switch (opcode_) {
    case kMark:
      if (marks_.size() == kMarksMax) return Bad(absl::StrCat("more than ", kMarksMax, " marks"));
      marks_.push_back(stack_.size());
      return true;
    case kEmptyDict:
    case kEmptyList:
    case kEmptyTuple: {
      const Kind kind = opcode_ == kEmptyDict   ? Kind::kDict
                        : opcode_ == kEmptyList ? Kind::kList
                                                : Kind::kTuple;
      OKV_RETURN_IF_ERROR(PushKind(kind));
      return true;
    }
    case kTuple1:
    case kTuple2:
    case kTuple3:
      OKV_RETURN_IF_ERROR(TupleOfTop(size_t{1} + opcode_ - kTuple1));
      return true;
    case kTupleOfMark: {
      OKV_ASSIGN_OR_RETURN(std::vector<Index> items, PopToMark());
      Push({.kind = Kind::kTuple, .number = 0, .real = 0, .text = {}, .items = std::move(items)});
      return true;
    }
    case kAppend: {
      OKV_ASSIGN_OR_RETURN(const Index item, Pop());
      OKV_RETURN_IF_ERROR(AppendItems({item}));
      return true;
    }
    case kAppends: {
      OKV_ASSIGN_OR_RETURN(std::vector<Index> items, PopToMark());
      OKV_RETURN_IF_ERROR(AppendItems(std::move(items)));
      return true;
    }
    case kSetItem: {
      OKV_ASSIGN_OR_RETURN(const Index value, Pop());
      OKV_ASSIGN_OR_RETURN(const Index key, Pop());
      OKV_RETURN_IF_ERROR(SetItems({key, value}));
      return true;
    }
    case kSetItems: {
      OKV_ASSIGN_OR_RETURN(std::vector<Index> items, PopToMark());
      OKV_RETURN_IF_ERROR(SetItems(std::move(items)));
      return true;
    }
    default:
      return false;
  }
}

absl::StatusOr<bool> Pickle::Machine::StepMemo() {
  absl::Status status;
  switch (opcode_) {
    case kBinPut:
      status = Put(reader_.Unsigned(1));
      break;
    case kLongBinPut:
      status = Put(reader_.Unsigned(4));
      break;
    case kMemoize:
      status = Put(memo_.size());
      break;
    case kBinGet:
      status = Get(reader_.Unsigned(1));
      break;
    case kLongBinGet:
      status = Get(reader_.Unsigned(4));
      break;
    default:
      return false;
  }
  if (!status.ok()) return status;
  return true;
}

absl::StatusOr<bool> Pickle::Machine::StepObject() {
  absl::Status status;
  switch (opcode_) {
    case kProto: {
      const uint64_t version = reader_.Unsigned(1);
      if (offset_ != 0 || version < 2 || version > 5) {
        status = Bad(absl::StrCat("protocol ", version));
      }
      break;
    }
    case kFrame:  // How a reader may buffer; it changes nothing.
      if (reader_.Unsigned(8) > reader_.rest().size()) status = Bad("a frame beyond the end");
      break;
    case kGlobalName: {
      absl::string_view names[2];
      for (absl::string_view& name : names) {
        const size_t end = reader_.rest().substr(0, kNameBytesMax).find('\n');
        if (end == absl::string_view::npos) {
          return reader_.rest().size() < kNameBytesMax ? Truncated() : Bad("a name without end");
        }
        name = reader_.Take(end);
        reader_.Take(1);
      }
      status = Global(names[0], names[1]);
      break;
    }
    case kStackGlobal: {
      OKV_ASSIGN_OR_RETURN(const Index name, Pop());
      OKV_ASSIGN_OR_RETURN(const Index module, Pop());
      if (at(name).kind != Kind::kText || at(module).kind != Kind::kText) {
        return Bad("a name that is no text");
      }
      status = Global(at(module).text, at(name).text);
      break;
    }
    case kBinPersistentId:
      status = PersistentId();
      break;
    case kReduce:
      status = Reduce();
      break;
    default:
      return false;
  }
  if (!status.ok()) return status;
  return true;
}

Pickle::Index Pickle::Machine::Push(Node node) {
  pickle_.nodes_.push_back(std::move(node));
  stack_.push_back(static_cast<Index>(pickle_.nodes_.size() - 1));
  return stack_.back();
}

absl::StatusOr<Pickle::Index> Pickle::Machine::Pop() {
  if (stack_.size() <= StackFloor()) return Bad("the stack is empty");
  const Index index = stack_.back();
  stack_.pop_back();
  return index;
}

absl::StatusOr<std::vector<Pickle::Index>> Pickle::Machine::PopToMark() {
  if (marks_.empty()) return Bad("there is no mark");
  const auto first = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
  std::vector<Index> items(first, stack_.end());
  stack_.erase(first, stack_.end());
  marks_.pop_back();
  return items;
}

absl::StatusOr<Pickle::Node*> Pickle::Machine::Top(Kind kind) {
  if (stack_.size() <= StackFloor()) return Bad("the stack is empty");
  Node* node = &pickle_.nodes_[stack_.back()];
  if (node->kind != kind) {
    return Bad(absl::StrCat("needs a ", KindName(kind), " and finds a ", KindName(node->kind)));
  }
  return node;
}

absl::Status Pickle::Machine::Put(uint64_t slot) {
  if (stack_.size() <= StackFloor()) return Bad("the stack is empty");
  memo_[static_cast<uint32_t>(slot)] = stack_.back();
  return absl::OkStatus();
}

absl::Status Pickle::Machine::Get(uint64_t slot) {
  const auto found = memo_.find(static_cast<uint32_t>(slot));
  if (found == memo_.end()) return Bad(absl::StrCat("the memo has no ", slot));
  stack_.push_back(found->second);
  return absl::OkStatus();
}

absl::Status Pickle::Machine::TextOfBytes(uint64_t bytes_count) {
  const absl::string_view text = reader_.Take(bytes_count);
  if (!IsUtf8(text)) return Bad("a text that is not UTF-8");
  Push({.kind = Kind::kText, .number = 0, .real = 0, .text = text, .items = {}});
  return absl::OkStatus();
}

// Two's complement, as few bytes as it takes; none is 0.
absl::Status Pickle::Machine::Long(uint64_t bytes_count) {
  if (bytes_count > 8) return Bad("an integer of more than 64 bits");
  uint64_t bits = reader_.Unsigned(bytes_count);
  if (bytes_count > 0 && bytes_count < 8 && ((bits >> (8 * bytes_count - 1)) & 1) != 0) {
    bits |= ~uint64_t{0} << (8 * bytes_count);
  }
  return PushNumber(Kind::kInt, static_cast<int64_t>(bits));
}

absl::Status Pickle::Machine::TupleOfTop(size_t count) {
  std::vector<Index> items(count);
  for (size_t i = count; i-- > 0;) {
    OKV_ASSIGN_OR_RETURN(items[i], Pop());
  }
  Push({.kind = Kind::kTuple, .number = 0, .real = 0, .text = {}, .items = std::move(items)});
  return absl::OkStatus();
}

absl::Status Pickle::Machine::AppendItems(std::vector<Index> items) {
  OKV_ASSIGN_OR_RETURN(Node * list, Top(Kind::kList));
  list->items.insert(list->items.end(), items.begin(), items.end());
  return absl::OkStatus();
}

absl::Status Pickle::Machine::SetItems(std::vector<Index> items) {
  if (items.size() % 2 != 0) return Bad("a key without a value");
  for (size_t i = 0; i < items.size(); i += 2) {
    const Kind kind = at(items[i]).kind;
    if (kind != Kind::kText && kind != Kind::kInt) {
      return Bad(absl::StrCat("a ", KindName(kind), " as a key"));
    }
  }
  OKV_ASSIGN_OR_RETURN(Node * dict, Top(Kind::kDict));
  dict->items.insert(dict->items.end(), items.begin(), items.end());
  return absl::OkStatus();
}

absl::Status Pickle::Machine::Global(absl::string_view module, absl::string_view name) {
  for (size_t i = 0; i < std::size(kGlobals); ++i) {
    if (kGlobals[i].module != module || kGlobals[i].name != name) continue;
    return PushNumber(Kind::kGlobal, static_cast<int64_t>(i));
  }
  return Bad(absl::StrCat("the global ", Quoted(module), " ", Quoted(name),
                          " is not one of those that are read"));
}

// ("storage", type, key, location, elements), the location being where it once lived.
absl::Status Pickle::Machine::PersistentId() {
  OKV_ASSIGN_OR_RETURN(const Index id, Pop());
  const std::vector<Index>& items = at(id).items;
  if (at(id).kind != Kind::kTuple || items.size() != 5 || at(items[0]).kind != Kind::kText ||
      at(items[0]).text != "storage" || at(items[1]).kind != Kind::kGlobal ||
      at(items[1]).number >= kStorageTypes || at(items[2]).kind != Kind::kText ||
      at(items[3]).kind != Kind::kText || at(items[4]).kind != Kind::kInt ||
      at(items[4]).number < 0) {
    return Bad("a persistent id that is no storage");
  }
  // Each tensor keeps a copy.
  if (at(items[2]).text.size() > kNameBytesMax) return Bad("a storage's name is too long");
  storages_.push_back({.type = static_cast<TorchType>(at(items[1]).number),
                       .key = at(items[2]).text,
                       .elements = static_cast<uint64_t>(at(items[4]).number)});
  return PushNumber(Kind::kStorage, static_cast<int64_t>(storages_.size() - 1));
}

absl::Status Pickle::Machine::Reduce() {
  OKV_ASSIGN_OR_RETURN(const Index arguments, Pop());
  OKV_ASSIGN_OR_RETURN(const Index callable, Pop());
  if (at(callable).kind != Kind::kGlobal || at(arguments).kind != Kind::kTuple) {
    return Bad(absl::StrCat("calls a ", KindName(at(callable).kind)));
  }
  const std::vector<Index> items = at(arguments).items;
  if (at(callable).number == kRebuildTensor) return RebuildTensor(items);
  if (at(callable).number == kOrderedDict && items.empty()) return PushKind(Kind::kDict);
  return Bad(absl::StrCat("calls ", kGlobals[at(callable).number].name, " with ", items.size(),
                          " arguments"));
}

absl::Status Pickle::Machine::ReadSizes(Index tuple, absl::string_view what,
                                        std::vector<uint64_t>* sizes) const {
  if (at(tuple).kind != Kind::kTuple || at(tuple).items.size() > TorchTensor::kDimensionsMax) {
    return Bad(absl::StrCat("a tensor's ", what, " are not up to ", TorchTensor::kDimensionsMax,
                            " numbers"));
  }
  for (const Index item : at(tuple).items) {
    if (at(item).kind != Kind::kInt || at(item).number < 0) {
      return Bad(absl::StrCat("a tensor's ", what, " hold what is no size"));
    }
    sizes->push_back(static_cast<uint64_t>(at(item).number));
  }
  return absl::OkStatus();
}

// (storage, offset, sizes, strides, requires_grad, backward_hooks[, metadata])
absl::Status Pickle::Machine::RebuildTensor(const std::vector<Index>& arguments) {
  if (arguments.size() < 6 || arguments.size() > 7 || at(arguments[0]).kind != Kind::kStorage ||
      at(arguments[1]).kind != Kind::kInt || at(arguments[1]).number < 0 ||
      at(arguments[4]).kind != Kind::kBool || at(arguments[5]).kind != Kind::kDict ||
      !at(arguments[5]).items.empty()) {
    return Bad("a tensor's arguments are not those of a plain tensor");
  }
  if (arguments.size() == 7 &&
      (at(arguments[6]).kind != Kind::kDict || !at(arguments[6]).items.empty())) {
    return Bad("a tensor with metadata");
  }
  const Storage& storage = storages_[static_cast<size_t>(at(arguments[0]).number)];
  TorchTensor tensor;
  tensor.type = storage.type;
  tensor.storage = std::string(storage.key);
  tensor.storage_elements = storage.elements;
  tensor.offset = static_cast<uint64_t>(at(arguments[1]).number);
  OKV_RETURN_IF_ERROR(ReadSizes(arguments[2], "sizes", &tensor.sizes));
  OKV_RETURN_IF_ERROR(ReadSizes(arguments[3], "strides", &tensor.strides));
  uint64_t reached = 0;
  if (tensor.sizes.size() != tensor.strides.size() || !SizesFit(tensor) ||
      !ReachedElements(tensor, &reached) || reached > tensor.storage_elements) {
    return Bad(absl::StrCat("a tensor of sizes [", absl::StrJoin(tensor.sizes, ", "),
                            "], strides [", absl::StrJoin(tensor.strides, ", "), "] at ",
                            tensor.offset, " does not fit its storage of ", tensor.storage_elements,
                            " elements"));
  }
  // Strides of 0 make a large tensor of a small storage: nobody saves one, and it would be copied.
  if (tensor.elements() > tensor.storage_elements) {
    return Bad(absl::StrCat("a tensor of ", tensor.elements(), " elements over a storage of ",
                            tensor.storage_elements));
  }
  pickle_.tensors_.push_back(std::move(tensor));
  return PushNumber(Kind::kTensor, static_cast<int64_t>(pickle_.tensors_.size() - 1));
}

absl::StatusOr<Pickle> Pickle::Parse(absl::string_view bytes) { return Machine(bytes).Run(); }

absl::StatusOr<const Pickle::Node*> Pickle::Find(const Node& dict, absl::string_view key) const {
  if (dict.kind != Kind::kDict) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", KindName(dict.kind), " stands where a dict with '", key, "' is needed"));
  }
  const Node* value = nullptr;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const Node& one = nodes_[dict.items[i]];
    if (one.kind != Kind::kText || one.text != key) continue;
    if (value != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("the key '", key, "' stands twice"));
    }
    value = &nodes_[dict.items[i + 1]];
  }
  return value;
}

absl::StatusOr<Pickle::Index> Pickle::Get(const Node& dict, absl::string_view key,
                                          Kind kind) const {
  OKV_ASSIGN_OR_RETURN(const Node* value, Find(dict, key));
  if (value == nullptr) return absl::InvalidArgumentError(absl::StrCat("'", key, "' is missing"));
  if (value->kind != kind) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", key, "' is a ", KindName(value->kind), ", not a ", KindName(kind)));
  }
  return static_cast<Index>(value - nodes_.data());
}

}  // namespace okv
