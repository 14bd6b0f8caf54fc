#ifndef OKV_PROTO_FIELDS_H_
#define OKV_PROTO_FIELDS_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/check.h"

namespace okv {

// The byte encoding under every identity (page_layout.md, "Fields"): (tag u8, length u32 LE,
// bytes). Lengths make it unambiguous, tags keep two kinds of one content apart.

// Little-endian, wherever it runs; compilers make one store of it.
inline void StoreU32(uint32_t value, char* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<char>(value >> (8 * i));
}
inline void AppendU32(std::string* out, uint32_t value) {
  char bytes[4];
  StoreU32(value, bytes);
  out->append(bytes, sizeof(bytes));
}
// Each as AppendU32: headers have hundreds.
inline void AppendU32s(std::string* out, absl::Span<const uint32_t> values) {
  if constexpr (std::endian::native == std::endian::little) {
    out->append(reinterpret_cast<const char*>(values.data()), 4 * values.size());
  } else {
    for (const uint32_t value : values) AppendU32(out, value);
  }
}
inline void AppendU64(std::string* out, uint64_t value) {
  AppendU32(out, static_cast<uint32_t>(value));
  AppendU32(out, static_cast<uint32_t>(value >> 32));
}

inline constexpr uint64_t kFieldBytesMax = 0xffffffff;

// Writes fields. Thread-compatible.
class FieldWriter {
 public:
  explicit FieldWriter(std::string* out) : out_(out) {}
  void Bytes(uint8_t tag, absl::string_view bytes) {
    OKV_CHECK(bytes.size() <= kFieldBytesMax);
    out_->push_back(static_cast<char>(tag));
    AppendU32(out_, static_cast<uint32_t>(bytes.size()));
    out_->append(bytes.data(), bytes.size());
  }
  void U32(uint8_t tag, uint32_t value) {
    std::string bytes;
    AppendU32(&bytes, value);
    Bytes(tag, bytes);
  }
  void U64(uint8_t tag, uint64_t value) {
    std::string bytes;
    AppendU64(&bytes, value);
    Bytes(tag, bytes);
  }
  void Double(uint8_t tag, double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    U64(tag, bits);
  }

 private:
  std::string* const out_;
};

// Reads fixed little-endian values and fields, front to back; the first thing that does not fit
// makes ok() false for good, and every later read gives zero. Allocates nothing by a claimed
// length.
// Thread-compatible.
class FieldReader {
 public:
  explicit FieldReader(absl::string_view bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  // Everything was read, and all of it fitted.
  bool done() const { return ok_ && rest_.empty(); }
  absl::string_view rest() const { return rest_; }

  absl::string_view Take(size_t count) {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const absl::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  uint64_t Unsigned(size_t bytes_count) {
    const absl::string_view bytes = Take(bytes_count);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
    }
    return value;
  }
  // `count` values of Unsigned(4); none when they do not all fit.
  std::vector<uint32_t> U32s(size_t count) {
    if (count > rest_.size() / 4) ok_ = false;
    const absl::string_view bytes = ok_ ? Take(4 * count) : absl::string_view();
    std::vector<uint32_t> values(bytes.size() / 4);
    if constexpr (std::endian::native == std::endian::little) {
      if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    } else {
      FieldReader reader(bytes);
      for (uint32_t& value : values) value = static_cast<uint32_t>(reader.Unsigned(4));
    }
    return values;
  }
  // The field with this tag, at most bytes_max long.
  absl::string_view Bytes(uint8_t tag, size_t bytes_max) {
    if (Unsigned(1) != tag) ok_ = false;
    const uint64_t size = Unsigned(4);
    if (size > bytes_max) ok_ = false;
    return Take(size);
  }
  uint32_t U32(uint8_t tag) { return static_cast<uint32_t>(FixedField(tag, 4)); }
  uint64_t U64(uint8_t tag) { return FixedField(tag, 8); }
  double Double(uint8_t tag) {
    const uint64_t bits = U64(tag);
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

 private:
  uint64_t FixedField(uint8_t tag, size_t bytes_count) {
    const absl::string_view bytes = Bytes(tag, bytes_count);
    if (bytes.size() != bytes_count) ok_ = false;
    return ok_ ? FieldReader(bytes).Unsigned(bytes_count) : 0;
  }

  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace okv

#endif  // OKV_PROTO_FIELDS_H_
