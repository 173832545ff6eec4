// Paged KV on a device <-> block-first segments: the device's twin of `CopyPlan`.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "kvtier/copy_plan.hpp"
#include "kvtier/device.hpp"

namespace kvtier {

/// Pages as those of `CopyRequest`, and a wave of planes for each row of segments.
struct DeviceCopyRequest {
  std::span<const std::int64_t> page_ids;
  std::span<const std::uint32_t> page_offsets;
  std::span<const std::uint64_t> segments;  // [wave, chunk]: page-locked or device memory
  std::span<const std::uint64_t> waves;     // [wave, 2]: first plane, plane count
};

/// The copy plan of one engine's pages on a device; see `CopyPlan` for where each byte lies. Any
/// thread. Copies go by the device's copy engines, each contiguous run as one descriptor.
class DevicePlan {
 public:
  /// @throws std::invalid_argument as `CopyPlan`, or a plane is not memory of the device all over
  /// @throws DeviceError the device has failed
  DevicePlan(const CudaDevice& device, std::span<const std::uint64_t> plane_addresses,
             const PageShape& shape);

  const CopyPlan& geometry() const { return geometry_; }

  /// Begin to copy pages into segments, after what is on the engine's `stream` now.
  ///
  /// @throws std::invalid_argument the request does not fit, or a segment is no memory that the
  ///   device can reach; nothing has begun
  /// @throws DeviceError the device has failed; nothing is touched any more
  DeviceJob gather(const DeviceCopyRequest& request, StreamHandle stream) const;

  /// Begin to copy segments into pages. A page named twice gets either one's bytes, or a mixture.
  DeviceJob scatter(const DeviceCopyRequest& request, StreamHandle stream) const;

 private:
  template <bool kGather>
  DeviceJob copy(const DeviceCopyRequest& request, StreamHandle stream) const;

  std::shared_ptr<device::State> state_;
  CopyPlan geometry_;
};

}  // namespace kvtier
