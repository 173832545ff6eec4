// What a device, its plans and its jobs share: the driver, the context, streams, and what is known
// of memory. Lives as long as any of them, so that nothing goes away under a copy.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "../shim/cuda.hpp"
#include "kvtier/device.hpp"

namespace kvtier::device {

/// One piece of a batch: absolute addresses, not empty.
struct Piece {
  std::uint64_t target;
  std::uint64_t source;
  std::uint64_t nbytes;
};

enum class MemoryKind { kDevice, kHost, kManaged, kUnpinned };

class Kernels;
class Slots;
class State;
class Tables;

/// Host memory that was page-locked here.
struct Registered {
  std::uint64_t nbytes;
  std::uint64_t device_address;
};

/// An event, destroyed with its owner.
class Event {
 public:
  explicit Event(std::shared_ptr<State> state);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cuda::Stream stream);
  bool is_done() const;
  void wait_on(cuda::Stream stream) const;
  double seconds_since(const Event& start) const;

 private:
  std::shared_ptr<State> state_;
  cuda::Event event_ = nullptr;
};

/// A job's events: one before the first wave, one after each. Waves follow each other.
class Work {
 public:
  Work(std::shared_ptr<State> state, std::uint64_t nbytes)
      : state(std::move(state)), nbytes(nbytes) {}

  const std::shared_ptr<State> state;
  const std::uint64_t nbytes;
  std::unique_ptr<Event> start;
  std::vector<std::unique_ptr<Event>> waves;
  /// When the pages of each wave have been read, where that is before its bytes are in place.
  std::vector<std::unique_ptr<Event>> pages;
};

class State : public std::enable_shared_from_this<State> {
 public:
  State(int ordinal, const DeviceOptions& options);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Run calls of the driver with the context current; a failure becomes a DeviceError, and one
  /// that the context does not survive is remembered. @throws DeviceError
  void with_context(const std::function<void()>& work) const;
  void check(cuda::Result result, const char* call) const;
  /// @throws DeviceError the device has failed
  void check_alive() const;
  std::string failure() const;

  /// @throws std::invalid_argument the stream is one of another context
  cuda::Stream own_stream(StreamHandle stream) const;

  /// @throws std::invalid_argument a part of it is of another kind, or of another device
  MemoryKind kind_of(std::uint64_t address, std::uint64_t nbytes) const;

  /// Where a device has a part of host memory that was registered here, without asking the driver;
  /// nothing for all else. Segments of the memory tier come by the thousand.
  std::optional<std::uint64_t> find_registered(std::uint64_t address, std::uint64_t nbytes) const;
  /// A device's own address of page-locked host memory; other memory has just one.
  ///
  /// @throws std::invalid_argument kernels cannot use it
  std::uint64_t device_address(std::uint64_t address, MemoryKind kind) const;

  /// Put waves of pieces on `stream`, after what is on `after` now.
  std::shared_ptr<Work> enqueue(cuda::Stream stream, const cuda::Stream* after,
                                const std::vector<std::vector<Piece>>& waves,
                                cuda::SourceOrder order);
  /// Launch a kernel on `stream`, after what is on `after` now.
  std::shared_ptr<Work> launch(cuda::Stream stream, const cuda::Stream* after,
                               const std::function<void()>& launch);
  /// Wait until nothing of ours is on the device.
  void drain() const;

  /// Staging of one direction, taken at its first use. With the context current and the lock held.
  Slots& slots(bool is_gather);
  /// Wait for what uses it and give it back. With the context current and the lock held.
  void drop_slots();
  void copy_batch(cuda::Stream stream, std::span<const Piece> pieces, cuda::SourceOrder order);

  const cuda::Library library;
  const int ordinal;
  const DeviceOptions options;
  const cuda::PrimaryContext context;
  std::string name;
  int major = 0;
  int minor = 0;
  int sm_count = 0;
  int driver_version = 0;
  int shared_bytes_max = 0;  // of a CTA, with an opt-in
  // Of copy engines:
  cuda::Stream out = nullptr;     // device to host
  cuda::Stream into = nullptr;    // host to device
  cuda::Stream within = nullptr;  // device to device
  // Of kernels, whose copies are of one direction and pass through no other stream:
  cuda::Stream out_kernels = nullptr;   // pages are read
  cuda::Stream into_kernels = nullptr;  // pages are written
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Tables> tables;  // guarded by enqueue_mutex

  std::mutex enqueue_mutex;  // a job's waves follow each other on their streams

  mutable std::mutex mutex;                        // guards what follows
  std::map<std::uint64_t, Registered> registered;  // by address
  std::set<std::uint64_t> allocated;
  std::set<std::uint64_t> allocated_host;
  std::set<StreamHandle> streams;

 private:
  int attribute(int which, cuda::Device device) const;

  std::vector<cuda::Stream> own_streams_;
  std::unique_ptr<Slots> out_slots_;
  std::unique_ptr<Slots> into_slots_;
  mutable std::mutex failure_mutex_;
  mutable std::string failure_;
};

}  // namespace kvtier::device
