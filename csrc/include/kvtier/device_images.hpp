// The device kernels as a driver loads them: built in for the architectures known when kvtier was
// built, compiled here by NVRTC for others.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace kvtier {

/// The built-in cubin that a device of compute capability `major`.`minor` runs; else empty.
///
/// A device runs cubins of its own major number and a minor one not above its own, unless it is
/// one of a system on chip (8.7, 10.1), which runs its own only. 16-byte aligned, never freed.
/// Any thread.
std::span<const std::byte> find_cubin(int major, int minor);

/// Such as {80, 86}; what the build had cubins made for, ascending.
std::vector<int> cubin_architectures();

/// What NVRTC made of the kernels.
struct JitResult {
  std::vector<std::byte> image;  // a cubin, or PTX with its zero byte; empty on failure
  std::string target;            // "sm_90"; "compute_121" is PTX of the newest that NVRTC knows
  std::string compiler;          // "NVRTC 12.9"
  std::string failure;           // why there is no image, in words; else ""
  bool is_cached = false;        // it came from the cache
  std::string no_cache;          // why it could not be kept for the next process; else ""
};

/// Compile the built-in sources for a device of compute capability `major`.`minor`.
///
/// Takes some seconds, or milliseconds where the image lies in the cache (device_cache.hpp).
/// NVRTC is the library that KVTIER_NVRTC_LIBRARY names, else the system's, else the one of the
/// Python packages beside kvtier; it stays loaded. Any thread, several at once.
JitResult compile_kernels(int major, int minor) noexcept;

}  // namespace kvtier
