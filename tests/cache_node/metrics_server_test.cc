#include "client/metrics_server.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv {
namespace {

TEST(MetricsServerTest, ServesTheTextOnMetricsOnly) {
  const auto server = MetricsServer::Start("127.0.0.1:0", [] { return "okv_up 1\n"; });
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = (*server)->address();
  EXPECT_FALSE(absl::EndsWith(address, ":0"));
  EXPECT_EQ(testing_support::HttpGet(address, "/metrics"), "okv_up 1\n");
  EXPECT_EQ(testing_support::HttpGet(address, "/metrics?a=b"), "okv_up 1\n");
  EXPECT_FALSE(absl::StrContains(testing_support::HttpGet(address, "/other"), "okv_up"));
}

TEST(MetricsServerTest, APortInUseIsUnavailableAndNamed) {
  const auto first = MetricsServer::Start("127.0.0.1:0", [] { return ""; });
  ASSERT_TRUE(first.ok());
  const auto second = MetricsServer::Start((*first)->address(), [] { return ""; });
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_TRUE(absl::StrContains(second.status().message(), (*first)->address()));
}

TEST(MetricsServerTest, AnAddressThatIsNoneIsInvalid) {
  EXPECT_TRUE(absl::IsInvalidArgument(MetricsServer::Start("nowhere", [] { return ""; }).status()));
}

}  // namespace
}  // namespace okv
