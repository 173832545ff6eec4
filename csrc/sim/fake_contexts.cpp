// The stand-in's devices, contexts and names, and what a test sets and reads.
#include <cstdio>
#include <cstring>
#include <string_view>

#include "fake_kernels.hpp"
#include "fake_state.hpp"

namespace fake {

State& state() {
  // Never ends: streams' threads may outlive what a process destroys at its end.
  static State& instance = *new State;
  return instance;
}

namespace {

thread_local std::vector<int> current;  // devices, as each has one context

bool is_device(int device) { return device >= 0 && device < state().settings[kSetDeviceCount]; }

struct Name {
  int code;
  const char* name;
  const char* words;
};

constexpr Name kNames[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for this device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of it is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "not a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

const Name* find_name(int code) {
  for (const Name& name : kNames) {
    if (name.code == code) return &name;
  }
  return nullptr;
}

/// What a context leaves behind at its last release.
void end_context(int device, std::unique_lock<std::mutex>& lock) {
  State& all = state();
  const bool is_lost = all.lost[device] != 0;
  const auto count = [&](const auto& things) {
    int found = 0;
    for (const auto& [handle, thing] : things) found += thing->device == device ? 1 : 0;
    return found;
  };
  std::vector<std::shared_ptr<Stream>> streams;
  for (auto at = all.streams.begin(); at != all.streams.end();) {
    const bool is_its = at->second->device() == device;
    if (is_its) streams.push_back(std::move(at->second));
    at = is_its ? all.streams.erase(at) : std::next(at);
  }
  if (!is_lost) {
    const auto leak = [](std::size_t left, const char* what) {
      if (left != 0) mistake("context released with " + std::to_string(left) + " " + what);
    };
    leak(streams.size(), "streams");
    leak(static_cast<std::size_t>(count(all.events)), "events");
    leak(static_cast<std::size_t>(count(all.modules)), "modules");
  }
  if (const auto found = all.default_streams.find(device); found != all.default_streams.end()) {
    streams.push_back(std::move(found->second));
    all.default_streams.erase(found);
  }
  lock.unlock();
  streams.clear();  // their threads end what they have
  lock.lock();
  const auto is_its = [device](const auto& entry) { return entry.second->device == device; };
  std::erase_if(all.events, is_its);
  std::erase_if(all.modules, is_its);
  drop_memory(device, !is_lost);
  sweep();
}

}  // namespace

void* handle_of(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

void* context_of(int device) { return &state().retained[device]; }

int current_device() { return current.empty() ? kNoDevice : current.back(); }

Begun begin() {
  const std::lock_guard lock(state().mutex);
  if (!state().is_initialised) return {kNoDevice, kNotInitialized};
  const int device = current_device();
  if (device == kNoDevice || state().retained[device] == 0) return {device, kInvalidContext};
  return {device, state().lost[device]};
}

Begun begin(Call call) {
  Begun begun = begin();
  bool is_lasting = false;
  const int code = fault_of(call, &is_lasting);
  if (begun.code != 0 || code == 0) return begun;
  if (is_lasting) {
    const std::lock_guard lock(state().mutex);
    lose(begun.device, code);
  }
  return {begun.device, code};
}

void lose(int device, int code) {
  if (state().lost[device] == 0) state().lost[device] = code;
  state().changed.notify_all();
}

}  // namespace fake

using namespace fake;

extern "C" {

int cuInit(unsigned flags) {
  if (const int code = fault_of(kInit)) return code;
  const std::lock_guard lock(state().mutex);
  if (state().settings[kSetDeviceCount] == 0) return api::kNoDevice;
  state().is_initialised = true;
  return flags == 0 ? 0 : api::kInvalidValue;
}

int cuDriverGetVersion(int* version) {
  if (const int code = fault_of(kDriverGetVersion)) return code;
  const std::lock_guard lock(state().mutex);
  *version = static_cast<int>(state().settings[kSetDriverVersion]);
  return 0;
}

int cuGetErrorName(int code, const char** name) {
  const Name* const found = find_name(code);
  *name = found != nullptr ? found->name : nullptr;
  return found != nullptr ? 0 : api::kInvalidValue;
}

int cuGetErrorString(int code, const char** words) {
  const Name* const found = find_name(code);
  *words = found != nullptr ? found->words : nullptr;
  return found != nullptr ? 0 : api::kInvalidValue;
}

int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(state().mutex);
  if (!state().is_initialised) return kNotInitialized;
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

int cuDeviceGetCount(int* count) {
  if (const int code = fault_of(kDeviceGetCount)) return code;
  const std::lock_guard lock(state().mutex);
  if (!state().is_initialised) return kNotInitialized;
  *count = static_cast<int>(state().settings[kSetDeviceCount]);
  return 0;
}

int cuDeviceGetName(char* name, int capacity_bytes, int device) {
  const std::lock_guard lock(state().mutex);
  if (!is_device(device)) return kInvalidDevice;
  if (capacity_bytes < 1) return api::kInvalidValue;
  std::snprintf(name, static_cast<std::size_t>(capacity_bytes), "%s",
                state().settings.name.c_str());
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (const int code = fault_of(kDeviceGetAttribute)) return code;
  const std::lock_guard lock(state().mutex);
  if (!is_device(device)) return kInvalidDevice;
  const Settings& settings = state().settings;
  const int capability = static_cast<int>(settings[kSetCapability]);
  const std::map<int, int> values = {
      {api::kDeviceMaxThreadsPerBlock, 1024},
      {api::kDeviceMaxBlockDimX, 1024},
      {api::kDeviceMaxGridDimX, 0x7fffffff},
      {api::kDeviceMaxSharedBytesPerBlock, static_cast<int>(api::kSharedBytesWithoutOptIn)},
      {api::kDeviceMultiprocessorCount, static_cast<int>(settings[kSetSmCount])},
      {api::kDeviceCanMapHostMemory, 1},
      {api::kDeviceAsyncEngineCount, 3},
      {api::kDeviceComputeCapabilityMajor, capability / 10},
      {api::kDeviceComputeCapabilityMinor, capability % 10},
      {api::kDeviceCanUseHostPointerForRegistered, settings[kSetIsAliasing] == 0 ? 1 : 0},
      {api::kDeviceMaxSharedBytesPerBlockOptIn, max_shared_bytes(capability)},
      {api::kDeviceHostRegisterSupported, 1}};
  const auto found = values.find(attribute);
  if (found == values.end()) return api::kInvalidValue;
  *value = found->second;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (const int code = fault_of(kContextRetain)) return code;
  const std::lock_guard lock(state().mutex);
  if (!state().is_initialised) return kNotInitialized;
  if (!is_device(device)) return kInvalidDevice;
  if (state().lost[device] != 0) return state().lost[device];
  ++state().retained[device];
  *context = context_of(device);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  std::unique_lock lock(state().mutex);
  if (device < 0 || device >= kDevicesMax) return kInvalidDevice;
  if (state().retained[device] == 0) {
    mistake("context released more often than retained");
    return kInvalidContext;
  }
  if (state().retained[device] == 1) end_context(device, lock);
  --state().retained[device];
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  bool is_lasting = false;
  const int code = fault_of(kContextPush, &is_lasting);
  const std::lock_guard lock(state().mutex);
  for (int device = 0; device < kDevicesMax; ++device) {
    if (context != context_of(device) || state().retained[device] == 0) continue;
    if (code != 0 && is_lasting) lose(device, code);
    // A lost context can be made current; what is done in it fails.
    if (code != 0) return code;
    current.push_back(device);
    ++state().current_count;
    return 0;
  }
  return code != 0 ? code : kInvalidContext;
}

int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  if (context != nullptr) *context = context_of(current.back());
  current.pop_back();
  const std::lock_guard lock(state().mutex);
  --state().current_count;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = current.empty() ? nullptr : context_of(current.back());
  return 0;
}

/// Set one of `Setting`; a memory limit holds for what is allocated from now on.
void fake_set(int setting, std::int64_t value) {
  const std::lock_guard lock(state().mutex);
  state().settings.values[setting] = value;
  if (setting == kSetIsAliasing) watch_addresses(value != 0);
}

void fake_set_name(const char* name) {
  const std::lock_guard lock(state().mutex);
  state().settings.name = name;
}

/// Wait until no stream has work; then all settings are as at first, no context is lost any more,
/// and what lost ones had is gone.
void fake_reset_cuda() {
  std::unique_lock lock(state().mutex);
  state().changed.wait(lock, [] {
    for (const auto& [handle, stream] : state().streams) {
      if (!stream->is_idle()) return false;
    }
    for (const auto& [device, stream] : state().default_streams) {
      if (!stream->is_idle()) return false;
    }
    return true;
  });
  state().settings = Settings();
  watch_addresses(false);
  for (int device = 0; device < kDevicesMax; ++device) {
    if (state().lost[device] == 0) continue;
    end_context(device, lock);
    state().lost[device] = 0;
  }
  state().counters = {};
  check_quarantine();
}

/// Contexts held, contexts current on any thread, streams, events, modules, then allocations of
/// device memory, of pinned host memory, and registrations of host memory.
void fake_count_cuda(std::int64_t* counts) {
  const std::lock_guard lock(state().mutex);
  State& all = state();
  *counts = 0;
  for (const int retained : all.retained) *counts += retained;
  *++counts = all.current_count;
  *++counts = static_cast<std::int64_t>(all.streams.size());
  *++counts = static_cast<std::int64_t>(all.events.size());
  *++counts = static_cast<std::int64_t>(all.modules.size());
  for (const Kind kind : {Kind::kDevice, Kind::kPinned, Kind::kRegistered}) {
    *++counts = 0;
    for (const auto& [start, memory] : all.memory) {
      const bool is_alias = memory.is_host() && start != memory.host_start;
      if (memory.kind == kind && !is_alias) ++*counts;
    }
  }
}

/// As `Counters` has them; looks for writes to freed memory first.
void fake_counters(std::int64_t* counters) {
  const std::lock_guard lock(state().mutex);
  check_quarantine();
  std::memcpy(counters, &state().counters, sizeof(Counters));
}
}
