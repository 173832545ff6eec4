// Copies of one contiguous run in host memory, in the ways that this processor offers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kvtier/thread_pool.hpp"

namespace kvtier {

enum class CopyMode {
  kAuto,    // the best for the size, see choose_copy_mode
  kMemcpy,  // the C library's
  kNt256,   // non-temporal 32-byte stores: they go around the caches
  kNt512,   // the same, 64 bytes
  kMovsb,   // the processor's own string copy
};

std::string_view copy_mode_name(CopyMode mode);

/// The modes that run here; `kAuto` is the first.
std::span<const CopyMode> copy_modes();

/// The runnable mode of that name, or nothing.
std::optional<CopyMode> find_copy_mode(std::string_view name);

/// What `kAuto` means for a job that moves `total_bytes` in runs of `run_bytes`.
CopyMode choose_copy_mode(std::size_t run_bytes, std::size_t total_bytes);

/// How one mode copies runs that do not overlap.
struct CopyKernel {
  void (*one)(std::byte* target, const std::byte* source, std::size_t bytes);

  /// Copies kCopyLanes runs of `bytes` each, a few lines of each in turn if that is faster: after a
  /// jump a single stream waits for memory, four hide each other's waits.
  void (*lanes)(std::byte* const* targets, const std::byte* const* sources, std::size_t bytes);
};

inline constexpr std::size_t kCopyLanes = 4;

/// @param mode  a runnable one, not `kAuto`
CopyKernel copy_kernel(CopyMode mode);

/// Makes the thread's non-temporal stores visible to others, as every thread must after its last
/// run and before it reports. Costs next to nothing after the other modes.
void copy_fence();

/// Copies `lengths[i]` bytes from `sources[i]` to `targets[i]` (addresses) on the pool's threads.
///
/// @throws std::invalid_argument, before anything is copied, if the counts differ or a piece that
///         is not empty has address 0
void copy_pieces(ThreadPool& pool, std::span<const std::uint64_t> targets,
                 std::span<const std::uint64_t> sources, std::span<const std::uint64_t> lengths,
                 CopyMode mode);

}  // namespace kvtier
