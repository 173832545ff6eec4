// A stand-in for NVIDIA's libcufile: the calls that kvtier uses, on host memory, with faults on
// command. It is stricter than the real one: what is not registered, twice registered or left over
// is noticed.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace {

struct Status {
  int code;
  int cuda;
};

struct Description {
  int type;
  union {
    int fd;
    void* other;
  } file;
  const void* operations;
};

constexpr int kInvalid = 5022;
constexpr int kMemoryAlreadyRegistered = 5023;
constexpr int kMemoryNotRegistered = 5024;
constexpr int kFileNotRegistered = 5027;
constexpr int kDriverNotInitialised = 5001;

/// Which calls a fault is for; the numbers are the test's.
enum Call { kDriverOpen, kHandleRegister, kBufferRegister, kRead, kWrite, kCallCount };

struct Fault {
  int skip = 0;   // calls that go well first
  int count = 0;  // then as many fail
  int code = 0;   // an errno, or cuFile's own
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uintptr_t, int> handles;  // a number of ours -> a cached descriptor
  std::map<std::uintptr_t, std::size_t> buffers;
  std::uintptr_t next_handle = 1;
  int drivers = 0;
  int mistakes = 0;
  std::int64_t calls[kCallCount] = {};
  Fault faults[kCallCount];
  std::size_t most_bytes = std::numeric_limits<std::size_t>::max();
  bool is_held = false;
  int waiting = 0;
};

Fake& fake() {
  static Fake instance;
  return instance;
}

/// The code with which this call is to fail, or 0. Under the lock.
int fault_of(Call call) {
  ++fake().calls[call];
  Fault& fault = fake().faults[call];
  if (fault.count == 0) return 0;
  if (fault.skip > 0) {
    --fault.skip;
    return 0;
  }
  --fault.count;
  return fault.code;
}

/// A descriptor for one call, or a code below 0.
int begin(Call call, std::uintptr_t handle, std::uintptr_t base, std::size_t& nbytes,
          off_t buffer_offset) {
  std::unique_lock lock(fake().mutex);
  if (fake().is_held) {
    ++fake().waiting;
    fake().changed.notify_all();
    fake().changed.wait(lock, [] { return !fake().is_held; });
    --fake().waiting;
  }
  if (fake().drivers == 0) return -kDriverNotInitialised;
  const auto found = fake().handles.find(handle);
  if (found == fake().handles.end()) return -kFileNotRegistered;
  // Memory that is registered must be named by its base.
  for (const auto& [start, length] : fake().buffers) {
    const bool is_in = base >= start && base < start + length;
    if (is_in && base != start) ++fake().mistakes;
    if (base == start && static_cast<std::size_t>(buffer_offset) + nbytes > length) {
      return -kInvalid;
    }
  }
  if (const int code = fault_of(call)) {
    if (code >= 5000) return -code;
    errno = code;
    return -1;
  }
  nbytes = std::min(nbytes, fake().most_bytes);
  return found->second;
}

}  // namespace

extern "C" {

Status cuFileDriverOpen() {
  const std::lock_guard lock(fake().mutex);
  if (const int code = fault_of(kDriverOpen)) return {code, code == 5011 ? 100 : 0};
  ++fake().drivers;
  return {0, 0};
}

Status cuFileDriverClose_v2() {
  const std::lock_guard lock(fake().mutex);
  if (fake().drivers == 0 || !fake().handles.empty() || !fake().buffers.empty()) {
    ++fake().mistakes;
  }
  --fake().drivers;
  return {0, 0};
}

Status cuFileHandleRegister(void** handle, Description* description) {
  const std::lock_guard lock(fake().mutex);
  if (const int code = fault_of(kHandleRegister)) return {code, 0};
  if (fake().drivers == 0) return {kDriverNotInitialised, 0};
  if (description->type != 1 || description->operations != nullptr) return {kInvalid, 0};
  // Through the cache, so that any offset and length will do, as with the real one.
  const std::string path = "/proc/self/fd/" + std::to_string(description->file.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {5018, 0};
  const std::uintptr_t number = fake().next_handle++;
  fake().handles[number] = fd;
  *handle = reinterpret_cast<void*>(number);
  return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
  const std::lock_guard lock(fake().mutex);
  const auto found = fake().handles.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == fake().handles.end()) {
    ++fake().mistakes;
    return;
  }
  close(found->second);
  fake().handles.erase(found);
}

Status cuFileBufRegister(const void* base, std::size_t nbytes, int flags) {
  const std::lock_guard lock(fake().mutex);
  if (const int code = fault_of(kBufferRegister)) return {code, 0};
  if (fake().drivers == 0) return {kDriverNotInitialised, 0};
  if (flags != 0 || base == nullptr) return {kInvalid, 0};
  const auto start = reinterpret_cast<std::uintptr_t>(base);
  for (const auto& [other, length] : fake().buffers) {
    if (start < other + length && other < start + nbytes) return {kMemoryAlreadyRegistered, 0};
  }
  fake().buffers[start] = nbytes;
  return {0, 0};
}

Status cuFileBufDeregister(const void* base) {
  const std::lock_guard lock(fake().mutex);
  if (fake().buffers.erase(reinterpret_cast<std::uintptr_t>(base)) == 1) return {0, 0};
  ++fake().mistakes;
  return {kMemoryNotRegistered, 0};
}

ssize_t cuFileRead(void* handle, void* base, std::size_t nbytes, off_t file_offset,
                   off_t buffer_offset) {
  const int fd = begin(kRead, reinterpret_cast<std::uintptr_t>(handle),
                       reinterpret_cast<std::uintptr_t>(base), nbytes, buffer_offset);
  return fd < 0 ? fd : pread(fd, static_cast<char*>(base) + buffer_offset, nbytes, file_offset);
}

ssize_t cuFileWrite(void* handle, const void* base, std::size_t nbytes, off_t file_offset,
                    off_t buffer_offset) {
  const int fd = begin(kWrite, reinterpret_cast<std::uintptr_t>(handle),
                       reinterpret_cast<std::uintptr_t>(base), nbytes, buffer_offset);
  if (fd < 0) return fd;
  return pwrite(fd, static_cast<const char*>(base) + buffer_offset, nbytes, file_offset);
}

// What a test says and asks
// ------------------------------------------------------------------------

/// The calls after the next `skip` of this kind fail, `count` of them, with `code`.
void fake_fail(int call, int skip, int count, int code) {
  const std::lock_guard lock(fake().mutex);
  fake().faults[call] = {skip, count, code};
}

/// Each call moves at most so many bytes; 0: no bound.
void fake_short(std::size_t most_bytes) {
  const std::lock_guard lock(fake().mutex);
  fake().most_bytes = most_bytes == 0 ? std::numeric_limits<std::size_t>::max() : most_bytes;
}

/// Calls that move bytes wait until they are let go.
void fake_hold(int is_held) {
  const std::lock_guard lock(fake().mutex);
  fake().is_held = is_held != 0;
  fake().changed.notify_all();
}

/// Wait until so many calls are held; 0 when none came for a minute.
int fake_wait_held(int count) {
  std::unique_lock lock(fake().mutex);
  return fake().changed.wait_for(lock, std::chrono::seconds(60),
                                 [count] { return fake().waiting >= count; });
}

/// Drivers, files and buffers that are open now, mistakes of the caller, and calls so far.
void fake_counts(std::int64_t* counts) {
  const std::lock_guard lock(fake().mutex);
  *counts++ = fake().drivers;
  *counts++ = static_cast<std::int64_t>(fake().handles.size());
  *counts++ = static_cast<std::int64_t>(fake().buffers.size());
  *counts++ = fake().mistakes;
  for (const std::int64_t calls : fake().calls) *counts++ = calls;
}
}
