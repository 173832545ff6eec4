#include "kvtier/device.hpp"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "device_kernels.hpp"
#include "device_staging.hpp"
#include "device_state.hpp"

namespace kvtier {
namespace {

using device::MemoryKind;
using device::Piece;
using device::State;

constexpr std::uint64_t kStagingBytesMin = 4096;
constexpr auto kShortestSleep = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::milliseconds(1);

std::string piece_words(std::size_t number, std::string_view side) {
  return std::string(side) + " of piece " + std::to_string(number);
}

}  // namespace

DeviceJob::DeviceJob(std::shared_ptr<device::Work> work) : work_(std::move(work)) {}

std::uint64_t DeviceJob::nbytes() const { return work_->nbytes; }

std::size_t DeviceJob::wave_count() const { return work_->waves.size(); }

namespace {

const device::Event& event_of(const device::Work& work, std::optional<std::size_t> wave) {
  if (!wave) return work.waves.empty() ? *work.start : *work.waves.back();
  if (*wave >= work.waves.size()) {
    throw std::invalid_argument("wave " + std::to_string(*wave) + " of " +
                                std::to_string(work.waves.size()));
  }
  return *work.waves[*wave];
}

}  // namespace

void DeviceJob::order_after(StreamHandle stream, std::optional<std::size_t> wave) const {
  const device::Event* last = &event_of(*work_, wave);
  if (!work_->pages.empty()) last = work_->pages[wave.value_or(work_->pages.size() - 1)].get();
  const device::Event& event = *last;
  work_->state->check_alive();
  work_->state->with_context([&] { event.wait_on(work_->state->own_stream(stream)); });
}

bool DeviceJob::is_done(std::optional<std::size_t> wave) const {
  const device::Event& event = event_of(*work_, wave);
  work_->state->check_alive();
  bool is_done = false;
  work_->state->with_context([&] { is_done = event.is_done(); });
  return is_done;
}

bool DeviceJob::wait(std::chrono::nanoseconds timeout) const {
  // Polled: a wait by the driver has no end of its own, and a device can hang.
  const auto ends = std::chrono::steady_clock::now() + timeout;
  auto sleep = std::chrono::duration_cast<std::chrono::nanoseconds>(kShortestSleep);
  while (!is_done(std::nullopt)) {
    const auto left = ends - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(sleep, left));
    sleep = std::min<std::chrono::nanoseconds>(sleep * 2, kLongestSleep);
  }
  return true;
}

double DeviceJob::elapsed_s() const {
  double seconds = 0;
  work_->state->with_context(
      [&] { seconds = event_of(*work_, std::nullopt).seconds_since(*work_->start); });
  return seconds;
}

int CudaDevice::count() {
  try {
    const cuda::Library library = cuda::load();
    int count = 0;
    return library.device_get_count(&count) == cuda::kOk ? count : 0;
  } catch (const cuda::Missing&) {
    return 0;
  }
}

std::string CudaDevice::missing() {
  try {
    const cuda::Library library = cuda::load();
    int count = 0;
    const cuda::Result result = library.device_get_count(&count);
    if (result != cuda::kOk) return cuda::words_of(library, result);
    return count == 0 ? "the driver finds no device" : "";
  } catch (const cuda::Missing& missing) {
    return missing.what();
  }
}

CudaDevice::CudaDevice(int ordinal, const DeviceOptions& options) {
  if (options.staging_bytes < kStagingBytesMin) {
    throw std::invalid_argument(std::to_string(options.staging_bytes) +
                                " bytes of staging, at least " + std::to_string(kStagingBytesMin));
  }
  if (options.launch_items_max == 0 ||
      options.launch_items_max > DeviceOptions{}.launch_items_max) {
    throw std::invalid_argument(std::to_string(options.launch_items_max) + " items of a launch");
  }
  state_ = std::make_shared<State>(ordinal, options);
}

CudaDevice::~CudaDevice() { close(); }

std::shared_ptr<State> CudaDevice::state() const {
  const std::lock_guard lock(mutex_);
  if (!state_) throw DeviceError(ECANCELED, "this device is closed");
  return state_;
}

int CudaDevice::ordinal() const { return state()->ordinal; }
std::string CudaDevice::name() const { return state()->name; }
std::pair<int, int> CudaDevice::compute_capability() const {
  return {state()->major, state()->minor};
}
int CudaDevice::sm_count() const { return state()->sm_count; }
int CudaDevice::driver_version() const { return state()->driver_version; }
unsigned CudaDevice::sm_budget() const { return state()->options.sm_budget; }
std::uint64_t CudaDevice::slot_bytes() const {
  return device::Slots::slot_bytes_of(state()->options.staging_bytes);
}
bool CudaDevice::has_batch_copy() const { return state()->library.memcpy_batch_async != nullptr; }
std::string CudaDevice::kernels() const { return state()->kernels->words(); }
std::string CudaDevice::no_kernels() const { return state()->kernels->missing(); }
std::string CudaDevice::failure() const {
  const std::lock_guard lock(mutex_);
  return state_ ? state_->failure() : "closed";
}

std::uint64_t CudaDevice::register_host(std::uint64_t address, std::uint64_t nbytes) {
  const auto state = this->state();
  if (address == 0 || nbytes == 0 || address + nbytes < address) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes to register");
  }
  state->check_alive();
  const std::lock_guard lock(state->mutex);
  const auto next = state->registered.lower_bound(address);
  const bool meets_next = next != state->registered.end() && next->first < address + nbytes;
  const bool meets_last = next != state->registered.begin() &&
                          std::prev(next)->first + std::prev(next)->second.nbytes > address;
  if (meets_next || meets_last) {
    throw std::invalid_argument("the memory overlaps memory that is registered");
  }
  cuda::Address device_address = 0;
  state->with_context([&] {
    void* const memory = reinterpret_cast<void*>(address);
    state->check(
        state->library.host_register(memory, nbytes, cuda::kHostPortable | cuda::kHostDeviceMap),
        "cuMemHostRegister");
    const cuda::Result mapped = state->library.host_get_device_pointer(&device_address, memory, 0);
    if (mapped != cuda::kOk) state->library.host_unregister(memory);
    state->check(mapped, "cuMemHostGetDevicePointer");
  });
  state->registered.emplace(address, device::Registered{nbytes, device_address});
  return address;
}

void CudaDevice::unregister_host(std::uint64_t number) {
  const auto state = this->state();
  state->drain();
  const std::lock_guard lock(state->mutex);
  if (state->registered.erase(number) == 0) {
    throw std::invalid_argument("nothing is registered under this number");
  }
  state->with_context([&] {
    state->check(state->library.host_unregister(reinterpret_cast<void*>(number)),
                 "cuMemHostUnregister");
  });
}

std::string CudaDevice::memory_kind(std::uint64_t address, std::uint64_t nbytes) const {
  const auto state = this->state();
  std::string kind;
  state->with_context([&] {
    switch (state->kind_of(address, nbytes)) {
      case MemoryKind::kDevice:
        kind = "device";
        break;
      case MemoryKind::kHost:
        kind = "host";
        break;
      case MemoryKind::kManaged:
        kind = "managed";
        break;
      case MemoryKind::kUnpinned:
        kind = "unpinned";
        break;
    }
  });
  return kind;
}

std::uint64_t CudaDevice::device_address(std::uint64_t address, std::uint64_t nbytes) const {
  const auto state = this->state();
  std::uint64_t found = 0;
  state->with_context([&] {
    const MemoryKind kind = state->kind_of(address, nbytes);
    if (kind == MemoryKind::kUnpinned) {
      throw std::invalid_argument("host memory that is not page-locked");
    }
    found = state->device_address(address, kind);
    if (nbytes != 0 && state->device_address(address + nbytes - 1, kind) != found + nbytes - 1) {
      throw std::invalid_argument(std::to_string(nbytes) +
                                  " bytes that are not in one piece for kernels");
    }
  });
  return found;
}

std::uint64_t CudaDevice::allocate(std::uint64_t nbytes) {
  const auto state = this->state();
  cuda::Address address = 0;
  state->with_context(
      [&] { state->check(state->library.memory_allocate(&address, nbytes), "cuMemAlloc"); });
  const std::lock_guard lock(state->mutex);
  state->allocated.insert(address);
  return address;
}

void CudaDevice::free(std::uint64_t address) {
  const auto state = this->state();
  state->drain();
  const std::lock_guard lock(state->mutex);
  if (state->allocated.erase(address) == 0) throw std::invalid_argument("not allocated here");
  state->with_context([&] { state->check(state->library.memory_free(address), "cuMemFree"); });
}

std::uint64_t CudaDevice::allocate_host(std::uint64_t nbytes) {
  const auto state = this->state();
  void* address = nullptr;
  state->with_context([&] {
    state->check(
        state->library.host_allocate(&address, nbytes, cuda::kHostPortable | cuda::kHostDeviceMap),
        "cuMemHostAlloc");
  });
  const std::lock_guard lock(state->mutex);
  const auto number = reinterpret_cast<std::uint64_t>(address);
  state->allocated_host.insert(number);
  return number;
}

void CudaDevice::free_host(std::uint64_t address) {
  const auto state = this->state();
  state->drain();
  const std::lock_guard lock(state->mutex);
  if (state->allocated_host.erase(address) == 0) {
    throw std::invalid_argument("not allocated here");
  }
  state->with_context([&] {
    state->check(state->library.host_free(reinterpret_cast<void*>(address)), "cuMemFreeHost");
  });
}

DeviceJob CudaDevice::copy(std::span<const std::uint64_t> targets,
                           std::span<const std::uint64_t> sources,
                           std::span<const std::uint64_t> lengths,
                           std::optional<StreamHandle> after) {
  const auto state = this->state();
  if (targets.size() != sources.size() || targets.size() != lengths.size()) {
    throw std::invalid_argument(std::to_string(targets.size()) + " targets, " +
                                std::to_string(sources.size()) + " sources and " +
                                std::to_string(lengths.size()) + " lengths");
  }
  state->check_alive();
  std::vector<Piece> pieces;
  bool from_device = false;
  bool to_device = false;
  std::optional<cuda::Stream> engine;
  state->with_context([&] {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const MemoryKind source = state->kind_of(sources[i], lengths[i]);
      const MemoryKind target = state->kind_of(targets[i], lengths[i]);
      if (source == MemoryKind::kUnpinned || target == MemoryKind::kUnpinned) {
        throw std::invalid_argument(
            piece_words(i, source == MemoryKind::kUnpinned ? "the source" : "the target") +
            " is neither memory of the device nor page-locked");
      }
      const std::uint64_t apart =
          targets[i] > sources[i] ? targets[i] - sources[i] : sources[i] - targets[i];
      if (apart < lengths[i]) {
        throw std::invalid_argument("source and target of piece " + std::to_string(i) + " overlap");
      }
      from_device = from_device || source != MemoryKind::kHost;
      to_device = to_device || target != MemoryKind::kHost;
      pieces.push_back({targets[i], sources[i], lengths[i]});
    }
    if (after) engine = state->own_stream(*after);
  });
  const cuda::Stream stream = !to_device ? state->out : !from_device ? state->into : state->within;
  return DeviceJob(
      state->enqueue(stream, engine ? &*engine : nullptr, {pieces}, cuda::SourceOrder::kStream));
}

DeviceJob CudaDevice::launch(const std::string& name, unsigned grid, unsigned block,
                             unsigned shared_bytes, std::span<const std::byte> argument,
                             std::optional<StreamHandle> after,
                             std::optional<StreamHandle> stream) {
  const auto state = this->state();
  std::optional<cuda::Stream> engine;
  cuda::Stream own = state->within;
  state->with_context([&] {
    if (after) engine = state->own_stream(*after);
    if (stream) own = state->own_stream(*stream);
  });
  return DeviceJob(state->launch(own, engine ? &*engine : nullptr, [&] {
    state->kernels->launch(name, grid, block, shared_bytes, argument, own);
  }));
}

void CudaDevice::reserve_staging() {
  const auto state = this->state();
  state->check_alive();
  const std::lock_guard lock(state->enqueue_mutex);
  state->with_context([&] {
    state->slots(true);
    state->slots(false);
  });
}

void CudaDevice::release_staging() {
  const auto state = this->state();
  state->check_alive();
  const std::lock_guard lock(state->enqueue_mutex);
  state->with_context([&] { state->drop_slots(); });
}

StreamHandle CudaDevice::create_stream() {
  const auto state = this->state();
  cuda::Stream stream = nullptr;
  state->with_context([&] {
    state->check(state->library.stream_create(&stream, cuda::kNonBlocking), "cuStreamCreate");
  });
  const std::lock_guard lock(state->mutex);
  const auto handle = reinterpret_cast<StreamHandle>(stream);
  state->streams.insert(handle);
  return handle;
}

void CudaDevice::destroy_stream(StreamHandle stream) {
  const auto state = this->state();
  const std::lock_guard lock(state->mutex);
  if (state->streams.erase(stream) == 0) throw std::invalid_argument("not a stream of ours");
  state->with_context([&] {
    state->library.stream_synchronize(reinterpret_cast<cuda::Stream>(stream));
    state->check(state->library.stream_destroy(reinterpret_cast<cuda::Stream>(stream)),
                 "cuStreamDestroy");
  });
}

void CudaDevice::synchronize(StreamHandle stream) {
  const auto state = this->state();
  state->with_context([&] {
    state->check(state->library.stream_synchronize(state->own_stream(stream)),
                 "cuStreamSynchronize");
  });
}

void CudaDevice::close() {
  std::shared_ptr<State> state;
  {
    const std::lock_guard lock(mutex_);
    state = std::move(state_);
    state_.reset();
  }
  if (state) state->drain();
}

}  // namespace kvtier
