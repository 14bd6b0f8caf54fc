#include "proto/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "proto/check.h"

namespace okv {

std::array<uint8_t, 32> Sha256(absl::string_view data) {
  std::array<uint8_t, 32> digest;
  unsigned int size = 0;
  OKV_CHECK(EVP_Digest(data.data(), data.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1);
  OKV_CHECK(size == digest.size());
  return digest;
}

std::array<uint8_t, 32> HmacSha256(absl::string_view key, absl::string_view data) {
  std::array<uint8_t, 32> mac;
  unsigned int size = 0;
  OKV_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                 reinterpret_cast<const unsigned char*>(data.data()), data.size(), mac.data(),
                 &size) != nullptr);
  OKV_CHECK(size == mac.size());
  return mac;
}

}  // namespace okv
