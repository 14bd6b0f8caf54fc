#include "proto/ticket.h"

#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/fields.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::ExampleReservation;
using examples::ExampleTicket;
using examples::kNowWallUs;
using examples::kTicketKey;
using examples::StatusIs;
using ::testing::HasSubstr;
using ::testing::Not;

auto Denied(const std::string& why) { return StatusIs(absl::StatusCode::kPermissionDenied, why); }

std::string Signed(const std::string& body) {
  const auto mac = HmacSha256(kTicketKey, body);
  return body + std::string(mac.begin(), mac.end());
}

// A sealed ticket's or reservation's status when opened.
absl::Status Open(bool is_ticket, absl::string_view sealed, absl::string_view key, int64_t now) {
  return is_ticket ? OpenTicket(sealed, key, now).status()
                   : OpenReservation(sealed, key, now).status();
}

std::string Seal(bool is_ticket) {
  return is_ticket ? SealTicket(ExampleTicket(), kTicketKey)
                   : SealReservation(ExampleReservation(), kTicketKey);
}

TEST(TicketTest, SealsAreTheGoldenFiles) {
  golden::ExpectGolden("ticket", "SealTicket() of examples::ExampleTicket()", Seal(true));
  golden::ExpectGolden("reservation", "SealReservation() of examples::ExampleReservation()",
                       Seal(false));
}

TEST(TicketTest, OpenReadsWhatSealWrote) {
  const auto ticket = OpenTicket(Seal(true), kTicketKey, kNowWallUs);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->tenant, ExampleTicket().tenant);
  EXPECT_EQ(ticket->format_id, ExampleTicket().format_id);
  EXPECT_EQ(ticket->expires_wall_us, ExampleTicket().expires_wall_us);

  const Reservation expected = ExampleReservation();
  const auto reservation = OpenReservation(Seal(false), kTicketKey, kNowWallUs);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  EXPECT_EQ(reservation->tenant, expected.tenant);
  EXPECT_EQ(reservation->format_id, expected.format_id);
  EXPECT_EQ(reservation->object, expected.object);
  EXPECT_EQ(reservation->node_id, expected.node_id);
  EXPECT_EQ(reservation->write_id, expected.write_id);
  EXPECT_EQ(reservation->expires_wall_us, expected.expires_wall_us);
}

TEST(TicketTest, TheLongestTenantOpens) {
  Ticket ticket = ExampleTicket();
  ticket.tenant = std::string(kTicketTextBytesMax, 't');
  EXPECT_TRUE(OpenTicket(SealTicket(ticket, kTicketKey), kTicketKey, kNowWallUs).ok());
}

TEST(TicketTest, AnExpiredSealIsDenied) {
  const int64_t expiry = ExampleTicket().expires_wall_us;
  EXPECT_TRUE(OpenTicket(Seal(true), kTicketKey, expiry - 1).ok());
  EXPECT_THAT(Open(true, Seal(true), kTicketKey, expiry), Denied("ticket expired 0 ms ago"));
  EXPECT_THAT(Open(true, Seal(true), kTicketKey, expiry + 5000), Denied("expired 5 ms ago"));
}

TEST(TicketTest, AnExpiredReservationIsAborted) {
  const int64_t expiry = ExampleReservation().expires_wall_us;
  EXPECT_TRUE(OpenReservation(Seal(false), kTicketKey, expiry - 1).ok());
  const absl::Status late = Open(false, Seal(false), kTicketKey, expiry + 5000);
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(late.message()), HasSubstr("reservation expired 5 ms ago"));
}

TEST(TicketTest, ExpiryAtTheEdgesOfTimeIsDeniedWithoutOverflow) {
  Ticket ticket = ExampleTicket();
  ticket.expires_wall_us = std::numeric_limits<int64_t>::min();
  EXPECT_THAT(
      Open(true, SealTicket(ticket, kTicketKey), kTicketKey, std::numeric_limits<int64_t>::max()),
      Denied("expired"));
}

TEST(TicketTest, AnotherKeysSealIsDenied) {
  for (const bool is_ticket : {true, false}) {
    std::string other_key = kTicketKey;
    other_key.back() = static_cast<char>(other_key.back() ^ 1);
    EXPECT_THAT(Open(is_ticket, Seal(is_ticket), other_key, kNowWallUs),
                Denied("has a bad signature"));
  }
}

TEST(TicketTest, ASealOfTheOtherKindIsDenied) {
  EXPECT_THAT(Open(true, Seal(false), kTicketKey, kNowWallUs), Denied("ticket is malformed"));
  EXPECT_THAT(Open(false, Seal(true), kTicketKey, kNowWallUs), Denied("reservation is malformed"));
}

TEST(TicketTest, WithoutAKeyEverySealIsDenied) {
  const std::string body(Seal(true).substr(0, Seal(true).size() - 32));
  const auto mac = HmacSha256("", body);
  EXPECT_THAT(Open(true, body + std::string(mac.begin(), mac.end()), "", kNowWallUs),
              Denied("without a ticket key"));
}

TEST(TicketTest, EveryTruncationAndTrailingByteIsDenied) {
  for (const bool is_ticket : {true, false}) {
    const std::string sealed = Seal(is_ticket);
    for (size_t size = 0; size < sealed.size(); ++size) {
      EXPECT_THAT(Open(is_ticket, sealed.substr(0, size), kTicketKey, kNowWallUs), Denied(""))
          << size;
    }
    EXPECT_THAT(Open(is_ticket, sealed + '\0', kTicketKey, kNowWallUs), Denied("bad signature"));
  }
}

TEST(TicketTest, EveryFlippedBitIsDenied) {
  for (const bool is_ticket : {true, false}) {
    const std::string sealed = Seal(is_ticket);
    for (size_t bit = 0; bit < sealed.size() * 8; ++bit) {
      std::string flipped = sealed;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      EXPECT_THAT(Open(is_ticket, flipped, kTicketKey, kNowWallUs), Denied("")) << bit;
    }
  }
}

// A signature does not make a body well-formed: a control plane of another version signs too.
TEST(TicketTest, ASignedBodyThatIsMalformedIsDenied) {
  for (const bool is_ticket : {true, false}) {
    const std::string sealed = Seal(is_ticket);
    const std::string body = sealed.substr(0, sealed.size() - 32);
    ASSERT_EQ(Signed(body), sealed);
    for (size_t size = 5; size < body.size(); ++size) {
      EXPECT_THAT(Open(is_ticket, Signed(body.substr(0, size)), kTicketKey, kNowWallUs),
                  Denied("is malformed"))
          << size;
    }
    EXPECT_THAT(Open(is_ticket, Signed(body + '\0'), kTicketKey, kNowWallUs),
                Denied("is malformed"));
  }
}

TEST(TicketTest, ASignedUnknownCodecIsDenied) {
  Reservation reservation = ExampleReservation();
  reservation.object.codec = static_cast<Codec>(3);
  EXPECT_THAT(Open(false, SealReservation(reservation, kTicketKey), kTicketKey, kNowWallUs),
              Denied("is malformed"));
}

TEST(TicketTest, ASignedTenantBeyondTheLimitIsDenied) {
  std::string body = "OKVT1";
  FieldWriter fields(&body);
  fields.Bytes(1, std::string(kTicketTextBytesMax + 1, 't'));
  fields.Bytes(2, ExampleTicket().format_id.view());
  fields.U64(3, static_cast<uint64_t>(ExampleTicket().expires_wall_us));
  EXPECT_THAT(Open(true, Signed(body), kTicketKey, kNowWallUs), Denied("is malformed"));
}

TEST(TicketTest, ErrorsHoldNeitherKeyNorSignature) {
  const std::string sealed = Seal(true);
  std::string forged = sealed;
  forged.back() = static_cast<char>(forged.back() ^ 1);
  for (const absl::Status& status :
       {Open(true, forged, kTicketKey, kNowWallUs), Open(true, "junk", kTicketKey, kNowWallUs),
        Open(true, sealed, kTicketKey, std::numeric_limits<int64_t>::max())}) {
    EXPECT_THAT(status.ToString(), Not(HasSubstr(kTicketKey)));
    EXPECT_THAT(status.ToString(), Not(HasSubstr(sealed.substr(sealed.size() - 32, 8))));
  }
}

TEST(TicketTest, RandomSignedBodiesNeverCrash) {
  std::mt19937_64 random(examples::Seed());
  const std::string seals[] = {Seal(false), Seal(true)};
  for (int i = 0; i < 5000; ++i) {
    const bool is_ticket = random() % 2 == 0;
    const std::string& sealed = seals[is_ticket];
    std::string body = sealed.substr(0, sealed.size() - 32);
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      body[5 + random() % (body.size() - 5)] = static_cast<char>(random());
    }
    const absl::Status status = Open(is_ticket, Signed(body), kTicketKey, kNowWallUs);
    // Aborted: the edit hit a reservation's expiry.
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kPermissionDenied ||
                (!is_ticket && status.code() == absl::StatusCode::kAborted))
        << status;
  }
}

TEST(TicketDeathTest, SealingWithoutAKeyIsABrokenInvariant) {
  EXPECT_DEATH(SealTicket(ExampleTicket(), ""), "OKV_CHECK failed");
}

}  // namespace
}  // namespace okv
