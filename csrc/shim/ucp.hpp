// The part of the UCP C API (openucx.org, BSD-3) that the transfer engine uses, and its loader.
//
// UCX is optional and often comes with a machine's own network stack, so it is found when the
// program runs and its headers are not needed to build. Structs here are the leading part of UCX's:
// every one begins with a mask that says which fields count, so what newer versions append does
// not matter. A test compiles these declarations against the real headers and compares them.
#pragma once
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace kvtier::ucp {

/// No library is to be had, or it lacks what is needed; the message says where was looked and why.
class Missing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One byte wide, as UCX packs it: in a register the rest is not its own.
using Status = std::int8_t;
constexpr Status kOk = 0;
constexpr Status kInProgress = 1;
constexpr Status kNoMemory = -4;
constexpr Status kInvalidParam = -5;
constexpr Status kUnreachable = -6;
constexpr Status kUnsupported = -22;
constexpr Status kLast = -100;

/// Null: done at once. A status in disguise: failed. Else a request under way.
using Request = void*;
inline bool is_error(Request request) {
  return reinterpret_cast<std::uintptr_t>(request) >=
         static_cast<std::uintptr_t>(static_cast<std::intptr_t>(kLast));
}
inline Status status_of(Request request) {
  return static_cast<Status>(reinterpret_cast<std::intptr_t>(request));
}

struct OpaqueConfig;
struct OpaqueContext;
struct OpaqueWorker;
struct OpaqueAddress;
struct OpaqueEndpoint;
struct OpaqueMemory;
struct OpaqueRemoteKey;
using Config = OpaqueConfig*;
using Context = OpaqueContext*;
using Worker = OpaqueWorker*;
using Address = OpaqueAddress*;
using Endpoint = OpaqueEndpoint*;
using Memory = OpaqueMemory*;
using RemoteKey = OpaqueRemoteKey*;

constexpr std::uint64_t kParamFeatures = 1U << 0;
constexpr std::uint64_t kParamMtWorkersShared = 1U << 5;
constexpr std::uint64_t kFeatureRma = 1U << 1;
constexpr std::uint64_t kFeatureWakeup = 1U << 4;
constexpr std::uint64_t kFeatureAm = 1U << 6;
struct ContextParams {
  std::uint64_t field_mask;
  std::uint64_t features;
  std::size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  std::uint64_t tag_sender_mask;
  int mt_workers_shared;
};

constexpr std::uint64_t kWorkerParamThreadMode = 1U << 0;
constexpr std::uint64_t kWorkerParamFlags = 1U << 5;
constexpr std::uint64_t kWorkerIgnoreRequestLeak = 1U << 0;
enum class ThreadMode : std::uint32_t { kSingle, kSerialized, kMulti };
struct CpuSet {
  unsigned long bits[16];
};
struct WorkerParams {
  std::uint64_t field_mask;
  ThreadMode thread_mode;
  CpuSet cpu_mask;
  unsigned events;
  void* user_data;
  int event_fd;
  std::uint64_t flags;
};

constexpr std::uint64_t kEndpointParamRemoteAddress = 1U << 0;
constexpr std::uint64_t kEndpointParamErrorMode = 1U << 1;
constexpr std::uint64_t kEndpointParamErrorHandler = 1U << 2;
enum class ErrorMode : std::uint32_t { kNone, kPeer };
struct ErrorHandler {
  void (*callback)(void* argument, Endpoint endpoint, Status status);
  void* argument;
};
struct EndpointParams {
  std::uint64_t field_mask;
  const OpaqueAddress* address;
  ErrorMode error_mode;
  ErrorHandler error_handler;
};

constexpr std::uint64_t kMemoryParamAddress = 1U << 0;
constexpr std::uint64_t kMemoryParamLength = 1U << 1;
struct MemoryParams {
  std::uint64_t field_mask;
  void* address;
  std::size_t length;
};

constexpr std::uint32_t kOpCallback = 1U << 1;
constexpr std::uint32_t kOpUserData = 1U << 2;
constexpr std::uint32_t kOpDatatype = 1U << 3;
constexpr std::uint32_t kOpFlags = 1U << 4;
constexpr std::uint32_t kOpMemory = 1U << 8;
constexpr std::uint32_t kCloseForce = 1U << 0;
constexpr std::uint32_t kAmSendEager = 1U << 1;
constexpr std::uint64_t kDatatypeIov = 2;
struct Iov {
  void* buffer;
  std::size_t length;
};
struct RequestParams {
  std::uint32_t op_attr_mask;
  std::uint32_t flags;
  void* request;
  void (*send_callback)(void* request, Status status, void* user_data);
  std::uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  std::uint32_t memory_type;
  void* receive_info;
  Memory memory;
};

constexpr std::uint64_t kAmParamId = 1U << 0;
constexpr std::uint64_t kAmParamFlags = 1U << 1;
constexpr std::uint64_t kAmParamCallback = 1U << 2;
constexpr std::uint64_t kAmParamArgument = 1U << 3;
constexpr std::uint32_t kAmWholeMessage = 1U << 0;
constexpr std::uint64_t kAmReceivedRendezvous = 1U << 17;
struct AmReceived {
  std::uint64_t attributes;
  Endpoint reply_endpoint;
};
struct AmHandlerParams {
  std::uint64_t field_mask;
  unsigned id;
  std::uint32_t flags;
  Status (*callback)(void* argument, const void* header, std::size_t header_length, void* data,
                     std::size_t length, const AmReceived* received);
  void* argument;
};

constexpr std::uint64_t kEndpointTransports = 1U << 3;
struct Transport {
  const char* name;
  const char* device;
};
struct EndpointAttributes {
  std::uint64_t field_mask;
  char name[32];
  sockaddr_storage local_address;
  sockaddr_storage remote_address;
  Transport* transports;
  unsigned transport_count;
  std::size_t transport_bytes;
};

/// The entry points, as the library has them. Never unloaded: UCX leaves threads and hooks behind.
struct Library {
  std::string path;
  unsigned major, minor, release;

  Status (*config_read)(const char* prefix, const char* file, Config* config);
  Status (*config_modify)(Config config, const char* name, const char* value);
  void (*config_release)(Config config);
  Status (*init_version)(unsigned major, unsigned minor, const ContextParams*, const OpaqueConfig*,
                         Context* context);
  void (*cleanup)(Context context);
  void (*context_print_info)(const OpaqueContext* context, std::FILE* stream);
  Status (*worker_create)(Context context, const WorkerParams*, Worker* worker);
  void (*worker_destroy)(Worker worker);
  Status (*worker_get_address)(Worker worker, Address* address, std::size_t* length);
  void (*worker_release_address)(Worker worker, Address address);
  unsigned (*worker_progress)(Worker worker);
  Status (*worker_get_efd)(Worker worker, int* fd);
  Status (*worker_arm)(Worker worker);
  Status (*ep_create)(Worker worker, const EndpointParams*, Endpoint* endpoint);
  Request (*ep_close_nbx)(Endpoint endpoint, const RequestParams*);
  Request (*ep_flush_nbx)(Endpoint endpoint, const RequestParams*);
  Status (*ep_rkey_unpack)(Endpoint endpoint, const void* packed, RemoteKey* key);
  void (*rkey_destroy)(RemoteKey key);
  Status (*rkey_pack)(Context context, Memory memory, void** packed, std::size_t* length);
  void (*rkey_buffer_release)(void* packed);
  Status (*mem_map)(Context context, const MemoryParams*, Memory* memory);
  Status (*mem_unmap)(Context context, Memory memory);
  Request (*put_nbx)(Endpoint endpoint, const void* local, std::size_t length, std::uint64_t remote,
                     RemoteKey key, const RequestParams*);
  Request (*get_nbx)(Endpoint endpoint, void* local, std::size_t length, std::uint64_t remote,
                     RemoteKey key, const RequestParams*);
  Status (*worker_set_am_recv_handler)(Worker worker, const AmHandlerParams*);
  Request (*am_send_nbx)(Endpoint endpoint, unsigned id, const void* header,
                         std::size_t header_length, const void* buffer, std::size_t count,
                         const RequestParams*);
  Status (*ep_query)(Endpoint endpoint, EndpointAttributes*);
  void (*request_free)(void* request);
  const char* (*status_string)(Status status);
};

/// The library, loaded at the first call; later calls give the same one.
///
/// Looks at what `KVTIER_UCX_LIBRARY` names, then at the system's `libucp.so.0`, then at
/// `wheel_path` (may be empty). UCX reads some settings while it is loaded; those that it would
/// otherwise choose badly for a library (its handlers of signals, its words on standard error) are
/// in the environment just then, unless the user has set them, and are taken out again.
///
/// @throws Missing
const Library& load(const std::string& wheel_path);

}  // namespace kvtier::ucp
