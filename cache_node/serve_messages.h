#ifndef OKV_CACHE_NODE_SERVE_MESSAGES_H_
#define OKV_CACHE_NODE_SERVE_MESSAGES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message_lite.h"
#include "proto/data_plane.h"
#include "proto/format.h"

// What the parts of the data plane share in reading and answering messages.
namespace okv {

// Bounds what a status text adds to a message.
inline constexpr size_t kReasonBytesMax = 1024;

inline std::string Reason(const absl::Status& status) {
  return std::string(status.message().substr(0, kReasonBytesMax));
}

inline bool ParseMessage(absl::string_view bytes, google::protobuf::MessageLite* message) {
  return bytes.size() <= kMessageBytesMax &&
         message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

// Names the field in which `session` differs from another format; null: one that nobody knows.
inline absl::Status FormatMismatch(absl::string_view what, const Format* other,
                                   const Format& session) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ",
                                                    other != nullptr
                                                        ? DescribeDifference(*other, session)
                                                        : "this node does not know its format"));
}

}  // namespace okv

#endif  // OKV_CACHE_NODE_SERVE_MESSAGES_H_
