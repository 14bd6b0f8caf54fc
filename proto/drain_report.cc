#include "proto/drain_report.h"

namespace okv {

DrainReport DrainReport::Read(const v1::DrainReport& message) {
  return {.id = message.drain_id(),
          .state = static_cast<State>(message.state()),
          .objects_moved = message.objects_moved(),
          .bytes_moved = message.bytes_moved(),
          .objects_left = message.objects_left(),
          .bytes_left = message.bytes_left(),
          .message = message.message()};
}

void DrainReport::Write(v1::DrainReport* to) const {
  to->set_drain_id(id);
  to->set_state(static_cast<v1::DrainState>(state));
  to->set_objects_moved(objects_moved);
  to->set_bytes_moved(bytes_moved);
  to->set_objects_left(objects_left);
  to->set_bytes_left(bytes_left);
  to->set_message(message);
}

}  // namespace okv
