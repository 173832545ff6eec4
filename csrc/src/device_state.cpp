#include "device_state.hpp"

#include <algorithm>
#include <array>
#include <cerrno>

#include "device_kernels.hpp"
#include "device_staging.hpp"

namespace kvtier::device {
namespace {

constexpr std::size_t kBatchMax = 16384;  // descriptors of one call: 400 KiB of them

int errno_of(cuda::Result result) {
  switch (result) {
    case cuda::kOutOfMemory:
      return ENOMEM;
    case cuda::kNoDevice:
    case 101:  // no such device
      return ENODEV;
    default:
      return EIO;
  }
}

std::string hex(std::uint64_t address) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  do {
    text.insert(text.begin(), kDigits[address % 16]);
    address /= 16;
  } while (address != 0);
  return "0x" + text;
}

}  // namespace

Event::Event(std::shared_ptr<State> state) : state_(std::move(state)) {
  state_->check(state_->library.event_create(&event_, 0), "cuEventCreate");
}

Event::~Event() {
  if (!state_->failure().empty()) return;
  const cuda::CurrentContext current(state_->library, state_->context.get());
  if (event_ != nullptr) state_->library.event_destroy(event_);
}

void Event::record(cuda::Stream stream) {
  state_->check(state_->library.event_record(event_, stream), "cuEventRecord");
}

bool Event::is_done() const {
  const cuda::Result result = state_->library.event_query(event_);
  if (result == cuda::kNotReady) return false;
  state_->check(result, "cuEventQuery");
  return true;
}

void Event::wait_on(cuda::Stream stream) const {
  state_->check(state_->library.stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

double Event::seconds_since(const Event& start) const {
  float elapsed_ms = 0;
  state_->check(state_->library.event_elapsed_time(&elapsed_ms, start.event_, event_),
                "cuEventElapsedTime");
  return static_cast<double>(elapsed_ms) / 1e3;
}

State::State(int wanted, const DeviceOptions& wanted_options)
    : library([] {
        try {
          return cuda::load();
        } catch (const cuda::Missing& missing) {
          throw DeviceError(ENODEV, missing.what());
        }
      }()),
      ordinal(wanted),
      options(wanted_options),
      context(library, wanted) {
  if (context.result() != 0) {
    throw DeviceError(errno_of(context.result()),
                      "the device does not start: " + cuda::words_of(library, context.result()));
  }
  with_context([this] {
    cuda::Device device = 0;
    check(library.device_get(&device, ordinal), "cuDeviceGet");
    std::array<char, 256> text{};
    check(library.device_get_name(text.data(), static_cast<int>(text.size()), device),
          "cuDeviceGetName");
    name = text.data();
    major = attribute(cuda::kDeviceComputeCapabilityMajor, device);
    minor = attribute(cuda::kDeviceComputeCapabilityMinor, device);
    sm_count = attribute(cuda::kDeviceMultiprocessorCount, device);
    check(library.driver_get_version(&driver_version), "cuDriverGetVersion");
    shared_bytes_max = attribute(cuda::kDeviceMaxSharedBytesPerBlockOptIn, device);
    try {
      for (cuda::Stream* const stream : {&out, &into, &within, &out_kernels, &into_kernels}) {
        check(library.stream_create(stream, cuda::kNonBlocking), "cuStreamCreate");
        own_streams_.push_back(*stream);
      }
      kernels = std::make_unique<Kernels>(*this, options.kernels);
      tables = std::make_unique<Tables>(*this);
    } catch (...) {  // there will be no destructor
      for (const cuda::Stream stream : own_streams_) library.stream_destroy(stream);
      throw;
    }
  });
}

State::~State() {
  if (!failure().empty()) return;  // what a lost context had is gone with it
  const cuda::CurrentContext current(library, context.get());
  for (const cuda::Stream stream : own_streams_) library.stream_synchronize(stream);
  out_slots_.reset();
  into_slots_.reset();
  tables.reset();
  kernels->unload();
  for (const cuda::Stream stream : own_streams_) library.stream_destroy(stream);
  for (const StreamHandle stream : streams) {
    library.stream_destroy(reinterpret_cast<cuda::Stream>(stream));
  }
  for (const auto& [address, memory] : registered) {
    library.host_unregister(reinterpret_cast<void*>(address));
  }
  for (const std::uint64_t address : allocated) library.memory_free(address);
  for (const std::uint64_t address : allocated_host) {
    library.host_free(reinterpret_cast<void*>(address));
  }
}

void State::with_context(const std::function<void()>& work) const {
  const cuda::CurrentContext current(library, context.get());
  check(current.result(), "cuCtxPushCurrent");
  work();
}

void State::check(cuda::Result result, const char* call) const {
  if (result == cuda::kOk) return;
  const std::string words = std::string(call) + ": " + cuda::words_of(library, result);
  if (cuda::is_sticky(result)) {
    const std::lock_guard lock(failure_mutex_);
    if (failure_.empty()) failure_ = words;
  }
  throw DeviceError(errno_of(result), words);
}

std::string State::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void State::check_alive() const {
  if (const std::string words = failure(); !words.empty()) {
    throw DeviceError(EIO, "the device has failed: " + words);
  }
}

int State::attribute(int which, cuda::Device device) const {
  int value = 0;
  check(library.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

cuda::Stream State::own_stream(StreamHandle handle) const {
  // 0, 1 and 2 are the default streams of whatever context is current.
  const auto stream = reinterpret_cast<cuda::Stream>(handle);
  if (handle <= 2) return stream;
  cuda::Context found = nullptr;
  const cuda::Result result = library.stream_get_context(stream, &found);
  if (result != cuda::kOk && !cuda::is_sticky(result)) {
    throw std::invalid_argument("stream " + hex(handle) + " is none of CUDA's");
  }
  check(result, "cuStreamGetCtx");
  if (found != context.get()) {
    throw std::invalid_argument("stream " + hex(handle) + " is not one of device " +
                                std::to_string(ordinal));
  }
  return stream;
}

MemoryKind State::kind_of(std::uint64_t address, std::uint64_t nbytes) const {
  const auto ask = [this](auto* value, int which, std::uint64_t at) {
    return library.pointer_get_attribute(value, which, at);
  };
  const auto kind_at = [&](std::uint64_t at) {
    unsigned type = 0;
    const cuda::Result result = ask(&type, cuda::kPointerMemoryType, at);
    if (result == cuda::kInvalidValue) return MemoryKind::kUnpinned;
    check(result, "cuPointerGetAttribute");
    unsigned is_managed = 0;
    check(ask(&is_managed, cuda::kPointerIsManaged, at), "cuPointerGetAttribute");
    if (is_managed != 0) return MemoryKind::kManaged;
    return type == cuda::kMemoryTypeDevice ? MemoryKind::kDevice : MemoryKind::kHost;
  };
  if (nbytes == 0 || address == 0 || address + nbytes < address) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes at " + hex(address) +
                                " are no memory");
  }
  const MemoryKind kind = kind_at(address);
  const std::uint64_t end = address + nbytes;
  if (kind != MemoryKind::kDevice) {
    if (kind_at(end - 1) != kind) {
      throw std::invalid_argument(std::to_string(nbytes) + " bytes at " + hex(address) +
                                  " are not of one kind all over");
    }
    return kind;
  }
  // An engine's memory may consist of several allocations that lie together.
  for (std::uint64_t at = address; at < end;) {
    int device = -1;
    std::uint64_t start = 0;
    std::size_t size = 0;
    if (kind_at(at) != kind) {
      throw std::invalid_argument(std::to_string(nbytes) + " bytes at " + hex(address) +
                                  " go beyond the end of their allocation at " + hex(at));
    }
    check(ask(&device, cuda::kPointerDeviceOrdinal, at), "cuPointerGetAttribute");
    if (device != ordinal) {
      throw std::invalid_argument("memory at " + hex(at) + " is of device " +
                                  std::to_string(device) + ", not " + std::to_string(ordinal));
    }
    check(ask(&start, cuda::kPointerRangeStart, at), "cuPointerGetAttribute");
    check(ask(&size, cuda::kPointerRangeBytes, at), "cuPointerGetAttribute");
    at = std::max(at + 1, start + size);
  }
  return kind;
}

std::shared_ptr<Work> State::enqueue(cuda::Stream stream, const cuda::Stream* after,
                                     const std::vector<std::vector<Piece>>& waves,
                                     cuda::SourceOrder order) {
  check_alive();
  std::uint64_t nbytes = 0;
  for (const auto& wave : waves) {
    for (const Piece& piece : wave) nbytes += piece.nbytes;
  }
  auto work = std::make_shared<Work>(shared_from_this(), nbytes);
  const std::lock_guard lock(enqueue_mutex);
  with_context([&] {
    try {
      work->start = std::make_unique<Event>(shared_from_this());
      if (after != nullptr) {
        Event engine(shared_from_this());
        engine.record(*after);
        engine.wait_on(stream);  // the driver keeps a destroyed event as long as it is waited for
      }
      work->start->record(stream);
      for (const auto& wave : waves) {
        copy_batch(stream, wave, order);
        work->waves.push_back(std::make_unique<Event>(shared_from_this()));
        work->waves.back()->record(stream);
      }
    } catch (...) {
      library.stream_synchronize(stream);  // what was begun is over before anybody hears of it
      throw;
    }
  });
  return work;
}

std::shared_ptr<Work> State::launch(cuda::Stream stream, const cuda::Stream* after,
                                    const std::function<void()>& launch) {
  check_alive();
  auto work = std::make_shared<Work>(shared_from_this(), 0);
  const std::lock_guard lock(enqueue_mutex);
  with_context([&] {
    work->start = std::make_unique<Event>(shared_from_this());
    auto end = std::make_unique<Event>(shared_from_this());
    if (after != nullptr) {
      Event engine(shared_from_this());
      engine.record(*after);
      engine.wait_on(stream);
    }
    work->start->record(stream);
    launch();
    work->waves.push_back(std::move(end));
    work->waves.back()->record(stream);
  });
  return work;
}

Slots& State::slots(bool is_gather) {
  std::unique_ptr<Slots>& slots = is_gather ? out_slots_ : into_slots_;
  if (!slots) slots = std::make_unique<Slots>(*this, options.staging_bytes);
  return *slots;
}

void State::drop_slots() {
  for (const cuda::Stream stream : own_streams_) {
    check(library.stream_synchronize(stream), "cuStreamSynchronize");
  }
  out_slots_.reset();
  into_slots_.reset();
}

std::optional<std::uint64_t> State::find_registered(std::uint64_t address,
                                                    std::uint64_t nbytes) const {
  const std::lock_guard lock(mutex);
  const auto after = registered.upper_bound(address);
  if (after == registered.begin()) return std::nullopt;
  const auto& [start, memory] = *std::prev(after);
  const std::uint64_t offset = address - start;
  if (offset > memory.nbytes || nbytes > memory.nbytes - offset) return std::nullopt;
  return memory.device_address + offset;
}

std::uint64_t State::device_address(std::uint64_t address, MemoryKind kind) const {
  if (kind != MemoryKind::kHost) return address;
  cuda::Address found = 0;
  const cuda::Result result =
      library.host_get_device_pointer(&found, reinterpret_cast<void*>(address), 0);
  if (result != cuda::kOk && !cuda::is_sticky(result)) {
    throw std::invalid_argument("host memory at " + hex(address) +
                                " is page-locked but not mapped for kernels");
  }
  check(result, "cuMemHostGetDevicePointer");
  return found;
}

void State::copy_batch(cuda::Stream stream, std::span<const Piece> pieces,
                       cuda::SourceOrder order) {
  if (library.memcpy_batch_async == nullptr) {
    for (const Piece& piece : pieces) {
      check(library.memcpy_async(piece.target, piece.source, piece.nbytes, stream),
            "cuMemcpyAsync");
    }
    return;
  }
  std::vector<cuda::Address> targets;
  std::vector<cuda::Address> sources;
  std::vector<std::size_t> lengths;
  for (std::size_t first = 0; first < pieces.size(); first += kBatchMax) {
    const auto part = pieces.subspan(first, std::min(kBatchMax, pieces.size() - first));
    targets.clear();
    sources.clear();
    lengths.clear();
    for (const Piece& piece : part) {
      targets.push_back(piece.target);
      sources.push_back(piece.source);
      lengths.push_back(piece.nbytes);
    }
    cuda::CopyAttributes attributes;
    attributes.source_order = order;
    attributes.flags = cuda::kCopyPreferOverlapWithCompute;
    std::size_t first_copy = 0;
    std::size_t failed = 0;
    check(library.memcpy_batch_async(targets.data(), sources.data(), lengths.data(), part.size(),
                                     &attributes, &first_copy, 1, &failed, stream),
          "cuMemcpyBatchAsync");
  }
}

void State::drain() const {
  const cuda::CurrentContext current(library, context.get());
  for (const cuda::Stream stream : own_streams_) library.stream_synchronize(stream);
}

}  // namespace kvtier::device
