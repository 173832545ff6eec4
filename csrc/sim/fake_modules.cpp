// The stand-in's modules and launches: kernels by name, run when their stream comes to them.
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>

#include "fake_kernels.hpp"
#include "fake_state.hpp"

namespace fake {

struct LoadedFunction {
  Kernel kernel;
  std::uintptr_t module;
  int device;
  std::size_t shared_bytes_max = api::kSharedBytesWithoutOptIn;
};

int max_shared_bytes(int capability) {
  // The documented most of 8.0, 9.0 and 10.0; all others have that of 8.6.
  if (capability == 80) return 163 << 10;
  return capability == 90 || capability == 100 ? 227 << 10 : 99 << 10;
}

namespace {

constexpr std::string_view kMagic = "kvtier-sim";  // an image of no GPU's code: it fits all
constexpr std::uint16_t kMachineCuda = 190;        // of ELF

/// 10 * major + minor of the GPU whose code an image is; 0: of any; none: it is no image.
std::optional<int> capability_of(const void* image) {
  const auto* const bytes = static_cast<const char*>(image);
  if (std::strncmp(bytes, kMagic.data(), kMagic.size()) == 0) return 0;
  if (std::strncmp(bytes, "\177ELF", 4) != 0) return std::nullopt;
  std::uint16_t machine = 0;
  std::memcpy(&machine, bytes + 18, sizeof(machine));
  if (machine != kMachineCuda) return std::nullopt;
  std::uint32_t flags = 0;
  std::memcpy(&flags, bytes + 48, sizeof(flags));
  const int abi_version = bytes[8];
  return static_cast<int>(abi_version < 8 ? flags & 0xff : (flags >> 8) & 0xff);
}

std::shared_ptr<LoadedFunction> find_function(void* function, int device) {
  const auto found = state().functions.find(reinterpret_cast<std::uintptr_t>(function));
  return found == state().functions.end() || found->second->device != device ? nullptr
                                                                             : found->second;
}

/// Whether a stream of the device still has a kernel of it. With the lock held.
bool is_running(std::uintptr_t module) {
  const void* const handle = handle_of(module);
  for (const auto& [number, stream] : state().streams) {
    if (stream->uses_module(handle)) return true;
  }
  for (const auto& [device, stream] : state().default_streams) {
    if (stream->uses_module(handle)) return true;
  }
  return false;
}

int run_now(const Kernel& kernel, const Launch& launch) {
  pass();
  if (const int code = fault_of(kKernelRun)) return code;
  try {
    kernel.run(launch);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", kernel.name.c_str(), error.what());
    mistake(kernel.name + ": " + error.what());
    return kLaunchFailed;
  }
  return 0;
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

int cuModuleLoadData(void** module, const void* image) {
  const Begun begun = begin(kModuleLoad);
  if (begun.code != 0) return begun.code;
  const auto capability = capability_of(image);
  if (!capability) return kInvalidImage;
  const std::lock_guard lock(state().mutex);
  const int ours = static_cast<int>(state().settings[kSetCapability]);
  const bool is_fit = *capability == 0 || (*capability / 10 == ours / 10 && *capability <= ours);
  if (!is_fit) return api::kNoBinaryForGpu;
  const std::uintptr_t number = state().next_handle++;
  state().modules[number] = std::make_shared<LoadedModule>(LoadedModule{begun.device});
  *module = handle_of(number);
  return 0;
}

int cuModuleUnload(void* module) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto number = reinterpret_cast<std::uintptr_t>(module);
  const auto found = state().modules.find(number);
  if (found == state().modules.end() || found->second->device != begun.device) {
    mistake("cuModuleUnload of no module of this context");
    return kInvalidHandle;
  }
  if (is_running(number)) mistake("cuModuleUnload with kernels of it enqueued");
  state().modules.erase(found);
  std::erase_if(state().functions,
                [number](const auto& entry) { return entry.second->module == number; });
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  const Begun begun = begin(kModuleGetFunction);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto number = reinterpret_cast<std::uintptr_t>(module);
  const auto found = state().modules.find(number);
  if (found == state().modules.end() || found->second->device != begun.device) {
    return kInvalidHandle;
  }
  const auto kernel = find_kernel(name);
  if (!kernel || kernel->capability_min > state().settings[kSetCapability]) return api::kNotFound;
  const std::uintptr_t handle = state().next_handle++;
  state().functions[handle] =
      std::make_shared<LoadedFunction>(LoadedFunction{*kernel, number, begun.device});
  *function = handle_of(handle);
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  const Begun begun = begin(kFunctionSetAttribute);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto found = find_function(function, begun.device);
  if (!found) return kInvalidHandle;
  const int most = max_shared_bytes(static_cast<int>(state().settings[kSetCapability]));
  if (attribute != api::kFunctionMaxDynamicSharedBytes || value < 0 || value > most) {
    return api::kInvalidValue;
  }
  found->shared_bytes_max = static_cast<std::size_t>(value);
  return 0;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** arguments, void** extra) {
  const Begun begun = begin(kLaunch);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto found = find_function(function, begun.device);
  const auto target = find_stream(stream, begun.device);
  if (!found || !target) return kInvalidHandle;
  const bool is_grid = grid_x - 1 < 0x7fffffff && grid_y - 1 < 0xffff && grid_z - 1 < 0xffff;
  const std::uint64_t threads = std::uint64_t{block_x} * block_y * block_z;
  const bool is_block =
      threads != 0 && block_x <= 1024 && block_y <= 1024 && block_z <= 64 && threads <= 1024;
  if (!is_grid || !is_block || extra != nullptr || arguments == nullptr ||
      shared_bytes > found->shared_bytes_max) {
    return api::kInvalidValue;
  }
  if (threads > found->kernel.threads_max) return api::kLaunchOutOfResources;
  const std::int64_t count = ++state().counters.launches;
  Launch launch{.grid = {grid_x, grid_y, grid_z},
                .block = {block_x, block_y, block_z},
                .shared_bytes = shared_bytes,
                .arguments = std::vector<std::byte>(found->kernel.argument_bytes),
                .seed = static_cast<std::uint64_t>(state().settings[kSetSeed] * 1000003 + count)};
  // Now, not when the stream comes to it: they are the caller's again.
  std::memcpy(launch.arguments.data(), arguments[0], launch.arguments.size());
  target->add({.run = [kernel = found->kernel,
                       launch = std::move(launch)] { return run_now(kernel, launch); },
               .module = handle_of(found->module)});
  return 0;
}
}
