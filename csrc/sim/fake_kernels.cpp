#include "fake_kernels.hpp"

#include <cstring>
#include <stdexcept>

#include "fake_state.hpp"

#ifndef FAKE_WITHOUT_KERNELS
#include "sim_kernels.hpp"
#endif

namespace fake {
namespace {

/// For tests of the stand-in itself.
struct FakeCopyArgs {
  std::uint64_t target;
  std::uint64_t source;
  std::uint64_t nbytes;
};

void copy(const Launch& launch) {
  FakeCopyArgs arguments;
  std::memcpy(&arguments, launch.arguments.data(), sizeof(arguments));
  std::memmove(reinterpret_cast<void*>(arguments.target),
               reinterpret_cast<const void*>(arguments.source), arguments.nbytes);
}

void fail(const Launch& /*launch*/) { throw std::runtime_error("it fails"); }

#ifndef FAKE_WITHOUT_KERNELS
bool is_only_the_hosts(const void* address, std::size_t /*nbytes*/) {
  const std::lock_guard lock(state().mutex);
  std::uintptr_t start = 0;
  const Memory* const found = find_memory(reinterpret_cast<std::uintptr_t>(address), &start);
  return found != nullptr && found->is_host() && start != found->device_start;
}
#endif

}  // namespace

void watch_addresses([[maybe_unused]] bool is_watching) {
#ifndef FAKE_WITHOUT_KERNELS
  kvtier::sim::forbid(is_watching ? is_only_the_hosts : nullptr);
#endif
}

std::optional<Kernel> find_kernel(std::string_view name) {
  if (name == "fake_copy") return Kernel{"fake_copy", sizeof(FakeCopyArgs), 512, 0, copy};
  if (name == "fake_fail") return Kernel{"fake_fail", sizeof(FakeCopyArgs), 1024, 80, fail};
#ifdef FAKE_WITHOUT_KERNELS
  return std::nullopt;
#else
  const auto* const found = kvtier::sim::find_kernel(std::string(name));
  if (found == nullptr) return std::nullopt;
  const auto run = [found](const Launch& launch) {
    const auto [grid_x, grid_y, grid_z] = launch.grid;
    const auto [block_x, block_y, block_z] = launch.block;
    found->run({grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, launch.shared_bytes,
               launch.arguments.data(), launch.seed);
  };
  return Kernel{found->name, found->argument_bytes, found->traits.block_max,
                found->traits.architecture_min, run};
#endif
}

}  // namespace fake
