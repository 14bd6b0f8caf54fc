#ifndef OKV_PROTO_ROCKSDB_LOG_H_
#define OKV_PROTO_ROCKSDB_LOG_H_

#include <rocksdb/env.h>

#include <cstdarg>

namespace okv {

// Where RocksDB's log of itself goes: nowhere. What matters of it is in the statuses it returns. In
// a file, which is what it has without an option, the next line after one that a full disk did not
// take fails an assertion of the distribution's build (7.8.3), and ends the process.
// Thread-safe.
class NoRocksdbLog final : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char* /*format*/, va_list /*arguments*/) override {}
};

}  // namespace okv

#endif  // OKV_PROTO_ROCKSDB_LOG_H_
