#include "sim_kernels.hpp"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace kvtier::sim {
namespace {

constexpr int kInvalidValue = 1;  // as cuda.h counts them
constexpr int kNotFound = 500;
constexpr std::size_t kSharedBytesMax = 227 << 10;  // of a CTA on sm_90, after opting in
constexpr unsigned kGridMax = 0x7fffffff;
constexpr std::size_t kArgumentAlignment = 64;

std::atomic<IsForbidden> forbidden{nullptr};

/// Filled while the library is loaded, then only read.
std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

std::string& error_words() {
  static thread_local std::string words;
  return words;
}

void check(const Kernel& kernel, const dim3& grid, const dim3& block, std::size_t shared_bytes) {
  const auto refuse = [&](const std::string& words) {
    throw LaunchError(kInvalidValue, kernel.name + (": " + words));
  };
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || block.z > 64 || threads > kernel.traits.block_max) {
    refuse("a block of " + std::to_string(threads) + " threads, at most " +
           std::to_string(kernel.traits.block_max));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kGridMax || grid.y > 65535 ||
      grid.z > 65535) {
    refuse("a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z));
  }
  if (shared_bytes > kSharedBytesMax) {
    refuse(std::to_string(shared_bytes) + " bytes of shared memory, at most " +
           std::to_string(kSharedBytesMax));
  }
}

void run(const Kernel& kernel, const dim3& grid, const dim3& block, std::size_t shared_bytes,
         const void* arguments, std::uint64_t seed, std::uint64_t first_cta,
         std::uint64_t cta_count) {
  check(kernel, grid, block, shared_bytes);
  const std::uint64_t all = std::uint64_t{grid.x} * grid.y * grid.z;
  if (cta_count == 0) cta_count = all;
  if (first_cta >= all || cta_count > all - first_cta) {
    throw LaunchError(kInvalidValue, "no such CTAs in the grid");
  }
  // A copy, as a real launch makes one, and of no byte more.
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{kArgumentAlignment});
    }
  };
  const std::unique_ptr<std::byte, Free> copy(static_cast<std::byte*>(
      ::operator new(kernel.argument_bytes, std::align_val_t{kArgumentAlignment})));
  std::memcpy(copy.get(), arguments, kernel.argument_bytes);
  run_launch({&kernel, grid, block, shared_bytes, copy.get(), seed, first_cta, cta_count});
}

}  // namespace

void check_access(const void* address, std::size_t nbytes, Where where) {
  if (reinterpret_cast<std::uintptr_t>(address) % nbytes != 0) {
    fail("an access that is not aligned to its size", where);
  }
  const IsForbidden is_forbidden = forbidden.load(std::memory_order_relaxed);
  if (is_forbidden != nullptr && is_forbidden(address, nbytes)) {
    fail("an access to the host's own address of memory that devices have elsewhere", where);
  }
}

void forbid(IsForbidden is_forbidden) { forbidden = is_forbidden; }

Entry::Entry(const Kernel& kernel) { kernels().push_back(kernel); }

const Kernel* find_kernel(const std::string& name) {
  for (const Kernel& kernel : kernels()) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

void Kernel::run(dim3 grid, dim3 block, std::size_t shared_bytes, const void* arguments,
                 std::uint64_t seed) const {
  sim::run(*this, grid, block, shared_bytes, arguments, seed, 0, 0);
}

}  // namespace kvtier::sim

using namespace kvtier::sim;

extern "C" {

int kvtier_sim_launch(const char* name, unsigned grid, unsigned block, std::size_t shared_bytes,
                      const void* arguments, std::uint64_t seed) {
  return kvtier_sim_launch_part(name, grid, block, shared_bytes, arguments, seed, 0, 0);
}

int kvtier_sim_launch_part(const char* name, unsigned grid, unsigned block,
                           std::size_t shared_bytes, const void* arguments, std::uint64_t seed,
                           std::uint64_t first_cta, std::uint64_t cta_count) {
  int code = 0;
  error_words().clear();
  const Kernel* const kernel = find_kernel(name);
  if (kernel == nullptr) {
    error_words() = std::string("no kernel ") + name;
    code = kNotFound;
  } else {
    try {
      run(*kernel, {grid, 1, 1}, {block, 1, 1}, shared_bytes, arguments, seed, first_cta,
          cta_count);
    } catch (const LaunchError& error) {
      error_words() = error.what();
      code = error.code();
    }
  }
  if (code != 0) std::fprintf(stderr, "simulator: %s\n", error_words().c_str());
  return code;
}

const char* kvtier_sim_error() { return error_words().c_str(); }

std::size_t kvtier_sim_argument_bytes(const char* name) {
  const Kernel* const kernel = find_kernel(name);
  return kernel == nullptr ? 0 : kernel->argument_bytes;
}

const char* kvtier_sim_kernel_name(std::size_t index) {
  return index < kernels().size() ? kernels()[index].name : nullptr;
}
}
