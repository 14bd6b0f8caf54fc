#include "client/transport/device_staging.h"

#include "absl/memory/memory.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {

DeviceStaging::State::~State() { device->Free(memory.data()); }

void DeviceStaging::State::GiveBack(absl::Span<uint8_t> slot) {
  bool someone_waits = false;
  {
    MutexLock lock(&mu);
    free.push_back(slot);
    someone_waits = !waiting.empty();
  }
  if (!someone_waits) return;
  post([weak = self] {
    if (const std::shared_ptr<State> state = weak.lock()) Serve(state);
  });
}

void DeviceStaging::State::Serve(const std::shared_ptr<State>& state) {
  while (true) {
    std::function<void(Slot slot)> taker;
    Slot slot;
    {
      MutexLock lock(&state->mu);
      if (state->waiting.empty() || state->free.empty()) return;
      taker = std::move(state->waiting.front());
      state->waiting.pop_front();
      slot.memory_ = state->free.back();
      slot.state_ = state;
      state->free.pop_back();
    }
    taker(std::move(slot));
  }
}

void DeviceStaging::Slot::Release() {
  const std::shared_ptr<State> state = std::exchange(state_, nullptr);
  if (state != nullptr) state->GiveBack(memory_);
}

absl::StatusOr<std::unique_ptr<DeviceStaging>> DeviceStaging::Create(
    DeviceMemory* device, uint64_t bytes, std::function<void(std::function<void()> work)> post) {
  OKV_CHECK(bytes >= kBytesMin);
  const uint64_t slot_bytes = bytes / kSlots / kSlotAlignment * kSlotAlignment;
  OKV_ASSIGN_OR_RETURN(uint8_t* const memory, device->Allocate(kSlots * slot_bytes));
  const auto state = std::make_shared<State>();
  state->device = device;
  state->memory = absl::MakeSpan(memory, kSlots * slot_bytes);
  state->slot_bytes = slot_bytes;
  state->post = std::move(post);
  state->self = state;
  {
    MutexLock lock(&state->mu);
    for (uint32_t i = 0; i < kSlots; ++i) {
      state->free.push_back(state->memory.subspan(i * slot_bytes, slot_bytes));
    }
  }
  return absl::WrapUnique(new DeviceStaging(state));
}

DeviceStaging::DeviceStaging(std::shared_ptr<State> state)
    : state_(std::move(state)), thread_([this] { RunCopies(); }) {}

DeviceStaging::~DeviceStaging() { Stop(); }

absl::Span<uint8_t> DeviceStaging::memory() const { return state_->memory; }

uint64_t DeviceStaging::slot_bytes() const { return state_->slot_bytes; }

DeviceStaging::Slot DeviceStaging::TryTake() {
  Slot slot;
  MutexLock lock(&state_->mu);
  if (state_->free.empty() || !state_->waiting.empty()) return slot;
  slot.memory_ = state_->free.back();
  slot.state_ = state_;
  state_->free.pop_back();
  return slot;
}

void DeviceStaging::Take(std::function<void(Slot slot)> taker) {
  {
    MutexLock lock(&state_->mu);
    state_->waiting.push_back(std::move(taker));
    if (state_->free.empty()) return;
  }
  state_->post([state = state_] { State::Serve(state); });
}

void DeviceStaging::Copy(std::vector<MemoryCopy> copies,
                         std::function<void(absl::Status status)> done) {
  MutexLock lock(&state_->mu);
  OKV_CHECK(!state_->stopping);
  state_->jobs.push_back({.copies = std::move(copies), .done = std::move(done)});
  state_->changed.Signal();
}

void DeviceStaging::RunCopies() {
  while (true) {
    std::deque<Job> jobs;
    {
      MutexLock lock(&state_->mu);
      while (state_->jobs.empty() && !state_->stopping) state_->changed.Wait(&state_->mu);
      if (state_->jobs.empty()) return;
      jobs.swap(state_->jobs);
    }
    std::vector<MemoryCopy> copies;
    for (const Job& job : jobs) copies.insert(copies.end(), job.copies.begin(), job.copies.end());
    const absl::Status status = state_->device->CopyWithin(copies);
    for (Job& job : jobs) {
      state_->post([done = std::move(job.done), status] { done(status); });
    }
  }
}

void DeviceStaging::Stop() {
  std::deque<std::function<void(Slot slot)>> dropped;  // Destroyed without the lock.
  {
    MutexLock lock(&state_->mu);
    state_->stopping = true;
    dropped.swap(state_->waiting);
    state_->changed.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace okv
