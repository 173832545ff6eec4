// The part of the cuFile API (GPUDirect Storage) that the engine uses, and its loader.
//
// cuFile comes with CUDA and is found when the program runs; its headers are not needed to build.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace kvtier::cufile {

/// No library is to be had, or it lacks what is needed; the message says where was looked and why.
class Missing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What most calls answer: 0 or a code above `kErrorBase`, and CUDA's own where that was at fault.
struct Status {
  int code;
  int cuda;
};
constexpr int kErrorBase = 5000;
constexpr int kCudaFailed = 5011;
constexpr int kMemoryAlreadyRegistered = 5023;
constexpr int kDriverAlreadyOpen = 5026;

using Handle = void*;
enum class HandleType : int { kDescriptor = 1 };
struct FileDescription {
  HandleType type;
  union {
    int fd;
    void* other;
  } file;
  const void* operations;  // none for files of the system
};

/// That sizes and offsets of operations on a stream are what they are when they are submitted.
constexpr unsigned kStreamFixedInputs = 1 | 2 | 4;

struct Library {
  Status (*driver_open)() = nullptr;
  Status (*driver_close)() = nullptr;
  Status (*handle_register)(Handle* handle, FileDescription* description) = nullptr;
  void (*handle_deregister)(Handle handle) = nullptr;
  Status (*buffer_register)(const void* base, std::size_t nbytes, int flags) = nullptr;
  Status (*buffer_deregister)(const void* base) = nullptr;
  /// Bytes moved, -1 with errno, or minus a code above `kErrorBase`.
  ssize_t (*read)(Handle handle, void* base, std::size_t nbytes, off_t file_offset,
                  off_t buffer_offset) = nullptr;
  ssize_t (*write)(Handle handle, const void* base, std::size_t nbytes, off_t file_offset,
                   off_t buffer_offset) = nullptr;

  // Operations on CUDA streams, which came with CUDA 12.2; without one of them there are none.

  Status (*stream_register)(void* stream, unsigned flags) = nullptr;
  Status (*stream_deregister)(void* stream) = nullptr;
  /// As `read`, in the stream's order: what the pointers point to lives until then.
  Status (*read_async)(Handle handle, void* base, std::size_t* nbytes, off_t* file_offset,
                       off_t* buffer_offset, ssize_t* moved, void* stream) = nullptr;
  Status (*write_async)(Handle handle, void* base, std::size_t* nbytes, off_t* file_offset,
                        off_t* buffer_offset, ssize_t* moved, void* stream) = nullptr;
  std::string missing_for_streams;  // name of the call that is not there; empty if all are

  std::string path;
};

/// The library that KVTIER_CUFILE_LIBRARY names; without it the system's, else `wheel_path`.
///
/// `no_cuda` says why CUDA does not work here, if so: then only a library that is named is tried.
/// Stays loaded for good, as its threads may outlive every use.
///
/// @throws Missing none can be loaded
Library load(const std::string& wheel_path, const std::string& no_cuda);

/// The errno that says about the same as `code`, a cuFile code or an errno already.
int errno_of(int code);
/// What `code` means, in words.
std::string words_of(int code);

}  // namespace kvtier::cufile
