#include "proto/block_key.h"

#include "proto/check.h"
#include "proto/fields.h"
#include "proto/format.h"

namespace okv {
namespace {

// Field tags, in every block key: never renumber.
enum Tag : uint8_t {
  kVersion = 1,
  kFormatId = 2,
  kTenantSalt = 3,
  kNoParent = 4,
  kParent = 5,
  kTokens = 6,
  kExtraKey = 16,  // Plus ExtraKey::Kind.
};
constexpr uint32_t kKeyVersion = 1;

}  // namespace

BlockKey ComputeBlockKey(const BlockKeyInput& input) {
  OKV_CHECK(input.tokens.size() == kBlockTokens);
  std::string bytes;
  FieldWriter fields(&bytes);
  fields.U32(kVersion, kKeyVersion);
  fields.Bytes(kFormatId, input.format_id.view());
  fields.Bytes(kTenantSalt, input.tenant_salt);
  if (input.parent.has_value()) {
    fields.Bytes(kParent, input.parent->view());
  } else {
    fields.Bytes(kNoParent, "");
  }
  std::string tokens;
  AppendU32s(&tokens, input.tokens);
  fields.Bytes(kTokens, tokens);
  for (const ExtraKey& extra : input.extra_keys) {
    fields.Bytes(static_cast<uint8_t>(kExtraKey + static_cast<uint8_t>(extra.kind)), extra.value);
  }
  return BlockKey{Sha256(bytes)};
}

std::vector<BlockKey> ComputeBlockKeys(const FormatId& format_id, absl::string_view tenant_salt,
                                       absl::Span<const uint32_t> tokens,
                                       absl::Span<const ExtraKey> extra_keys) {
  std::vector<BlockKey> keys;
  for (size_t first = 0; first + kBlockTokens <= tokens.size(); first += kBlockTokens) {
    keys.push_back(ComputeBlockKey(
        {.format_id = format_id,
         .tenant_salt = tenant_salt,
         .parent = keys.empty() ? std::nullopt : std::optional<BlockKey>(keys.back()),
         .tokens = tokens.subspan(first, kBlockTokens),
         .extra_keys = extra_keys}));
  }
  return keys;
}

}  // namespace okv
