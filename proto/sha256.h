#ifndef OKV_PROTO_SHA256_H_
#define OKV_PROTO_SHA256_H_

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// A SHA-256 digest. Tagged, so that a format id is not a block key.
template <typename Tag>
struct Digest {
  std::array<uint8_t, 32> bytes{};

  auto operator<=>(const Digest&) const = default;
  bool is_zero() const { return bytes == std::array<uint8_t, 32>{}; }
  absl::string_view view() const {
    return absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  // 64 lower-case hex digits.
  std::string Hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (const uint8_t byte : bytes) {
      hex += kDigits[byte >> 4];
      hex += kDigits[byte & 15];
    }
    return hex;
  }
  // The first 12 hex digits, for logs.
  std::string Short() const { return Hex().substr(0, 12); }

  // kInvalidArgument unless `raw` is 32 bytes.
  static absl::StatusOr<Digest> FromBytes(absl::string_view raw) {
    if (raw.size() != 32) return absl::InvalidArgumentError("a digest is 32 bytes long");
    Digest digest;
    std::memcpy(digest.bytes.data(), raw.data(), 32);
    return digest;
  }

  template <typename H>
  friend H AbslHashValue(H h, const Digest& digest) {
    uint64_t word;  // A digest is uniform already: eight bytes of it are a hash.
    std::memcpy(&word, digest.bytes.data(), sizeof(word));
    return H::combine(std::move(h), word);
  }
};

using FormatId = Digest<struct FormatIdTag>;
using BlockKey = Digest<struct BlockKeyTag>;
using RotationHash = Digest<struct RotationHashTag>;

// SHA-256 of `data` (OpenSSL).
std::array<uint8_t, 32> Sha256(absl::string_view data);
// HMAC-SHA-256 (OpenSSL).
std::array<uint8_t, 32> HmacSha256(absl::string_view key, absl::string_view data);

}  // namespace okv

#endif  // OKV_PROTO_SHA256_H_
