#include "device_kernels.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "device_state.hpp"
#include "kvtier/device_images.hpp"

namespace kvtier::device {
namespace {

constexpr std::size_t kArgumentBytesMax = 4096;  // of a launch, on every device

}  // namespace

Kernels::Kernels(const State& state, KernelMode mode) : state_(state) {
  std::string no_cubin = "KVTIER_CUDA=jit";
  if (mode == KernelMode::kAuto) {
    const auto cubin = find_cubin(state.major, state.minor);
    if (!cubin.empty()) load(cubin, "cubin");
    if (module_ != nullptr) return;
    no_cubin = cubin.empty() ? "no cubin is built in for compute capability " +
                                   std::to_string(state.major) + "." + std::to_string(state.minor)
                             : missing_;
  }
  const JitResult jit = compile_kernels(state.major, state.minor);
  if (!jit.image.empty()) load(jit.image, "jit");
  if (module_ != nullptr) return;
  missing_ = no_cubin + "; " + (jit.failure.empty() ? missing_ : jit.failure);
}

void Kernels::load(std::span<const std::byte> image, const std::string& words) {
  const cuda::Result result = state_.library.module_load_data(&module_, image.data());
  if (result == cuda::kOk) {
    words_ = words + " sm_" + std::to_string(10 * state_.major + state_.minor);
    missing_.clear();
    return;
  }
  module_ = nullptr;
  missing_ = "cuModuleLoadData: " + cuda::words_of(state_.library, result);
  if (cuda::is_sticky(result)) state_.check(result, "cuModuleLoadData");
}

void Kernels::unload() {
  if (module_ != nullptr) state_.library.module_unload(module_);
  module_ = nullptr;
}

Kernels::Known& Kernels::find(const std::string& name) {
  const auto known = functions_.find(name);
  if (known != functions_.end()) return known->second;
  cuda::Function function = nullptr;
  if (module_ != nullptr) {
    const cuda::Result result =
        state_.library.module_get_function(&function, module_, name.c_str());
    if (result == cuda::kNotFound) {
      function = nullptr;
    } else {
      state_.check(result, "cuModuleGetFunction");
    }
  }
  return functions_.emplace(name, Known{function}).first->second;
}

bool Kernels::has(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return find(name).function != nullptr;
}

void Kernels::launch(const std::string& name, unsigned grid, unsigned block, unsigned shared_bytes,
                     std::span<const std::byte> argument, cuda::Stream stream) {
  const std::lock_guard lock(mutex_);
  Known& known = find(name);
  if (known.function == nullptr) {
    throw std::invalid_argument("no kernel " + name +
                                (missing_.empty() ? " on this device" : ": " + missing_));
  }
  if (grid == 0 || block == 0) {
    throw std::invalid_argument(name + " by " + std::to_string(grid) + " CTAs of " +
                                std::to_string(block) + " threads");
  }
  if (shared_bytes > static_cast<unsigned>(state_.shared_bytes_max)) {
    throw std::invalid_argument(name + " with " + std::to_string(shared_bytes) +
                                " bytes of shared memory, the device has " +
                                std::to_string(state_.shared_bytes_max));
  }
  if (argument.empty() || argument.size() > kArgumentBytesMax) {
    throw std::invalid_argument(name + " with an argument of " + std::to_string(argument.size()) +
                                " bytes");
  }
  if (shared_bytes > known.shared_bytes_max) {
    state_.check(
        state_.library.function_set_attribute(known.function, cuda::kFunctionMaxDynamicSharedBytes,
                                              static_cast<int>(shared_bytes)),
        "cuFuncSetAttribute");
    known.shared_bytes_max = shared_bytes;
  }
  // As much as the driver may read, whatever the kernel's argument has.
  alignas(16) std::array<std::byte, kArgumentBytesMax> copy{};
  std::memcpy(copy.data(), argument.data(), argument.size());
  void* arguments[] = {copy.data()};
  const cuda::Result result = state_.library.launch_kernel(
      known.function, grid, 1, 1, block, 1, 1, shared_bytes, stream, arguments, nullptr);
  if (result == cuda::kInvalidValue || result == cuda::kLaunchOutOfResources) {
    throw std::invalid_argument(name + " cannot be launched by " + std::to_string(grid) +
                                " CTAs of " + std::to_string(block) + " threads");
  }
  state_.check(result, "cuLaunchKernel");
}

}  // namespace kvtier::device
