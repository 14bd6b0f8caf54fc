#ifndef OKV_TESTS_PROTO_EXAMPLES_H_
#define OKV_TESTS_PROTO_EXAMPLES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "proto/block_key.h"
#include "proto/format.h"
#include "proto/object.h"
#include "proto/rotation_set.h"
#include "proto/ticket.h"

namespace okv::examples {

// The values that proto/page_layout.md shows and tests/golden/ pins: one model with one layer, two
// KV heads, head_dim 64, two groups of 32 channels.

inline constexpr char kTicketKey[] = "0123456789abcdef0123456789abcdef";
inline constexpr int64_t kNowWallUs = 1'700'000'000'000'000;

RotationSet Rotations();
Format ExampleFormat();

// Token i is 1000 + i.
std::vector<uint32_t> Tokens(size_t count);
// The keys of three blocks of Tokens(192) with the salt "acme" and no extra key.
std::vector<BlockKey> Keys();

// An int2 run, packed here by the formulas of page_layout.md alone. K code of (t, ch) is
// (t + t / 8 + ch + ch / 16 + head) % 4, V code (t + t / 8 + ch / 2 + ch / 8 + ch / 16 + head) % 4.
std::vector<uint8_t> Int2Run(uint32_t head);
// K[t][ch] = t, V[t][ch] = -ch.
std::vector<uint8_t> Bf16Run();

// The int2 object of block 1: its runs are Int2Run(0) and Int2Run(1).
std::vector<uint8_t> Payload();
ObjectHeader Header();

Ticket ExampleTicket();
Reservation ExampleReservation();

// What is random in a test comes from here: OKV_TEST_SEED when it is set, otherwise a new seed,
// printed.
uint64_t Seed();

MATCHER_P2(StatusIs, code, text, "") {
  *result_listener << "which is " << arg.ToString();
  return arg.code() == code && absl::StrContains(std::string(arg.message()), text);
}

}  // namespace okv::examples

#endif  // OKV_TESTS_PROTO_EXAMPLES_H_
