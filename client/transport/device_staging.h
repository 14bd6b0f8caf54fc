#ifndef OKV_CLIENT_TRANSPORT_DEVICE_STAGING_H_
#define OKV_CLIENT_TRANSPORT_DEVICE_STAGING_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/device_memory.h"
#include "proto/mutex.h"

namespace okv {

// Memory of a device in which payloads that lie apart travel together: the sender puts them side by
// side there, or the receiver takes them there and then puts each into its place. A transfer of
// 1.27 MiB between two processes of one GPU takes 0.6 us and costs 20 us of messages and launches;
// copies within the device run at the speed of its memory, a list of them in one launch.
//
// A few places of one size, and a thread that copies. Owned by a transport. Thread-safe.
class DeviceStaging {
 private:
  struct State;

 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr uint64_t kSlotAlignment = 256;
  static constexpr uint64_t kBytesMin = kSlots * kSlotAlignment;

  // One place, given back when it goes. Move-only; may outlive the DeviceStaging.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept
        : state_(std::exchange(other.state_, nullptr)), memory_(std::exchange(other.memory_, {})) {}
    Slot& operator=(Slot&& other) noexcept {
      if (this != &other) {
        Release();
        state_ = std::exchange(other.state_, nullptr);
        memory_ = std::exchange(other.memory_, {});
      }
      return *this;
    }
    ~Slot() { Release(); }

    bool has_memory() const { return state_ != nullptr; }
    // slot_bytes() of the device's memory, a multiple of kSlotAlignment from its begin on.
    absl::Span<uint8_t> span() const { return memory_; }

   private:
    friend class DeviceStaging;
    void Release();

    std::shared_ptr<State> state_;
    absl::Span<uint8_t> memory_;
  };

  // `post` runs work on the transport's thread. REQUIRES: bytes >= kBytesMin. kResourceExhausted
  // when the device has not so much. The device outlives the slots.
  static absl::StatusOr<std::unique_ptr<DeviceStaging>> Create(
      DeviceMemory* device, uint64_t bytes, std::function<void(std::function<void()> work)> post);
  ~DeviceStaging();

  // What the transport registers.
  absl::Span<uint8_t> memory() const;
  uint64_t slot_bytes() const;

  // A place if one is free and nobody waits for one; otherwise one without memory.
  Slot TryTake();
  // `taker` gets a place when one is free, in turn, on the transport's thread. What waits at the
  // end is dropped.
  void Take(std::function<void(Slot slot)> taker);
  // Copies within the device, in turn; several lists that wait go in one. `done` runs on the
  // transport's thread: DeviceMemory::CopyWithin's errors. Until then the copies may run.
  void Copy(std::vector<MemoryCopy> copies, std::function<void(absl::Status status)> done);

  // Finishes the copies, whose `done` are posted, and drops who waits for a place. Transport
  // thread, when no transfer runs any more.
  void Stop();

 private:
  struct Job {
    std::vector<MemoryCopy> copies;
    std::function<void(absl::Status status)> done;
  };
  // What slots share with it.
  struct State {
    ~State();
    void GiveBack(absl::Span<uint8_t> memory) ABSL_LOCKS_EXCLUDED(mu);
    // Gives free places to who waits, first come first served. Transport thread.
    static void Serve(const std::shared_ptr<State>& state);

    DeviceMemory* device;
    absl::Span<uint8_t> memory;
    uint64_t slot_bytes;
    std::function<void(std::function<void()> work)> post;

    Mutex mu;
    CondVar changed;
    std::vector<absl::Span<uint8_t>> free ABSL_GUARDED_BY(mu);
    std::deque<std::function<void(Slot slot)>> waiting ABSL_GUARDED_BY(mu);
    std::deque<Job> jobs ABSL_GUARDED_BY(mu);
    bool stopping ABSL_GUARDED_BY(mu) = false;
    std::weak_ptr<State> self;
  };

  explicit DeviceStaging(std::shared_ptr<State> state);
  void RunCopies();

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_DEVICE_STAGING_H_
