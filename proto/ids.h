#ifndef OKV_PROTO_IDS_H_
#define OKV_PROTO_IDS_H_

#include <compare>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/sha256.h"

namespace okv {

// An integer that converts to no other: block indexes, slots and write ids do not mix.
template <typename Tag, typename T>
class StrongInt {
 public:
  using ValueType = T;
  constexpr StrongInt() = default;
  constexpr explicit StrongInt(T value) : value_(value) {}
  constexpr T value() const { return value_; }
  constexpr auto operator<=>(const StrongInt&) const = default;

  template <typename H>
  friend H AbslHashValue(H h, const StrongInt& id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  T value_ = 0;
};

// Position of a block in its sequence: tokens [64 i, 64 i + 64).
using BlockIndex = StrongInt<struct BlockIndexTag, uint32_t>;
// One attempt to write one object; given by the control plane's Reserve, never reused.
using WriteId = StrongInt<struct WriteIdTag, uint64_t>;

// How an object's payload is encoded. Values are on the wire and on disk: never renumber.
enum class Codec : uint8_t { kInt2 = 1, kBf16 = 2 };
inline constexpr Codec kCodecs[] = {Codec::kInt2, Codec::kBf16};
inline bool IsCodec(uint32_t value) { return value == 1 || value == 2; }
inline absl::string_view CodecName(Codec codec) { return codec == Codec::kInt2 ? "int2" : "bf16"; }

// What is stored: one block in one codec.
struct ObjectId {
  BlockKey key;
  Codec codec = Codec::kInt2;

  // For people: "int2 object 1a40affd...".
  std::string Name() const { return absl::StrCat(CodecName(codec), " object ", key.Short()); }

  auto operator<=>(const ObjectId&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const ObjectId& id) {
    return H::combine(std::move(h), id.key, static_cast<uint8_t>(id.codec));
  }
};

}  // namespace okv

#endif  // OKV_PROTO_IDS_H_
