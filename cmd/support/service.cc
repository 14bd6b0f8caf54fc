#include "cmd/support/service.h"

#include <pthread.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace okv {
namespace {

int Fail(absl::string_view name, absl::string_view what) {
  std::fprintf(stderr, "%s\n", absl::StrCat(name, ": error: ", what).c_str());
  return 1;
}

}  // namespace

int RunService(absl::string_view name, int argc, char** argv,
               const std::function<absl::Status(const StopWaiter& wait_for_stop)>& service) {
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) return Fail(name, absl::StrCat("unexpected argument '", rest[1], "'"));
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const absl::Status status = service([&stop] {
    int signal = 0;
    sigwait(&stop, &signal);
    return signal;
  });
  return status.ok() ? 0 : Fail(name, status.message());
}

}  // namespace okv
