#include "calib/pickle.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/torch_data.h"

namespace okv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Kind = Pickle::Kind;

template <size_t kBytes>
std::string Raw(const char (&literal)[kBytes]) {
  return std::string(literal, kBytes - 1);
}

// The root of PickleOf(value).
class Parsed {
 public:
  explicit Parsed(std::string value) : bytes_(PickleOf(value)), pickle_(Pickle::Parse(bytes_)) {}
  const absl::Status status() const { return pickle_.status(); }
  const Pickle& operator*() const { return *pickle_; }
  const Pickle::Node& root() const { return pickle_->at(pickle_->root()); }

 private:
  const std::string bytes_;
  const absl::StatusOr<Pickle> pickle_;
};

TEST(PickleTest, ScalarsAreRead) {
  EXPECT_EQ(Parsed("N").root().kind, Kind::kNone);
  EXPECT_EQ(Parsed("\x88").root().number, 1);
  EXPECT_EQ(Parsed("\x89").root().number, 0);
  EXPECT_EQ(Parsed("K\xff").root().number, 255);
  EXPECT_EQ(Parsed(Raw("M\xff\xff")).root().number, 65'535);
  EXPECT_EQ(Parsed(PickledInteger(-7)).root().number, -7);
  EXPECT_EQ(Parsed(Raw("\x8a\x00")).root().number, 0);
  EXPECT_EQ(Parsed(Raw("\x8a\x01\xff")).root().number, -1);
  EXPECT_EQ(Parsed(Raw("\x8a\x05\x00\x00\x00\x00\x01")).root().number, int64_t{1} << 32);
  EXPECT_EQ(Parsed(Raw("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80")).root().number, INT64_MIN);
  EXPECT_EQ(Parsed(Raw("G\x3f\xf8\x00\x00\x00\x00\x00\x00")).root().real, 1.5);
  EXPECT_EQ(Parsed(PickledText("\xc3\xa9")).root().text, "\xc3\xa9");
  EXPECT_EQ(Parsed(Raw("\x8c\x02hi")).root().text, "hi");
}

TEST(PickleTest, ContainersAreRead) {
  EXPECT_EQ(Parsed(")").root().kind, Kind::kTuple);
  EXPECT_EQ(Parsed("]").root().kind, Kind::kList);
  EXPECT_EQ(Parsed("}").root().kind, Kind::kDict);
  EXPECT_EQ(Parsed("NN\x86").root().items.size(), 2u);
  EXPECT_EQ(Parsed("N\x85").root().items.size(), 1u);
  EXPECT_EQ(Parsed("NNN\x87").root().items.size(), 3u);
  EXPECT_EQ(Parsed("(NNNNt").root().items.size(), 4u);
  EXPECT_EQ(Parsed("]Na").root().items.size(), 1u);
  EXPECT_EQ(Parsed("](NNe").root().items.size(), 2u);
  EXPECT_EQ(Parsed(Raw("}K\x01Ns")).root().items.size(), 2u);
  const Parsed dict(PickledDict({{PickledText("a"), "N"}, {PickledInteger(3), "\x88"}}));
  ASSERT_TRUE(dict.status().ok()) << dict.status();
  EXPECT_EQ((*(*dict).Find(dict.root(), "a"))->kind, Kind::kNone);
  EXPECT_EQ(*(*dict).Find(dict.root(), "b"), nullptr);
  EXPECT_EQ(Parsed("ccollections\nOrderedDict\n)R").root().kind, Kind::kDict);
}

TEST(PickleTest, TheMemoIsReadAndMaySharePlaces) {
  const Parsed twice(Raw("(\x8c\x01xq\x05h\x05r\x07\x00\x01\x00j\x07\x00\x01\x00t"));
  ASSERT_TRUE(twice.status().ok()) << twice.status();
  ASSERT_EQ(twice.root().items.size(), 3u);
  EXPECT_EQ(twice.root().items[0], twice.root().items[1]);
  EXPECT_EQ(twice.root().items[0], twice.root().items[2]);
  // Protocol 4: FRAME, MEMOIZE, STACK_GLOBAL.
  const std::string body =
      absl::StrCat(Raw("\x8c\x0b"), "collections\x94", Raw("\x8c\x0b"), "OrderedDict\x94\x93)R.");
  const std::string frame = Raw("\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00");
  ASSERT_EQ(body.size(), 0x20u);
  const std::string bytes = frame + body;
  const auto parsed = Pickle::Parse(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->at(parsed->root()).kind, Kind::kDict);
}

TEST(PickleTest, AValueThatHoldsItselfIsHarmless) {
  const Parsed list(
      Raw("]q\x00h\x00"
          "a"));
  ASSERT_TRUE(list.status().ok()) << list.status();
  EXPECT_THAT(list.root().items, ElementsAre((*list).root()));
}

TEST(PickleTest, TensorsAreRead) {
  const Parsed tensor(PickledTensor({.type = "BFloat16Storage",
                                     .storage = "12",
                                     .elements = 100,
                                     .offset = 4,
                                     .sizes = {3, 5},
                                     .strides = {1, 20}}));
  ASSERT_TRUE(tensor.status().ok()) << tensor.status();
  ASSERT_EQ(tensor.root().kind, Kind::kTensor);
  const TorchTensor& read = (*tensor).tensor((*tensor).root());
  EXPECT_EQ(read.type, TorchType::kBFloat16);
  EXPECT_EQ(read.storage, "12");
  EXPECT_EQ(read.storage_elements, 100u);
  EXPECT_EQ(read.offset, 4u);
  EXPECT_THAT(read.sizes, ElementsAre(3, 5));
  EXPECT_THAT(read.strides, ElementsAre(1, 20));
  EXPECT_EQ(read.elements(), 15u);
  EXPECT_EQ(TorchTypeName(TorchType::kHalf), "Half");
  EXPECT_EQ(TorchTypeBytes(TorchType::kLong), 8u);
}

TEST(PickleTest, ATensorBeyondItsStorageIsRefused) {
  const auto fails = [](RawTorchTensor tensor, const char* message) {
    const absl::Status status = Parsed(PickledTensor(tensor)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  const char* beyond = "does not fit its storage";
  fails({.elements = 11, .sizes = {3, 4}, .strides = {4, 1}}, beyond);
  fails({.elements = 12, .offset = 1, .sizes = {3, 4}, .strides = {4, 1}}, beyond);
  fails({.elements = 12, .sizes = {3, 4}, .strides = {5, 1}}, beyond);
  fails({.elements = 12, .offset = 13, .sizes = {0}, .strides = {1}}, beyond);
  fails({.elements = 12, .sizes = {3, 4}, .strides = {1}}, beyond);
  // 2^31-1 to the power of 3: the product overflows.
  fails({.elements = 12,
         .sizes = {INT32_MAX, INT32_MAX, INT32_MAX},
         .strides = {INT32_MAX, INT32_MAX, INT32_MAX}},
        beyond);
  fails({.elements = 12, .sizes = {INT32_MAX}, .strides = {0}}, "over a storage of 12");
  fails({.elements = 12, .sizes = {-1}, .strides = {1}}, "hold what is no size");
  fails({.elements = 12, .sizes = {1, 1, 1, 1, 1, 1, 1, 1, 1}, .strides = {1}},
        "are not up to 8 numbers");
  fails({.elements = 12, .offset = -1, .sizes = {1}, .strides = {1}},
        "not those of a plain tensor");
  fails({.elements = -1, .sizes = {1}, .strides = {1}}, "no storage");
  fails({.type = "CharStorage", .elements = 1, .sizes = {1}, .strides = {1}},
        "the global 'torch' 'CharStorage' is not one");
}

TEST(PickleTest, AStorageMayNotHaveALongName) {
  const auto named = [](size_t bytes) {
    return Parsed(PickledTensor({.storage = std::string(bytes, 's'),
                                 .elements = 4,
                                 .sizes = {4},
                                 .strides = {1}}))
        .status();
  };
  EXPECT_TRUE(named(256).ok()) << named(256);
  EXPECT_EQ(named(257).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(named(257).message()), HasSubstr("a storage's name is too long"));
}

TEST(PickleTest, ATensorMayHaveNoMetadata) {
  // The call of _rebuild_tensor_v2 with a seventh argument.
  const auto with = [](const std::string& metadata) {
    std::string value = PickledTensor({.elements = 4, .sizes = {4}, .strides = {1}});
    value.insert(value.size() - 2, metadata);  // Before the arguments' TUPLE and REDUCE.
    return Parsed(value).status();
  };
  EXPECT_TRUE(with("}").ok()) << with("}");
  for (const std::string& metadata : {PickledDict({{PickledText("conj"), "\x88"}}),
                                      std::string("N"), std::string("]"), std::string("\x88")}) {
    EXPECT_EQ(with(metadata).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(with(metadata).message()), HasSubstr("a tensor with metadata"));
  }
}

TEST(PickleTest, EverythingElseIsRefusedWithOpcodeAndOffset) {
  struct Case {
    std::string value;
    const char* message;
  };
  for (const Case& one : {
           Case{"cos\nsystem\n", "opcode 0x63 at offset 2: the global 'os' 'system'"},
           Case{"cbuiltins\neval\n", "'builtins' 'eval'"},
           Case{Raw("\x8c\x02os\x8c\x06system\x93"), "opcode 0x93 at offset 14: the global 'os'"},
           Case{"NN\x93", "a name that is no text"},
           Case{"c" + std::string(300, 'x'), "a name without end"},
           Case{"N0", "opcode 0x30 at offset 3: it is not one of those"},
           Case{"}b", "opcode 0x62"},                       // BUILD
           Case{"N)\x81", "opcode 0x81"},                   // NEWOBJ
           Case{"I1\n", "opcode 0x49"},                     // INT as text
           Case{"(cos\nsystem\no", "the global 'os'"},      // OBJ
           Case{"(ios\nsystem\n", "opcode 0x69"},           // INST
           Case{Raw("\x82\x01"), "opcode 0x82"},            // EXT1
           Case{Raw("B\x01\x00\x00\x00x"), "opcode 0x42"},  // BINBYTES
           Case{"N)R", "calls a None"},
           Case{"ccollections\nOrderedDict\nN\x85R", "calls OrderedDict with 1 arguments"},
           Case{"ctorch._utils\n_rebuild_tensor_v2\n)R", "not those of a plain tensor"},
           Case{"ctorch\nFloatStorage\n)R", "calls FloatStorage with 0"},
           Case{"NQ", "a persistent id that is no storage"},
           Case{"a", "the stack is empty"},
           Case{"N(a", "the stack is empty"},  // Below a mark lies what is not ours.
           Case{"Ns", "the stack is empty"},
           Case{"NNa", "needs a list and finds a None"},
           Case{"NNNs", "a None as a key"},
           Case{"]K\x01Ns", "needs a dict and finds a list"},
           Case{"}NNs", "a None as a key"},
           Case{"}(K\x01u", "a key without a value"},
           Case{"t", "there is no mark"},
           Case{"e", "there is no mark"},
           Case{"N\x86", "the stack is empty"},
           Case{Raw("h\x00"), "the memo has no 0"},
           Case{Raw("q\x00"), "the stack is empty"},
           Case{"NN", "STOP with 2 values"},
           Case{"", "STOP with 0 values"},
           Case{"N(", "STOP with 1 values"},
           Case{Raw("\x80\x02N"), "opcode 0x80 at offset 2: protocol 2"},
           Case{Raw("\x8a\x09\x01\x01\x01\x01\x01\x01\x01\x01\x01"), "more than 64 bits"},
           Case{Raw("X\x01\x00\x00\x00\xff"), "not UTF-8"},
           Case{Raw("\x95\xff\xff\xff\xff\xff\xff\xff\x7fN"), "a frame beyond the end"},
           Case{std::string(65, '('), "more than 64 marks"},
           Case{std::string(300'000, 'N'), "more than 262144 opcodes"},
       }) {
    const absl::Status status = Parsed(one.value).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.message));
  }
  EXPECT_THAT(std::string(Pickle::Parse("N.").status().message()), HasSubstr("has PROTO"));
  EXPECT_THAT(std::string(Pickle::Parse(Raw("\x80\x01N.")).status().message()),
              HasSubstr("protocol 1"));
  EXPECT_THAT(std::string(Pickle::Parse(Raw("\x80\x06N.")).status().message()),
              HasSubstr("protocol 6"));
}

TEST(PickleTest, EveryTruncationIsAnError) {
  const std::string bytes = PickleOf(
      PickledDict({{PickledText("a"), PickledTensor({.elements = 4, .sizes = {4}, .strides = {1}})},
                   {"K\x01", Raw("\x8a\x02\x01\x02")},
                   {"K\x02", Raw("G\x3f\xf8\x00\x00\x00\x00\x00\x00")}}));
  ASSERT_TRUE(Pickle::Parse(bytes).ok()) << Pickle::Parse(bytes).status();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const absl::Status status = Pickle::Parse(bytes.substr(0, size)).status();
    EXPECT_FALSE(status.ok()) << size;
  }
  EXPECT_EQ(Pickle::Parse("").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Pickle::Parse(Raw("\x80\x02N")).status().code(), absl::StatusCode::kDataLoss);
  for (const char* name : {"c", "ctorch", "ctorch\n", "ctorch\nFloat"}) {
    const absl::Status status = Pickle::Parse(Raw("\x80\x02") + name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("inside the opcode 0x63 at offset 2"));
  }
  // A text of 4 GiB - 1 that is not there.
  const absl::Status huge = Pickle::Parse(Raw("\x80\x02X\xff\xff\xff\xff.")).status();
  EXPECT_EQ(huge.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(huge.message()), HasSubstr("inside the opcode 0x58 at offset 2"));
}

TEST(PickleTest, LookupsNameWhatIsWrong) {
  const Parsed dict(PickledDict(
      {{PickledText("a"), "N"}, {PickledText("b"), "\x88"}, {PickledText("b"), "\x89"}}));
  const auto message = [](const auto& result) { return std::string(result.status().message()); };
  EXPECT_THAT(message((*dict).Find(dict.root(), "b")), HasSubstr("'b' stands twice"));
  EXPECT_THAT(message((*dict).Get(dict.root(), "a", Kind::kDict)),
              HasSubstr("'a' is a None, not a dict"));
  EXPECT_THAT(message((*dict).Get(dict.root(), "c", Kind::kDict)), HasSubstr("'c' is missing"));
  const Parsed text(PickledText("x"));
  EXPECT_THAT(message((*text).Find(text.root(), "k")), HasSubstr("a text stands where a dict"));
}

}  // namespace
}  // namespace okv
