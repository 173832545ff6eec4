#include "kvtier/device_plan.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "device_copy.hpp"
#include "device_state.hpp"

namespace kvtier {
namespace {

using device::MemoryKind;
using device::Piece;
using device::WavePages;

constexpr unsigned kBusCtas = 4;     // bytes in flight of so many fill the bus
constexpr unsigned kMemoryCtas = 8;  // within the device more would help, and hurt the engine
constexpr std::uint64_t kBulkUnit = 16;

/// One wave of a request: its part of it, and of which memory each segment is.
struct Wave {
  CopyRequest request;
  std::vector<MemoryKind> kinds;
  std::vector<std::uint64_t> device_addresses;  // 0 where the driver has not been asked yet
};

/// Whether device memory that is copied between overlaps itself.
class Extents {
 public:
  explicit Extents(const CopyPlan& geometry) {
    for (std::uint64_t p = 0; p < geometry.plane_count(); ++p) {
      const std::uint64_t begin = geometry.plane_address(p);
      extents_.emplace_back(begin, begin + geometry.extent_bytes());
    }
    std::sort(extents_.begin(), extents_.end());
    for (std::size_t i = 1; i < extents_.size(); ++i) {  // ends in ascending order, too
      extents_[i].second = std::max(extents_[i].second, extents_[i - 1].second);
    }
  }

  bool overlaps(std::uint64_t begin, std::uint64_t nbytes) const {
    const auto after =
        std::lower_bound(extents_.begin(), extents_.end(), std::pair(begin + nbytes, UINT64_C(0)));
    return after != extents_.begin() && std::prev(after)->second > begin;
  }

 private:
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents_;
};

}  // namespace

DevicePlan::DevicePlan(const CudaDevice& device, std::span<const std::uint64_t> plane_addresses,
                       const PageShape& shape)
    : state_(device.state()),
      geometry_(plane_addresses, shape),
      joined_(device::joined_strides(geometry_)),
      vector_bytes_(device::vector_bytes_of(joined_)) {
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

DeviceJob DevicePlan::gather(const DeviceCopyRequest& request, StreamHandle stream,
                             const CopyWay& way) const {
  return copy(true, request, stream, way);
}

DeviceJob DevicePlan::scatter(const DeviceCopyRequest& request, StreamHandle stream,
                              const CopyWay& way) const {
  return copy(false, request, stream, way);
}

DeviceJob DevicePlan::copy(bool is_gather, const DeviceCopyRequest& request, StreamHandle stream,
                           const CopyWay& way) const {
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
  std::vector<Wave> waves;
  bool on_device = false;
  bool on_host = false;
  cuda::Stream engine = nullptr;
  state_->with_context([&] {
    engine = state_->own_stream(stream);
    for (std::size_t w = 0; w < wave_count; ++w) {
      Wave wave{{request.page_ids, request.page_offsets,
                 request.segments.subspan(w * chunk_count, chunk_count), request.waves[2 * w],
                 request.waves[2 * w + 1]},
                std::vector<MemoryKind>(chunk_count, MemoryKind::kHost),
                std::vector<std::uint64_t>(chunk_count)};
      geometry_.check(wave.request);
      const std::uint64_t block_bytes = wave.request.plane_count * geometry_.plane_bytes();
      for (std::size_t c = 0; c < chunk_count; ++c) {
        const std::uint64_t pages = request.page_offsets[c + 1] - request.page_offsets[c];
        if (pages == 0) continue;
        const std::uint64_t segment = wave.request.segments[c];
        if (const auto at = state_->find_registered(segment, pages * block_bytes)) {
          wave.device_addresses[c] = *at;
          on_host = true;
          continue;
        }
        wave.kinds[c] = state_->kind_of(segment, pages * block_bytes);
        if (wave.kinds[c] == MemoryKind::kUnpinned) {
          throw std::invalid_argument("segment " + std::to_string(c) +
                                      " is neither page-locked nor memory of the device");
        }
        (wave.kinds[c] == MemoryKind::kHost ? on_host : on_device) = true;
      }
      waves.push_back(std::move(wave));
    }
  });
  if (on_device) {
    const Extents extents(geometry_);
    for (const Wave& wave : waves) {
      for (std::size_t c = 0; c < chunk_count; ++c) {
        const std::uint64_t pages = request.page_offsets[c + 1] - request.page_offsets[c];
        const std::uint64_t nbytes = pages * wave.request.plane_count * geometry_.plane_bytes();
        if (nbytes != 0 && extents.overlaps(wave.request.segments[c], nbytes)) {
          throw std::invalid_argument("segment " + std::to_string(c) + " overlaps the pages");
        }
      }
    }
  }

  if (way.path == CopyPath::kDma) {
    if (way.is_bulk) throw std::invalid_argument("copy engines have no bulk copies");
    std::vector<std::vector<Piece>> pieces(wave_count);
    for (std::size_t w = 0; w < wave_count; ++w) {
      geometry_.for_each_run(
          waves[w].request, [&](std::uint64_t paged, std::uint64_t stored, std::uint64_t nbytes) {
            device::append_piece(
                pieces[w], is_gather ? Piece{stored, paged, nbytes} : Piece{paged, stored, nbytes});
          });
    }
    const cuda::Stream own = on_device ? state_->within : is_gather ? state_->out : state_->into;
    // Pages are read after the engine has written them; segments in host memory are ready now.
    const auto order =
        is_gather || on_device ? cuda::SourceOrder::kStream : cuda::SourceOrder::kAny;
    return DeviceJob(state_->enqueue(own, &engine, pieces, order));
  }

  if (way.path == CopyPath::kStaged && on_device) {
    throw std::invalid_argument("segments in device memory need no staging");
  }
  device::KernelCopy copy{geometry_,
                          {},
                          engine,
                          vector_bytes_,
                          way.ctas != 0                              ? way.ctas
                          : state_->options.sm_budget != 0           ? state_->options.sm_budget
                          : on_host && way.path == CopyPath::kDirect ? kBusCtas
                                                                     : kMemoryCtas,
                          is_gather,
                          way.path == CopyPath::kStaged,
                          way.is_bulk};
  std::uint64_t joined = joined_;
  state_->with_context([&] {
    for (const Wave& wave : waves) {
      const std::uint64_t block_bytes = wave.request.plane_count * geometry_.plane_bytes();
      WavePages pages{wave.request.first_plane, wave.request.plane_count, {}};
      for (std::size_t c = 0; c < chunk_count; ++c) {
        const std::size_t first = request.page_offsets[c];
        const std::size_t end = request.page_offsets[c + 1];
        if (first == end) continue;
        std::uint64_t stored = wave.request.segments[c];
        if (!copy.is_staged) {
          stored = wave.device_addresses[c] != 0 ? wave.device_addresses[c]
                                                 : state_->device_address(stored, wave.kinds[c]);
          joined |= stored;
        }
        for (std::size_t i = first; i < end; ++i, stored += block_bytes) {
          if (request.page_ids[i] < 0) continue;
          const auto page = static_cast<std::uint64_t>(request.page_ids[i]);
          pages.pages.push_back(
              {static_cast<std::int64_t>(page * geometry_.page_stride()), stored});
        }
      }
      copy.waves.push_back(std::move(pages));
    }
  });
  copy.vector_bytes = device::vector_bytes_of(joined);
  if (way.is_bulk && copy.vector_bytes < kBulkUnit) {
    throw std::invalid_argument("bulk copies need addresses, strides and runs in multiples of 16");
  }
  return DeviceJob(device::enqueue_kernels(state_, copy));
}

}  // namespace kvtier
