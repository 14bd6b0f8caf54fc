#include "proto/sha256.h"

#include "gtest/gtest.h"
#include "proto/ids.h"

namespace okv {
namespace {

// FIPS 180-2, appendix B.1.
TEST(Sha256Test, GivesThePublishedDigest) {
  EXPECT_EQ(FormatId{Sha256("abc")}.Hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// RFC 4231, test cases 2 and 6 (a key longer than a SHA-256 block).
TEST(Sha256Test, HmacGivesThePublishedCodes) {
  EXPECT_EQ(FormatId{HmacSha256("Jefe", "what do ya want for nothing?")}.Hex(),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(FormatId{HmacSha256(std::string(131, '\xaa'),
                                "Test Using Larger Than Block-Size Key - Hash Key First")}
                .Hex(),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(DigestTest, FromBytesTakes32BytesOnly) {
  const BlockKey key{Sha256("abc")};
  const auto read = BlockKey::FromBytes(key.view());
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(*read, key);
  for (const size_t size : {0, 31, 33}) {
    EXPECT_EQ(BlockKey::FromBytes(std::string(size, 'x')).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
}

TEST(DigestTest, PrintsItself) {
  const BlockKey key{Sha256("abc")};
  EXPECT_EQ(key.Short(), "ba7816bf8f01");
  EXPECT_FALSE(key.is_zero());
  EXPECT_TRUE(BlockKey{}.is_zero());
}

TEST(CodecTest, OnlyOneAndTwoAreCodecs) {
  EXPECT_FALSE(IsCodec(0));
  EXPECT_TRUE(IsCodec(1));
  EXPECT_TRUE(IsCodec(2));
  EXPECT_FALSE(IsCodec(3));
  EXPECT_FALSE(IsCodec(257));
  EXPECT_EQ(CodecName(Codec::kInt2), "int2");
  EXPECT_EQ(CodecName(Codec::kBf16), "bf16");
}

}  // namespace
}  // namespace okv
