// Copies between pages and segments by kernels: what is launched, in which order. For device_*.cpp
// only.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "device_state.hpp"
#include "kvtier/copy_plan.hpp"

namespace kvtier::device {

/// One page of a wave.
struct PagePlace {
  std::int64_t paged_offset;
  /// Its block: for kernels that go there themselves as the device knows the address, else as the
  /// copy engines take it.
  std::uint64_t stored_address;
};

struct WavePages {
  std::uint64_t first_plane;
  std::uint64_t plane_count;
  std::vector<PagePlace> pages;
};

struct KernelCopy {
  const CopyPlan& geometry;
  std::vector<WavePages> waves;
  cuda::Stream engine;
  std::uint64_t vector_bytes;  // that divides every address and stride
  unsigned ctas;
  bool is_gather;
  bool is_staged;
  bool is_bulk;
};

/// The largest vector, up to 16 bytes, that divides a number of bytes or an address, or all of
/// those whose bits were joined by "or".
std::uint64_t vector_bytes_of(std::uint64_t joined);

/// What vectors must divide on the side of the engine, joined.
std::uint64_t joined_strides(const CopyPlan& geometry);

/// Join a piece to the last one where it continues it on both sides: the driver does not.
void append_piece(std::vector<Piece>& pieces, const Piece& piece);

/// @throws std::invalid_argument no kernel does it; nothing has begun
/// @throws DeviceError
std::shared_ptr<Work> enqueue_kernels(const std::shared_ptr<State>& state, const KernelCopy& copy);

}  // namespace kvtier::device
