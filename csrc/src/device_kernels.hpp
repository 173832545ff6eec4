// The kernels of one device, loaded: built in, or compiled here. For device_*.cpp only.
#pragma once
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "../shim/cuda.hpp"
#include "kvtier/device.hpp"

namespace kvtier::device {

class State;

/// All calls with the device's context current.
class Kernels {
 public:
  /// Loads them; where that cannot be, `words` is empty and `missing` says why.
  ///
  /// @throws DeviceError the device has failed
  Kernels(const State& state, KernelMode mode);
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  /// Nothing of them runs any more.
  void unload();

  const std::string& words() const { return words_; }
  const std::string& missing() const { return missing_; }

  /// Enqueue one. The bytes of the argument are copied before this returns.
  ///
  /// @throws std::invalid_argument there is no such kernel, or the device cannot launch it so
  /// @throws DeviceError
  void launch(const std::string& name, unsigned grid, unsigned block, unsigned shared_bytes,
              std::span<const std::byte> argument, cuda::Stream stream);
  /// Whether there is one of that name.
  bool has(const std::string& name);

 private:
  struct Known {
    cuda::Function function;  // null: not in this image
    unsigned shared_bytes_max = cuda::kSharedBytesWithoutOptIn;
  };

  void load(std::span<const std::byte> image, const std::string& words);
  Known& find(const std::string& name);

  const State& state_;
  std::string words_;
  std::string missing_;
  cuda::Module module_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, Known> functions_;
};

}  // namespace kvtier::device
