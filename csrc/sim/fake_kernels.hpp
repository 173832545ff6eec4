// The kernels that the stand-in for libcuda can launch, by name.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fake {

struct Launch {
  std::array<unsigned, 3> grid;
  std::array<unsigned, 3> block;
  std::size_t shared_bytes;
  std::vector<std::byte> arguments;  // the bytes of the one argument
  std::uint64_t seed;                // of the order in which threads run
};

struct Kernel {
  std::string name;
  std::size_t argument_bytes;
  unsigned threads_max;  // of a block
  int capability_min;    // 10 * major + minor of the least GPU that has it
  std::function<void(const Launch&)> run;
};

/// Whether a kernel fails that takes the host's address of memory that has another one for devices.
void watch_addresses(bool is_watching);

std::optional<Kernel> find_kernel(std::string_view name);

}  // namespace fake
