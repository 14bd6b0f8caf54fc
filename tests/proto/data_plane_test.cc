#include "proto/data_plane.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(DataPlaneTest, OneMinorVersionEitherWayIsCompatible) {
  EXPECT_TRUE(ProtocolCompatible(kProtocolMajor, kProtocolMinor));
  EXPECT_TRUE(ProtocolCompatible(kProtocolMajor, kProtocolMinor + 1));
  EXPECT_FALSE(ProtocolCompatible(kProtocolMajor, kProtocolMinor + 2));
  EXPECT_FALSE(ProtocolCompatible(kProtocolMajor, UINT32_MAX));
  if (kProtocolMinor >= 1) {
    EXPECT_TRUE(ProtocolCompatible(kProtocolMajor, kProtocolMinor - 1));
  }
  if (kProtocolMinor >= 2) {
    EXPECT_FALSE(ProtocolCompatible(kProtocolMajor, kProtocolMinor - 2));
  }
}

TEST(DataPlaneTest, AnotherMajorVersionIsNot) {
  EXPECT_FALSE(ProtocolCompatible(kProtocolMajor + 1, kProtocolMinor));
  EXPECT_FALSE(ProtocolCompatible(kProtocolMajor - 1, kProtocolMinor));
}

TEST(DataPlaneTest, MessageIdsAreThoseOnTheWire) {
  EXPECT_EQ(static_cast<int>(MessageType::kHello), 1);
  EXPECT_EQ(static_cast<int>(MessageType::kHelloReply), 2);
  EXPECT_EQ(static_cast<int>(MessageType::kFetchRequest), 3);
  EXPECT_EQ(static_cast<int>(MessageType::kObjectDelivery), 4);
  EXPECT_EQ(static_cast<int>(MessageType::kObjectFailure), 5);
  EXPECT_EQ(static_cast<int>(MessageType::kPutOffer), 6);
  EXPECT_EQ(static_cast<int>(MessageType::kPutReply), 7);
  EXPECT_EQ(static_cast<int>(MessageType::kComplaint), 8);
  EXPECT_EQ(static_cast<int>(MessageType::kObjectHeaders), kMessageTypeMax);
}

}  // namespace
}  // namespace okv
