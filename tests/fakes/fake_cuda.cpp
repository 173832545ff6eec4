// A stand-in for NVIDIA's libcuda: contexts of each thread and streams, on host memory that a test
// says is a GPU's. A stream does its work late, and at a pace of its own: who does not wait for it
// sees wrong bytes.
#include "fake_cuda.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_calls.hpp"

namespace fake {
namespace {

constexpr int kDeviceCount = 2;
constexpr int kInvalidValue = 1;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kDelayMaxUs = 200;

class Stream {
 public:
  explicit Stream(int device, unsigned seed)
      : device_(device), chance_(seed), thread_([this] { work(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
      if (!queue_.empty() || is_busy_) mistake();  // nobody waited for it
    }
    changed_.notify_all();
    thread_.join();
  }

  int device() const { return device_; }

  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !is_busy_; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> next = std::move(queue_.front());
      queue_.pop_front();
      is_busy_ = true;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(chance_() % kDelayMaxUs));
      next();
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  bool is_closing_ = false;
  std::minstd_rand chance_;
  std::thread thread_;
};

struct Cuda {
  std::mutex mutex;
  bool is_initialised = false;
  int retained[kDeviceCount] = {};
  int pushed = 0;  // on all threads
  std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
  std::uintptr_t next_stream = 1;
  std::map<std::uintptr_t, std::pair<std::size_t, int>> memory;
};

Cuda& cuda() {
  static Cuda instance;
  return instance;
}

thread_local std::vector<int> current;  // devices, as each has one context

void* context_of(int device) { return &cuda().retained[device]; }

std::shared_ptr<Stream> find_stream(void* stream) {
  const std::lock_guard lock(cuda().mutex);
  const auto found = cuda().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  return found == cuda().streams.end() ? nullptr : found->second;
}

}  // namespace

int current_device() { return current.empty() ? kNoDevice : current.back(); }

int device_at(std::uintptr_t address) {
  const std::lock_guard lock(cuda().mutex);
  auto found = cuda().memory.upper_bound(address);
  if (found == cuda().memory.begin()) return kNoDevice;
  --found;
  const auto [nbytes, device] = found->second;
  return address < found->first + nbytes ? device : kNoDevice;
}

int device_of_stream(void* stream) {
  const auto found = find_stream(stream);
  return found ? found->device() : kNoDevice;
}

void enqueue(void* stream, std::function<void()> work) {
  if (const auto found = find_stream(stream)) found->add(std::move(work));
}

}  // namespace fake

using namespace fake;

extern "C" {

int cuInit(unsigned flags) {
  if (const int code = fault_of(kInit)) return code;
  const std::lock_guard lock(cuda().mutex);
  cuda().is_initialised = true;
  return flags == 0 ? 0 : kInvalidValue;
}

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kDeviceCount) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (const int code = fault_of(kContextRetain)) return code;
  const std::lock_guard lock(cuda().mutex);
  ++cuda().retained[device];
  *context = context_of(device);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard lock(cuda().mutex);
  if (--cuda().retained[device] < 0) mistake();
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  if (const int code = fault_of(kContextPush)) return code;
  const std::lock_guard lock(cuda().mutex);
  for (int device = 0; device < kDeviceCount; ++device) {
    if (context == context_of(device) && cuda().retained[device] > 0) {
      current.push_back(device);
      ++cuda().pushed;
      return 0;
    }
  }
  return kInvalidContext;
}

int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = context_of(current.back());
  current.pop_back();
  const std::lock_guard lock(cuda().mutex);
  --cuda().pushed;
  return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
  if (const int code = fault_of(kStreamCreate)) return code;
  if (current.empty()) return kInvalidContext;
  if (flags != 1) mistake();  // it would wait for the default stream
  const std::lock_guard lock(cuda().mutex);
  const std::uintptr_t number = cuda().next_stream++;
  cuda().streams[number] = std::make_shared<Stream>(current.back(), static_cast<unsigned>(number));
  *stream = reinterpret_cast<void*>(number);
  return 0;
}

int cuStreamDestroy_v2(void* stream) {
  const auto found = find_stream(stream);
  if (!found || found->device() != current_device()) {
    mistake();
    return kInvalidHandle;
  }
  const std::lock_guard lock(cuda().mutex);
  cuda().streams.erase(reinterpret_cast<std::uintptr_t>(stream));
  return 0;
}

int cuStreamSynchronize(void* stream) {
  const auto found = find_stream(stream);
  if (!found) return kInvalidHandle;
  found->synchronize();
  return fault_of(kStreamSynchronize);
}

int cuGetErrorName(int code, const char** name) {
  static const std::map<int, std::string> names = {{2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {100, "CUDA_ERROR_NO_DEVICE"},
                                                   {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  const auto found = names.find(code);
  if (found == names.end()) return kInvalidValue;
  *name = found->second.c_str();
  return 0;
}

/// Memory is a GPU's from now on.
void fake_own(std::uintptr_t address, std::size_t nbytes, int device) {
  const std::lock_guard lock(cuda().mutex);
  cuda().memory[address] = {nbytes, device};
}

/// All memory is the host's again.
void fake_disown() {
  const std::lock_guard lock(cuda().mutex);
  cuda().memory.clear();
}

/// Contexts held, contexts current on any thread, and streams.
void fake_count_cuda(std::int64_t* counts) {
  const std::lock_guard lock(cuda().mutex);
  *counts = 0;
  for (const int retained : cuda().retained) *counts += retained;
  *++counts = cuda().pushed;
  *++counts = static_cast<std::int64_t>(cuda().streams.size());
}
}
