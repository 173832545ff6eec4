#include "device_staging.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "device_state.hpp"

namespace kvtier::device {
namespace {

constexpr std::uint64_t kSlotUnit = 256;          // as the driver aligns memory
constexpr std::size_t kTableBytesMin = 64 << 10;  // 4,000 pages
constexpr std::size_t kTablesMax = 64;            // copies by kernels that are under way at once
constexpr auto kTableWait = std::chrono::seconds(30);  // for the oldest of them
constexpr auto kTableLook = std::chrono::microseconds(50);

}  // namespace

Fence::~Fence() {
  if (event_ != nullptr && state_.failure().empty()) state_.library.event_destroy(event_);
}

void Fence::record(cuda::Stream stream) {
  if (event_ == nullptr) {
    state_.check(state_.library.event_create(&event_, cuda::kEventDisableTiming), "cuEventCreate");
  }
  state_.check(state_.library.event_record(event_, stream), "cuEventRecord");
}

void Fence::wait_on(cuda::Stream stream) const {
  if (event_ == nullptr) return;
  state_.check(state_.library.stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

bool Fence::is_over() const {
  if (event_ == nullptr) return true;
  const cuda::Result result = state_.library.event_query(event_);
  if (result == cuda::kNotReady) return false;
  state_.check(result, "cuEventQuery");
  return true;
}

std::uint64_t Slots::slot_bytes_of(std::uint64_t nbytes) {
  return nbytes / kCount / kSlotUnit * kSlotUnit;
}

Slots::Slots(State& state, std::uint64_t nbytes)
    : state_(state), slot_bytes_(slot_bytes_of(nbytes)) {
  for (std::size_t i = 0; i < kCount; ++i) {
    filled_.push_back(std::make_unique<Fence>(state));
    ended_.push_back(std::make_unique<Fence>(state));
  }
  const std::string call = "cuMemAlloc of " + std::to_string(nbytes) + " bytes for staging";
  state_.check(state_.library.memory_allocate(&address_, slot_bytes_ * kCount), call.c_str());
}

Slots::~Slots() {
  if (state_.failure().empty()) state_.library.memory_free(address_);
}

cuda::Address Slots::peek(std::size_t ahead) const {
  return address_ + (next_ + ahead) % kCount * slot_bytes_;
}

std::size_t Slots::take(cuda::Stream stream) {
  const std::size_t slot = next_;
  next_ = (next_ + 1) % kCount;
  ended_[slot]->wait_on(stream);
  return slot;
}

void Slots::hand_over(std::size_t slot, cuda::Stream first, cuda::Stream second) {
  filled_[slot]->record(first);
  filled_[slot]->wait_on(second);
}

void Slots::give_back(std::size_t slot, cuda::Stream stream) { ended_[slot]->record(stream); }

Tables::Tables(State& state) : state_(state) {}

Tables::~Tables() {
  if (!state_.failure().empty()) return;
  for (const auto& buffer : buffers_) free(*buffer);
}

void Tables::free(const Buffer& buffer) {
  state_.library.memory_free(buffer.device);
  state_.library.host_free(buffer.host);
}

Tables::Buffer& Tables::take(std::size_t nbytes) {
  for (const auto& buffer : buffers_) {
    if (buffer->nbytes >= nbytes && buffer->last_use.is_over()) return *buffer;
  }
  if (buffers_.size() == kTablesMax) {  // one makes room
    Buffer& first = *buffers_.front();
    const auto ends = std::chrono::steady_clock::now() + kTableWait;
    while (!first.last_use.is_over()) {
      if (std::chrono::steady_clock::now() > ends) {
        throw DeviceError(ETIMEDOUT, std::to_string(kTablesMax) +
                                         " copies are under way and the device does not get on");
      }
      std::this_thread::sleep_for(kTableLook);
    }
    free(first);
    buffers_.erase(buffers_.begin());
  }
  // Grows by powers of two, so that copies of like sizes soon allocate no more.
  auto buffer = std::make_unique<Buffer>(state_);
  const std::size_t capacity = std::max(kTableBytesMin, std::bit_ceil(nbytes));
  void* host = nullptr;
  state_.check(state_.library.host_allocate(&host, capacity, cuda::kHostPortable),
               "cuMemHostAlloc of a table");
  buffer->host = static_cast<std::byte*>(host);
  const cuda::Result result = state_.library.memory_allocate(&buffer->device, capacity);
  if (result != cuda::kOk) state_.library.host_free(host);
  state_.check(result, "cuMemAlloc of a table");
  buffer->nbytes = capacity;
  buffers_.push_back(std::move(buffer));
  return *buffers_.back();
}

void Tables::upload(const Buffer& buffer, std::size_t nbytes, cuda::Stream stream) {
  state_.check(state_.library.memcpy_async(
                   buffer.device, reinterpret_cast<cuda::Address>(buffer.host), nbytes, stream),
               "cuMemcpyAsync of a table");
}

void Tables::give_back(Buffer& buffer, cuda::Stream stream) { buffer.last_use.record(stream); }

}  // namespace kvtier::device
