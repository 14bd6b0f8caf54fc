#ifndef OKV_CMD_BENCH_OBJECT_READER_H_
#define OKV_CMD_BENCH_OBJECT_READER_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cluster.h"
#include "client/node_session.h"
#include "cmd/bench/local_service.h"
#include "proto/object.h"

namespace okv {

// One pass over all objects: what it took.
struct ReadPass {
  double seconds = 0;
  std::vector<double> request_seconds;
  double cpu_seconds = 0;  // Of the reader and the node.
};

// Fetches objects from a LocalService, a request after the other, the way a worker does and the way
// one would whose GPU verifies: with Cluster::Fetch, and with the session below it, which hands out
// payloads whose checksums nobody has looked at. Thread-compatible. The service outlives it.
class ObjectReader {
 public:
  static absl::StatusOr<std::unique_ptr<ObjectReader>> Create(LocalService* service);
  ~ObjectReader();

  // `request_objects` items to a request. The first error of any item.
  absl::StatusOr<ReadPass> ReadVerified(absl::Span<const FetchItem> items, size_t request_objects);
  // The same without verification; headers() has the items' afterwards.
  absl::StatusOr<ReadPass> ReadUnverified(absl::Span<const FetchItem> items,
                                          size_t request_objects);
  const std::vector<ObjectHeader>& headers() const { return headers_; }

 private:
  ObjectReader(LocalService* service, std::shared_ptr<NodeSession> session)
      : service_(service), session_(std::move(session)) {}
  absl::Status FetchUnverified(absl::Span<const FetchItem> items, size_t first);
  template <class Request>
  absl::StatusOr<ReadPass> Read(absl::Span<const FetchItem> items, size_t request_objects,
                                const Request& request);

  LocalService* const service_;
  const std::shared_ptr<NodeSession> session_;  // Shared with its connection.
  std::vector<ObjectHeader> headers_;           // [items]
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_OBJECT_READER_H_
