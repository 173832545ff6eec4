// The part of the CUDA driver API that kvtier uses, and its loader.
//
// The driver comes with the GPU and is found when the program runs; CUDA is not needed to build.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvtier::cuda {

/// There is no driver, it lacks what is needed, or it finds no GPU; the message says which.
class Missing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// 0, or what went wrong: a CUresult.
using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;
/// An address as a device knows it. Device, pinned and registered host memory share one space.
using Address = std::uint64_t;

// Results that are told from others.
constexpr Result kOk = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNoDevice = 100;
constexpr Result kNoBinaryForGpu = 209;  // an image without code for this compute capability
constexpr Result kNotFound = 500;
constexpr Result kNotReady = 600;  // what a query says of work that is not over: no error
constexpr Result kLaunchOutOfResources = 701;  // more threads than the kernel can have
constexpr Result kHostMemoryAlreadyRegistered = 712;
constexpr Result kHostMemoryNotRegistered = 713;

/// A stream that does not wait for what others do on the device's default stream.
constexpr unsigned kNonBlocking = 1;

// Flags of event_create.
constexpr unsigned kEventBlockingSync = 1;   // event_synchronize sleeps instead of spinning
constexpr unsigned kEventDisableTiming = 2;  // cheaper; event_elapsed_time refuses it

// Flags of host_allocate and host_register, the same bits for both.
constexpr unsigned kHostPortable = 1;   // pinned for all contexts
constexpr unsigned kHostDeviceMap = 2;  // kernels may use it, at its device pointer

// Attributes of a device.
constexpr int kDeviceMaxThreadsPerBlock = 1;
constexpr int kDeviceMaxBlockDimX = 2;
constexpr int kDeviceMaxGridDimX = 5;
constexpr int kDeviceMaxSharedBytesPerBlock = 8;  // without an opt-in by the function
constexpr int kDeviceMultiprocessorCount = 16;
constexpr int kDeviceCanMapHostMemory = 19;
constexpr int kDeviceAsyncEngineCount = 40;  // copy engines: 2 and more move both ways at once
constexpr int kDeviceComputeCapabilityMajor = 75;
constexpr int kDeviceComputeCapabilityMinor = 76;
constexpr int kDeviceCanUseHostPointerForRegistered = 91;  // device pointer = host pointer
constexpr int kDeviceMaxSharedBytesPerBlockOptIn = 97;     // with kFunctionMaxDynamicSharedBytes
constexpr int kDeviceHostRegisterSupported = 99;

// Attributes of a pointer, and what each is written to. An address that CUDA does not know, such as
// pageable host memory, is refused with kInvalidValue.
constexpr int kPointerContext = 1;        // Context
constexpr int kPointerMemoryType = 2;     // unsigned: kMemoryTypeHost or kMemoryTypeDevice
constexpr int kPointerDevicePointer = 3;  // Address
constexpr int kPointerHostPointer = 4;    // void*
constexpr int kPointerIsManaged = 8;      // unsigned, 0 before: a driver may write one byte of it
constexpr int kPointerDeviceOrdinal = 9;  // int
constexpr int kPointerRangeStart = 11;    // Address
constexpr int kPointerRangeBytes = 12;    // size_t

constexpr unsigned kMemoryTypeHost = 1;
constexpr unsigned kMemoryTypeDevice = 2;

/// The most dynamic shared memory that a launch of the function may ask for: needed above 48 KiB.
constexpr int kFunctionMaxDynamicSharedBytes = 8;
constexpr std::size_t kSharedBytesWithoutOptIn = 48 << 10;

/// When a copy of a batch may read its source. Targets are always written in stream order.
enum class SourceOrder : int {
  kStream = 1,         // after all that is on the stream before it
  kDuringApiCall = 2,  // before the call returns: nothing on the stream may write the source
  kAny = 3,            // at any time from the call on: nothing on the stream may write the source
};

/// Where an operand lies, for memory that has no fixed place; ignored for all others.
struct MemoryLocation {
  int type = 0;  // 0: nothing is said
  int id = 0;
};

/// What is said of the copies of a batch, from one on.
struct CopyAttributes {
  SourceOrder source_order = SourceOrder::kStream;
  MemoryLocation source_hint = {};
  MemoryLocation target_hint = {};
  unsigned flags = 0;
};

/// Rather use copy engines than SMs, so that kernels run beside it; a hint.
constexpr unsigned kCopyPreferOverlapWithCompute = 1;

/// The calls, found once; every pointer but the last is set.
///
/// Enqueuing calls need the stream's context to be current on the calling thread.
struct Library {
  Result (*init)(unsigned flags) = nullptr;
  /// 1000 * major + 10 * minor: the newest CUDA that the driver knows.
  Result (*driver_get_version)(int* version) = nullptr;
  Result (*get_error_name)(Result result, const char** name) = nullptr;
  Result (*get_error_string)(Result result, const char** words) = nullptr;

  Result (*device_get)(Device* device, int ordinal) = nullptr;
  Result (*device_get_count)(int* count) = nullptr;
  /// At most `capacity_bytes` with the closing zero.
  Result (*device_get_name)(char* name, int capacity_bytes, Device device) = nullptr;
  Result (*device_get_attribute)(int* value, int attribute, Device device) = nullptr;

  Result (*primary_context_retain)(Context* context, Device device) = nullptr;
  Result (*primary_context_release)(Device device) = nullptr;
  Result (*context_push)(Context context) = nullptr;
  Result (*context_pop)(Context* context) = nullptr;
  /// Null where none is current.
  Result (*context_get_current)(Context* context) = nullptr;

  Result (*stream_create)(Stream* stream, unsigned flags) = nullptr;
  /// Lower numbers go first; 0 is the default.
  Result (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority) = nullptr;
  Result (*stream_destroy)(Stream stream) = nullptr;
  Result (*stream_synchronize)(Stream stream) = nullptr;
  Result (*stream_query)(Stream stream) = nullptr;
  /// What is enqueued on the stream from now on waits for the event's last record so far. An event
  /// that was never recorded is not waited for.
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags) = nullptr;
  Result (*stream_get_context)(Stream stream, Context* context) = nullptr;

  Result (*event_create)(Event* event, unsigned flags) = nullptr;
  Result (*event_destroy)(Event event) = nullptr;
  /// Takes the stream's work so far; replaces what an earlier record took.
  Result (*event_record)(Event event, Stream stream) = nullptr;
  Result (*event_query)(Event event) = nullptr;
  Result (*event_synchronize)(Event event) = nullptr;
  Result (*event_elapsed_time)(float* elapsed_ms, Event start, Event end) = nullptr;

  Result (*memory_allocate)(Address* address, std::size_t nbytes) = nullptr;
  Result (*memory_free)(Address address) = nullptr;
  Result (*memory_get_info)(std::size_t* free_bytes, std::size_t* total_bytes) = nullptr;
  /// The whole allocation that has this address; for device memory only.
  Result (*memory_get_address_range)(Address* base, std::size_t* nbytes, Address address) = nullptr;
  Result (*host_allocate)(void** address, std::size_t nbytes, unsigned flags) = nullptr;
  Result (*host_free)(void* address) = nullptr;
  Result (*host_register)(void* address, std::size_t nbytes, unsigned flags) = nullptr;
  Result (*host_unregister)(void* address) = nullptr;
  Result (*host_get_device_pointer)(Address* device_address, void* address,
                                    unsigned flags) = nullptr;
  Result (*pointer_get_attribute)(void* value, int attribute, Address address) = nullptr;

  /// Between any two kinds of memory. Returns before the copy is done, unless one side is pageable.
  Result (*memcpy_async)(Address target, Address source, std::size_t nbytes,
                         Stream stream) = nullptr;
  Result (*memset_d8_async)(Address target, unsigned char value, std::size_t nbytes,
                            Stream stream) = nullptr;

  Result (*module_load_data)(Module* module, const void* image) = nullptr;
  Result (*module_unload)(Module module) = nullptr;
  Result (*module_get_function)(Function* function, Module module, const char* name) = nullptr;
  Result (*function_set_attribute)(Function function, int attribute, int value) = nullptr;
  /// `arguments` has the address of each argument; the values are copied before this returns.
  Result (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, Stream stream, void** arguments,
                          void** extra) = nullptr;

  /// `count` copies, in stream order as a whole and in no order among themselves. The attributes
  /// `attributes[k]` hold from copy `first_copies[k]` on; `first_copies[0]` is 0. The number of a
  /// copy at fault goes to `failed_copy`. Not for the default stream.
  ///
  /// This is the signature of CUDA 12.8; that of 13 has no `failed_copy`, and is never asked for.
  /// Null where the driver is older than 12.8: callers loop over memcpy_async.
  Result (*memcpy_batch_async)(Address* targets, Address* sources, std::size_t* lengths,
                               std::size_t count, CopyAttributes* attributes,
                               std::size_t* first_copies, std::size_t attribute_count,
                               std::size_t* failed_copy, Stream stream) = nullptr;
};

/// The CUDA whose signature of cuMemcpyBatchAsync is asked for.
constexpr int kBatchCopyVersion = 12080;

/// The library that KVTIER_CUDA_LIBRARY names, else the system's driver; initialised.
///
/// Stays loaded for good, as CUDA cannot be unloaded.
///
/// @throws Missing
Library load();

/// Such as "CUDA 700: CUDA_ERROR_ILLEGAL_ADDRESS".
std::string words_of(const Library& library, Result result);

/// A call failed; the message is such as "cuMemcpyAsync: CUDA 700: CUDA_ERROR_ILLEGAL_ADDRESS".
class CudaError : public std::runtime_error {
 public:
  CudaError(Result code, const std::string& message) : std::runtime_error(message), code_(code) {}

  Result code() const { return code_; }

 private:
  Result code_;
};

/// Nothing for 0.
///
/// @param call  what was called, for the message
/// @throws CudaError
void check(const Library& library, Result result, const char* call);

/// Whether the context is lost with this error: all that follows on it will fail, whoever calls.
bool is_sticky(Result result);

/// A device's primary context, the one that the CUDA runtime and torch use; given back at the end.
class PrimaryContext {
 public:
  /// On failure it is no context, and `result` says why.
  PrimaryContext(const Library& library, int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  Result result() const { return result_; }
  Context get() const { return context_; }

 private:
  const Library& library_;
  Device device_ = 0;
  Context context_ = nullptr;
  Result result_ = 0;
};

/// A context that is current on this thread as long as this lives; with none, nothing changes.
///
/// Pushed and popped, not set: the thread may be the user's, who has a context of his own current.
class CurrentContext {
 public:
  CurrentContext(const Library& library, Context context)
      : library_(library),
        is_pushed_(context != nullptr),
        result_(is_pushed_ ? library.context_push(context) : 0) {}
  ~CurrentContext() {
    Context popped = nullptr;
    if (is_pushed_ && result_ == 0) library_.context_pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  /// Why it is not current; 0 if it is.
  Result result() const { return result_; }

 private:
  const Library& library_;
  bool is_pushed_;
  Result result_;
};

}  // namespace kvtier::cuda
