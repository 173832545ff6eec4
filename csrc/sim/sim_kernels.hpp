// The kernels that are built into the simulator, by name, and launches of them.
//
// The simulator is `csrc/sim/sim_*.cpp` in one library: sim_fibers.cpp runs threads, sim_bulk.cpp
// bulk copies, sim_kernels.cpp has the table and the entry points of C, and a file for each group
// of kernels (sim_copy.cpp, ...) includes their sources and enters them:
//
//     #include "../cuda/copy.cu"
//     static const kvtier::sim::Entry kEntries[] = {
//         kvtier::sim::entry<kvtier_gather_v16>("kvtier_gather_v16", {.block_max = 512}),
//     };
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_sim.h"

namespace kvtier::sim {

/// A launch that failed; the words say which thread and where.
class LaunchError : public std::runtime_error {
 public:
  /// @param code  CUDA's: 1 for a launch that is refused, 719 for one that went wrong
  LaunchError(int code, const std::string& words) : std::runtime_error(words), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

/// What a kernel asks of a launch.
struct KernelTraits {
  unsigned block_max = 1024;  // its __launch_bounds__
  bool threads_meet = true;   // false: no barrier, collective or mbarrier; runs without fibers
  int architecture_min = 80;  // no code for older ones, as 90 for bulk kernels
};

struct Kernel {
  const char* name;
  std::size_t argument_bytes;
  KernelTraits traits;
  void (*body)(const void* arguments);

  /// Run a launch to its end on this thread.
  ///
  /// @param arguments  the kernel's one argument, copied
  /// @throws LaunchError
  void run(dim3 grid, dim3 block, std::size_t shared_bytes, const void* arguments,
           std::uint64_t seed) const;
};

/// @return null if there is none of that name
const Kernel* find_kernel(const std::string& name);

/// Enters a kernel when the library is loaded.
class Entry {
 public:
  explicit Entry(const Kernel& kernel);
};

template <typename Function>
struct ArgumentOf;
template <typename Argument>
struct ArgumentOf<void (*)(Argument)> {
  using Type = std::remove_cv_t<Argument>;
};

template <auto kKernel>
Entry entry(const char* name, const KernelTraits& traits) {
  using Argument = typename ArgumentOf<decltype(kKernel)>::Type;
  return Entry({name, sizeof(Argument), traits,
                [](const void* arguments) { kKernel(*static_cast<const Argument*>(arguments)); }});
}

/// One launch, for sim_fibers.cpp.
struct Launch {
  const Kernel* kernel;
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
  const void* arguments;
  std::uint64_t seed;
  std::uint64_t first_cta;  // only these run, of all in the grid
  std::uint64_t cta_count;
};
void run_launch(const Launch& launch);

}  // namespace kvtier::sim

extern "C" {
/// Launch a kernel by name with a grid and a block of one dimension.
///
/// @return 0; else 1 (a launch that CUDA refuses), 500 (no such kernel) or 719 (it went wrong),
/// with
///         words on stderr and in kvtier_sim_error()
int kvtier_sim_launch(const char* name, unsigned grid, unsigned block, std::size_t shared_bytes,
                      const void* arguments, std::uint64_t seed);
/// The same for some CTAs of a grid that is too large to run whole.
int kvtier_sim_launch_part(const char* name, unsigned grid, unsigned block,
                           std::size_t shared_bytes, const void* arguments, std::uint64_t seed,
                           std::uint64_t first_cta, std::uint64_t cta_count);
/// Why this thread's last launch failed.
const char* kvtier_sim_error();
/// Size of a kernel's argument; 0 if there is no such kernel.
std::size_t kvtier_sim_argument_bytes(const char* name);
/// Name of the kernel at an index; null beyond the last one.
const char* kvtier_sim_kernel_name(std::size_t index);
}
