// What the stand-in for libcuda knows, shared by its parts: settings, contexts, memory, streams.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../shim/cuda.hpp"
#include "fake_calls.hpp"
#include "fake_cuda.hpp"

namespace fake {

namespace api = kvtier::cuda;

constexpr int kDevicesMax = 8;

// Results that only a driver gives.
constexpr int kNotInitialized = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidImage = 200;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kLaunchFailed = 719;

/// What a test sets, by number.
enum Setting {
  kSetDeviceCount,
  kSetDriverVersion,
  kSetCapability,  // 10 * major + minor
  kSetSmCount,
  kSetMemoryBytes,  // of each device
  kSetPinnedBytes,  // that may be page-locked in all
  kSetDelayMaxUs,   // of a stream before each piece of work
  kSetSeed,         // of delays and of the order in which a kernel's threads run
  kSetIsAliasing,   // registered memory is elsewhere for devices
  kSettingCount
};

struct Settings {
  std::int64_t values[kSettingCount] = {2, 12080, 90, 132, 1 << 30, 1 << 30, 200, 1, 0};
  std::string name = "Fake GPU";

  std::int64_t operator[](Setting setting) const { return values[setting]; }
};

struct Range {
  std::uintptr_t start;
  std::size_t nbytes;

  std::uintptr_t end() const { return start + nbytes; }
  bool overlaps(const Range& other) const { return start < other.end() && other.start < end(); }
};

enum class Kind { kDevice, kOwned, kManaged, kPinned, kRegistered };

struct Memory {
  Kind kind = Kind::kDevice;
  std::size_t nbytes = 0;
  int device = kNoDevice;           // for host memory, that of the context in which it was pinned
  std::uintptr_t host_start = 0;    // 0 for device memory
  std::uintptr_t device_start = 0;  // 0 where devices cannot use it
  void* block = nullptr;            // what the heap gave for it
  bool is_mapped = false;           // host memory that kernels may use

  bool is_host() const { return kind == Kind::kPinned || kind == Kind::kRegistered; }
};

/// A place in the order of a stream.
struct Moment {
  bool is_over = false;
  std::chrono::steady_clock::time_point at;
};

struct Work {
  std::function<int()> run = {};  // gives the error with which the context is lost, or 0
  std::vector<Range> uses = {};
  std::shared_ptr<Moment> waits_for = {};       // nothing of this and what follows begins before
  std::shared_ptr<Moment> moment = {};          // over when this is
  const void* module = nullptr;                 // of its kernel
  std::vector<std::uint64_t> use_numbers = {};  // of `uses`, while it is enqueued
};

/// A thread that does its work late, one piece after another.
class Stream {
 public:
  Stream(int device, std::uint32_t seed);
  ~Stream();

  int device() const { return device_; }
  // All with the state's lock held.
  void add(Work work);
  bool is_idle() const { return queue_.empty() && !is_busy_; }
  bool uses_module(const void* module) const;

 private:
  void loop();

  const int device_;
  std::deque<Work> queue_;
  const void* busy_module_ = nullptr;
  bool is_busy_ = false;
  bool is_closing_ = false;
  std::minstd_rand chance_;
  std::thread thread_;
};

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Moment> last;  // none before the first record
};

struct LoadedModule {
  int device;
};

struct LoadedFunction;  // with modules

/// Freed memory that work may still touch, kept until all is over.
struct Freed {
  Memory memory;
  bool is_poisoned;  // and nobody may have written to it
};

struct Counters {
  std::int64_t pageable_copies = 0;
  std::int64_t copies = 0;        // calls
  std::int64_t batches = 0;       // calls
  std::int64_t batch_copies = 0;  // in them
  std::int64_t early_reads = 0;   // sources read before the stream came to the copy
  std::int64_t fills = 0;
  std::int64_t launches = 0;
  std::int64_t copied_bytes = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;  // of anything
  Settings settings;
  Counters counters;
  bool is_initialised = false;
  int retained[kDevicesMax] = {};
  int lost[kDevicesMax] = {};               // the error with which a context was lost
  int current_count = 0;                    // on all threads
  std::map<std::uintptr_t, Memory> memory;  // by start; host memory with an alias twice
  std::map<std::uintptr_t, std::size_t> freed;
  std::deque<Freed> quarantine;
  std::map<std::uint64_t, Range> uses;  // of work that is not over
  std::uint64_t next_use = 0;
  std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> default_streams;
  std::map<std::uintptr_t, std::shared_ptr<Event>> events;
  std::map<std::uintptr_t, std::shared_ptr<LoadedModule>> modules;
  std::map<std::uintptr_t, std::shared_ptr<LoadedFunction>> functions;
  std::uintptr_t next_handle = 0x1000;  // the real ones have a meaning below
};

State& state();

/// The most dynamic shared memory of a block, after an opt-in.
int max_shared_bytes(int capability);

void* handle_of(std::uintptr_t number);

/// The context of a device.
void* context_of(int device);

/// Begin a call that needs a context: its device, or a code by which the call fails.
struct Begun {
  int device = kNoDevice;
  int code = 0;
};
Begun begin(Call call);
/// One that has no faults of its own.
Begun begin();

/// The stream, if it is of this device; null: the device's default stream. With the lock held.
std::shared_ptr<Stream> find_stream(void* stream, int device);

/// From now on all calls on the context fail, and queued work is dropped. With the lock held.
void lose(int device, int code);

// Memory; all with the lock held.

/// The memory that has this address, and where it starts there.
const Memory* find_memory(std::uintptr_t address, std::uintptr_t* start = nullptr);
bool is_in_use(const Range& range);
bool overlaps_memory(const Range& range);
/// Forget what was freed there, and what a test had said of it.
void take_place(const Range& range);
/// Give back freed memory, the first first, where there is much and no stream has work.
void sweep();
/// A mistake for each freed memory that was written to.
void check_quarantine();
/// Free memory of a device whose context ends; how much there was.
int drop_memory(int device, bool is_leak);

}  // namespace fake
