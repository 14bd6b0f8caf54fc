#include "proto/ticket.h"

#include <openssl/crypto.h>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/fields.h"

namespace okv {
namespace {

constexpr absl::string_view kTicketMagic = "OKVT1";
constexpr absl::string_view kReservationMagic = "OKVR1";
constexpr size_t kMacBytes = 32;

// Field tags, on the wire: never renumber.
enum Tag : uint8_t {
  kTenant = 1,
  kFormatId = 2,
  kExpires = 3,
  kKey = 4,
  kCodec = 5,
  kNodeId = 6,
  kWriteId = 7,
};

std::string Sign(std::string body, absl::string_view ticket_key) {
  OKV_CHECK(!ticket_key.empty());
  const std::array<uint8_t, 32> mac = HmacSha256(ticket_key, body);
  body.append(reinterpret_cast<const char*>(mac.data()), mac.size());
  return body;
}

absl::Status Denied(absl::string_view what, absl::string_view why) {
  return absl::PermissionDeniedError(absl::StrCat(what, " ", why));
}

// The signed body behind the magic, or why not.
absl::StatusOr<absl::string_view> CheckSignature(absl::string_view what, absl::string_view magic,
                                                 absl::string_view sealed,
                                                 absl::string_view ticket_key) {
  if (ticket_key.empty()) return Denied(what, "cannot be checked without a ticket key");
  if (sealed.size() < magic.size() + kMacBytes || sealed.substr(0, magic.size()) != magic) {
    return Denied(what, "is malformed");
  }
  const absl::string_view body = sealed.substr(0, sealed.size() - kMacBytes);
  const std::array<uint8_t, 32> mac = HmacSha256(ticket_key, body);
  if (CRYPTO_memcmp(mac.data(), sealed.data() + body.size(), kMacBytes) != 0) {
    return Denied(what, "has a bad signature");
  }
  return body.substr(magic.size());
}

std::string ExpiredText(int64_t expires_wall_us, int64_t now_wall_us) {
  // Unsigned: a signed ticket may still say INT64_MIN.
  const uint64_t late_us =
      static_cast<uint64_t>(now_wall_us) - static_cast<uint64_t>(expires_wall_us);
  return absl::StrCat("expired ", late_us / 1000, " ms ago");
}

}  // namespace

std::string SealTicket(const Ticket& ticket, absl::string_view ticket_key) {
  OKV_CHECK(ticket.tenant.size() <= kTicketTextBytesMax);
  std::string body(kTicketMagic);
  FieldWriter fields(&body);
  fields.Bytes(kTenant, ticket.tenant);
  fields.Bytes(kFormatId, ticket.format_id.view());
  fields.U64(kExpires, static_cast<uint64_t>(ticket.expires_wall_us));
  return Sign(std::move(body), ticket_key);
}

absl::StatusOr<Ticket> OpenTicket(absl::string_view sealed, absl::string_view ticket_key,
                                  int64_t now_wall_us) {
  auto body = CheckSignature("ticket", kTicketMagic, sealed, ticket_key);
  if (!body.ok()) return body.status();
  FieldReader reader(*body);
  Ticket ticket;
  ticket.tenant = std::string(reader.Bytes(kTenant, kTicketTextBytesMax));
  const absl::string_view format_id = reader.Bytes(kFormatId, 32);
  ticket.expires_wall_us = static_cast<int64_t>(reader.U64(kExpires));
  if (!reader.done() || format_id.size() != 32) return Denied("ticket", "is malformed");
  ticket.format_id = *FormatId::FromBytes(format_id);
  if (now_wall_us >= ticket.expires_wall_us) {
    return Denied("ticket", ExpiredText(ticket.expires_wall_us, now_wall_us));
  }
  return ticket;
}

std::string SealReservation(const Reservation& reservation, absl::string_view ticket_key) {
  OKV_CHECK(reservation.tenant.size() <= kTicketTextBytesMax);
  OKV_CHECK(reservation.node_id.size() <= kTicketTextBytesMax);
  std::string body(kReservationMagic);
  FieldWriter fields(&body);
  fields.Bytes(kTenant, reservation.tenant);
  fields.Bytes(kFormatId, reservation.format_id.view());
  fields.U64(kExpires, static_cast<uint64_t>(reservation.expires_wall_us));
  fields.Bytes(kKey, reservation.object.key.view());
  fields.U32(kCodec, static_cast<uint32_t>(reservation.object.codec));
  fields.Bytes(kNodeId, reservation.node_id);
  fields.U64(kWriteId, reservation.write_id.value());
  return Sign(std::move(body), ticket_key);
}

absl::StatusOr<Reservation> OpenReservation(absl::string_view sealed, absl::string_view ticket_key,
                                            int64_t now_wall_us) {
  auto body = CheckSignature("reservation", kReservationMagic, sealed, ticket_key);
  if (!body.ok()) return body.status();
  FieldReader reader(*body);
  Reservation reservation;
  reservation.tenant = std::string(reader.Bytes(kTenant, kTicketTextBytesMax));
  const absl::string_view format_id = reader.Bytes(kFormatId, 32);
  reservation.expires_wall_us = static_cast<int64_t>(reader.U64(kExpires));
  const absl::string_view key = reader.Bytes(kKey, 32);
  const uint32_t codec = reader.U32(kCodec);
  reservation.node_id = std::string(reader.Bytes(kNodeId, kTicketTextBytesMax));
  reservation.write_id = WriteId(reader.U64(kWriteId));
  if (!reader.done() || format_id.size() != 32 || key.size() != 32 || !IsCodec(codec)) {
    return Denied("reservation", "is malformed");
  }
  reservation.format_id = *FormatId::FromBytes(format_id);
  reservation.object = {.key = *BlockKey::FromBytes(key), .codec = static_cast<Codec>(codec)};
  if (now_wall_us >= reservation.expires_wall_us) {
    return absl::AbortedError(
        absl::StrCat("reservation ", ExpiredText(reservation.expires_wall_us, now_wall_us)));
  }
  return reservation;
}

}  // namespace okv
