#include "kvtier/device_plan.hpp"

#include <string>
#include <vector>

#include "device_state.hpp"

namespace kvtier {

using device::MemoryKind;
using device::Piece;

DevicePlan::DevicePlan(const CudaDevice& device, std::span<const std::uint64_t> plane_addresses,
                       const PageShape& shape)
    : state_(device.state()), geometry_(plane_addresses, shape) {
  state_->check_alive();
  state_->with_context([&] {
    for (std::uint64_t plane = 0; plane < geometry_.plane_count(); ++plane) {
      const MemoryKind kind =
          state_->kind_of(geometry_.plane_address(plane), geometry_.extent_bytes());
      if (kind != MemoryKind::kDevice && kind != MemoryKind::kManaged) {
        throw std::invalid_argument("plane " + std::to_string(plane) +
                                    " is no memory of the device");
      }
    }
  });
}

DeviceJob DevicePlan::gather(const DeviceCopyRequest& request, StreamHandle stream) const {
  return copy<true>(request, stream);
}

DeviceJob DevicePlan::scatter(const DeviceCopyRequest& request, StreamHandle stream) const {
  return copy<false>(request, stream);
}

template <bool kGather>
DeviceJob DevicePlan::copy(const DeviceCopyRequest& request, StreamHandle stream) const {
  if (request.waves.empty() || request.waves.size() % 2 != 0 || request.page_offsets.empty()) {
    throw std::invalid_argument("waves are pairs of a first plane and a count, at least one");
  }
  const std::size_t wave_count = request.waves.size() / 2;
  const std::size_t chunk_count = request.page_offsets.size() - 1;
  if (request.segments.size() != wave_count * chunk_count) {
    throw std::invalid_argument(std::to_string(request.segments.size()) + " segments for " +
                                std::to_string(wave_count) + " waves of " +
                                std::to_string(chunk_count) + " chunks");
  }
  state_->check_alive();
  std::vector<std::vector<Piece>> waves(wave_count);
  bool on_device = false;
  cuda::Stream engine = nullptr;
  state_->with_context([&] {
    engine = state_->own_stream(stream);
    for (std::size_t w = 0; w < wave_count; ++w) {
      const CopyRequest wave{request.page_ids, request.page_offsets,
                             request.segments.subspan(w * chunk_count, chunk_count),
                             request.waves[2 * w], request.waves[2 * w + 1]};
      geometry_.check(wave);
      const std::uint64_t block_bytes = wave.plane_count * geometry_.plane_bytes();
      for (std::size_t c = 0; c < chunk_count; ++c) {
        const std::uint64_t pages = wave.page_offsets[c + 1] - wave.page_offsets[c];
        if (pages == 0) continue;
        const MemoryKind kind = state_->kind_of(wave.segments[c], pages * block_bytes);
        if (kind == MemoryKind::kUnpinned) {
          throw std::invalid_argument("segment " + std::to_string(c) +
                                      " is neither page-locked nor memory of the device");
        }
        on_device = on_device || kind != MemoryKind::kHost;
      }
      // Neighbours on both sides become one descriptor: the driver does not join them.
      std::vector<Piece>& pieces = waves[w];
      geometry_.for_each_run(wave, [&](std::uint64_t paged, std::uint64_t stored,
                                       std::uint64_t nbytes) {
        const Piece piece = kGather ? Piece{stored, paged, nbytes} : Piece{paged, stored, nbytes};
        if (!pieces.empty() && pieces.back().target + pieces.back().nbytes == piece.target &&
            pieces.back().source + pieces.back().nbytes == piece.source) {
          pieces.back().nbytes += nbytes;
        } else {
          pieces.push_back(piece);
        }
      });
    }
  });
  const cuda::Stream own = on_device ? state_->within : kGather ? state_->out : state_->into;
  // Pages are read after the engine has written them; segments in host memory are ready now.
  const auto order = kGather || on_device ? cuda::SourceOrder::kStream : cuda::SourceOrder::kAny;
  return DeviceJob(state_->enqueue(own, &engine, waves, order));
}

}  // namespace kvtier
