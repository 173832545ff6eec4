// A stand-in for NVIDIA's libcufile: the calls that kvtier uses, on host memory, with faults on
// command. It is stricter than the real one: what is not registered, twice registered or left over
// is noticed.
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "fake_calls.hpp"
#include "fake_cuda.hpp"

namespace {

using namespace fake;

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
constexpr int kCudaFailed = 5011;
constexpr int kOtherContext = 5015;
constexpr int kMemoryAlreadyRegistered = 5023;
constexpr int kMemoryNotRegistered = 5024;
constexpr int kFileNotRegistered = 5027;
constexpr int kDriverNotInitialised = 5001;

struct Cufile {
  std::mutex mutex;
  std::map<std::uintptr_t, int> handles;  // a number of ours -> a cached descriptor
  std::map<std::uintptr_t, std::size_t> buffers;
  std::map<void*, unsigned> streams;  // and what is said of them
  std::uintptr_t next_handle = 1;
  int drivers = 0;
  std::size_t most_bytes = std::numeric_limits<std::size_t>::max();
};

Cufile& cufile() {
  static Cufile instance;
  return instance;
}

/// What is wrong with the context in which `address` is used, or 0; host memory needs none.
int wrong_context(std::uintptr_t address, int device) {
  const int owner = device_at(address);
  return owner == kNoDevice || owner == device ? 0 : kOtherContext;
}

/// A descriptor for one call in the context of `device`, or a code below 0.
int begin(Call call, void* handle, const void* address, std::size_t& nbytes, off_t buffer_offset,
          int device) {
  pass();
  const auto base = reinterpret_cast<std::uintptr_t>(address);
  if (const int code = wrong_context(base + static_cast<std::size_t>(buffer_offset), device)) {
    return -code;
  }
  const std::lock_guard lock(cufile().mutex);
  if (cufile().drivers == 0) return -kDriverNotInitialised;
  const auto found = cufile().handles.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == cufile().handles.end()) return -kFileNotRegistered;
  // Memory that is registered must be named by its base.
  for (const auto& [start, length] : cufile().buffers) {
    const bool is_in = base >= start && base < start + length;
    if (is_in && base != start) mistake("registered memory that is not named by its base");
    if (base == start && static_cast<std::size_t>(buffer_offset) + nbytes > length) {
      return -kInvalid;
    }
  }
  if (const int code = fault_of(call)) {
    if (code >= 5000) return -code;
    errno = code;
    return -1;
  }
  nbytes = std::min(nbytes, cufile().most_bytes);
  return found->second;
}

ssize_t read_from(void* handle, void* base, std::size_t nbytes, off_t file_offset,
                  off_t buffer_offset, int device) {
  const int fd = begin(kRead, handle, base, nbytes, buffer_offset, device);
  return fd < 0 ? fd : pread(fd, static_cast<char*>(base) + buffer_offset, nbytes, file_offset);
}

ssize_t write_to(void* handle, const void* base, std::size_t nbytes, off_t file_offset,
                 off_t buffer_offset, int device) {
  const int fd = begin(kWrite, handle, base, nbytes, buffer_offset, device);
  if (fd < 0) return fd;
  return pwrite(fd, static_cast<const char*>(base) + buffer_offset, nbytes, file_offset);
}

}  // namespace

extern "C" {

Status cuFileDriverOpen() {
  const std::lock_guard lock(cufile().mutex);
  if (const int code = fault_of(kDriverOpen)) return {code, code == kCudaFailed ? 100 : 0};
  ++cufile().drivers;
  return {0, 0};
}

Status cuFileDriverClose_v2() {
  const std::lock_guard lock(cufile().mutex);
  if (cufile().drivers == 0 || !cufile().handles.empty() || !cufile().buffers.empty() ||
      !cufile().streams.empty()) {
    mistake("cuFileDriverClose with something open or no driver");
  }
  --cufile().drivers;
  return {0, 0};
}

Status cuFileHandleRegister(void** handle, Description* description) {
  const std::lock_guard lock(cufile().mutex);
  if (const int code = fault_of(kHandleRegister)) return {code, 0};
  if (cufile().drivers == 0) return {kDriverNotInitialised, 0};
  if (description->type != 1 || description->operations != nullptr) return {kInvalid, 0};
  // Through the cache, so that any offset and length will do, as with the real one.
  const std::string path = "/proc/self/fd/" + std::to_string(description->file.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {5018, 0};
  const std::uintptr_t number = cufile().next_handle++;
  cufile().handles[number] = fd;
  *handle = reinterpret_cast<void*>(number);
  return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
  const std::lock_guard lock(cufile().mutex);
  const auto found = cufile().handles.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == cufile().handles.end()) {
    mistake("cuFileHandleDeregister of no handle");
    return;
  }
  close(found->second);
  cufile().handles.erase(found);
}

Status cuFileBufRegister(const void* base, std::size_t nbytes, int flags) {
  const std::lock_guard lock(cufile().mutex);
  if (const int code = fault_of(kBufferRegister)) return {code, 0};
  if (cufile().drivers == 0) return {kDriverNotInitialised, 0};
  if (flags != 0 || base == nullptr) return {kInvalid, 0};
  const auto start = reinterpret_cast<std::uintptr_t>(base);
  if (const int code = wrong_context(start, current_device())) return {code, 0};
  for (const auto& [other, length] : cufile().buffers) {
    if (start < other + length && other < start + nbytes) return {kMemoryAlreadyRegistered, 0};
  }
  cufile().buffers[start] = nbytes;
  return {0, 0};
}

Status cuFileBufDeregister(const void* base) {
  const std::lock_guard lock(cufile().mutex);
  if (cufile().buffers.erase(reinterpret_cast<std::uintptr_t>(base)) == 1) return {0, 0};
  mistake("cuFileBufDeregister of memory that is not registered");
  return {kMemoryNotRegistered, 0};
}

ssize_t cuFileRead(void* handle, void* base, std::size_t nbytes, off_t file_offset,
                   off_t buffer_offset) {
  return read_from(handle, base, nbytes, file_offset, buffer_offset, current_device());
}

ssize_t cuFileWrite(void* handle, const void* base, std::size_t nbytes, off_t file_offset,
                    off_t buffer_offset) {
  return write_to(handle, base, nbytes, file_offset, buffer_offset, current_device());
}

#ifndef FAKE_WITHOUT_STREAMS

Status cuFileStreamRegister(void* stream, unsigned flags) {
  if (const int code = fault_of(kStreamRegister)) return {code, 0};
  const std::lock_guard lock(cufile().mutex);
  if (device_of_stream(stream) == kNoDevice ||
      !cufile().streams.try_emplace(stream, flags).second) {
    mistake("cuFileStreamRegister of no stream, or twice");
    return {kInvalid, 0};
  }
  return {0, 0};
}

Status cuFileStreamDeregister(void* stream) {
  const std::lock_guard lock(cufile().mutex);
  if (device_of_stream(stream) != kNoDevice && cufile().streams.erase(stream) == 1) return {0, 0};
  mistake("cuFileStreamDeregister of a stream that is not registered");
  return {kInvalid, 0};
}

}  // extern "C"

/// Look at the arguments when the stream comes to them, as the real one may, and not before.
template <typename Move>
Status enqueue_call(Call call, Move move, void* handle, void* base, std::size_t* nbytes,
                    off_t* file_offset, off_t* buffer_offset, ssize_t* moved, void* stream) {
  if (const int code = fault_of(call)) return {code, code == kCudaFailed ? 700 : 0};
  const int device = device_of_stream(stream);
  {
    const std::lock_guard lock(cufile().mutex);
    if (device == kNoDevice || !cufile().streams.contains(stream)) return {kInvalid, 0};
  }
  if (device != current_device()) return {kOtherContext, 0};
  enqueue(stream, [=, said = std::tuple(*nbytes, *file_offset, *buffer_offset)] {
    if (said != std::tuple(*nbytes, *file_offset, *buffer_offset)) mistake("arguments of cuFile changed before the stream came to them");
    *moved = move(handle, base, *nbytes, *file_offset, *buffer_offset, device);
  });
  return {0, 0};
}

extern "C" {

Status cuFileReadAsync(void* handle, void* base, std::size_t* nbytes, off_t* file_offset,
                       off_t* buffer_offset, ssize_t* moved, void* stream) {
  return enqueue_call(kReadAsync, read_from, handle, base, nbytes, file_offset, buffer_offset,
                      moved, stream);
}

Status cuFileWriteAsync(void* handle, void* base, std::size_t* nbytes, off_t* file_offset,
                        off_t* buffer_offset, ssize_t* moved, void* stream) {
  return enqueue_call(kWriteAsync, write_to, handle, base, nbytes, file_offset, buffer_offset,
                      moved, stream);
}

#endif

/// Each call moves at most so many bytes; 0: no bound.
void fake_short(std::size_t most_bytes) {
  const std::lock_guard lock(cufile().mutex);
  cufile().most_bytes = most_bytes == 0 ? std::numeric_limits<std::size_t>::max() : most_bytes;
}

/// Drivers, files, buffers and streams that are open now.
void fake_count_cufile(std::int64_t* counts) {
  const std::lock_guard lock(cufile().mutex);
  *counts++ = cufile().drivers;
  *counts++ = static_cast<std::int64_t>(cufile().handles.size());
  *counts++ = static_cast<std::int64_t>(cufile().buffers.size());
  *counts++ = static_cast<std::int64_t>(cufile().streams.size());
}
}
