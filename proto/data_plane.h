#ifndef OKV_PROTO_DATA_PLANE_H_
#define OKV_PROTO_DATA_PLANE_H_

#include <cstddef>
#include <cstdint>

namespace okv {

// Two processes talk when the majors are equal and the minors differ by at most one; otherwise the
// answer is FAILED_PRECONDITION naming both versions.
//
// Major 2: payloads over TCP in messages of 512 KiB, which crash a receiver of major 1
// (client/transport/ucx_transport.h). Minor 1 adds ranges: a fetch of a part of each page, a put of
// a part of a block; and complaints.
inline constexpr uint32_t kProtocolMajor = 2;
inline constexpr uint32_t kProtocolMinor = 1;
// A peer of an older minor does without.
inline constexpr uint32_t kProtocolMinorRanges = 1;
inline constexpr uint32_t kProtocolMinorComplaints = 1;
constexpr bool ProtocolCompatible(uint32_t major, uint32_t minor) {
  return major == kProtocolMajor && minor <= kProtocolMinor + 1 && kProtocolMinor <= minor + 1;
}

// Active-message ids, one per message of data_plane.proto. On the wire: never renumber.
enum class MessageType : uint16_t {
  kHello = 1,
  kHelloReply = 2,
  kFetchRequest = 3,
  kObjectDelivery = 4,  // Bulk.
  kObjectFailure = 5,
  kPutOffer = 6,  // Bulk.
  kPutReply = 7,
  kComplaint = 8,      // Since minor 1.
  kObjectHeaders = 9,  // To who asked for objects that may come together.
};
inline constexpr uint16_t kMessageTypeMax = 9;

inline constexpr uint32_t kObjectsPerFetchMax = 4096;
// Objects in one delivery: their headers, of 1.3 KB at 36 layers of 8 heads, fit one message.
inline constexpr uint32_t kObjectsPerDeliveryMax = 64;
// A control message: 4,096 objects x about 42 B fit four times.
inline constexpr size_t kMessageBytesMax = size_t{1} << 20;

}  // namespace okv

#endif  // OKV_PROTO_DATA_PLANE_H_
