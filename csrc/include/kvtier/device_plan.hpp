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

/// The way that bytes take.
enum class CopyPath {
  kDma,     // copy engines, a descriptor for each contiguous run
  kStaged,  // a kernel between pages and staging, copy engines between staging and host memory
  kDirect,  // a kernel between pages and segments: device memory, or mapped host memory
};

struct CopyWay {
  CopyPath path = CopyPath::kDma;
  bool is_bulk = false;  // kernels of bulk copies: sm_90 on, multiples of 16 bytes
  unsigned ctas = 0;     // of each kernel; 0: the device's budget
};

/// The copy plan of one engine's pages on a device; see `CopyPlan` for where each byte lies. Any
/// thread.
class DevicePlan {
 public:
  /// @throws std::invalid_argument as `CopyPlan`, or a plane is not memory of the device all over
  /// @throws DeviceError the device has failed
  DevicePlan(const CudaDevice& device, std::span<const std::uint64_t> plane_addresses,
             const PageShape& shape);

  const CopyPlan& geometry() const { return geometry_; }
  /// The widest vector, up to 16 bytes, that kernels can take on the engine's side.
  std::uint64_t vector_bytes() const { return vector_bytes_; }

  /// Begin to copy pages into segments, after what is on the engine's `stream` now.
  ///
  /// @throws std::invalid_argument the request does not fit, a segment is no memory that the device
  ///   can reach, or the way is not open to it; nothing has begun
  /// @throws DeviceError the device has failed, or has no memory for it; nothing is touched any
  /// more
  DeviceJob gather(const DeviceCopyRequest& request, StreamHandle stream, const CopyWay& way) const;

  /// Begin to copy segments into pages. A page named twice gets either one's bytes, or a mixture.
  DeviceJob scatter(const DeviceCopyRequest& request, StreamHandle stream,
                    const CopyWay& way) const;

 private:
  DeviceJob copy(bool is_gather, const DeviceCopyRequest& request, StreamHandle stream,
                 const CopyWay& way) const;

  std::shared_ptr<device::State> state_;
  CopyPlan geometry_;
  std::uint64_t joined_;  // what vectors must divide
  std::uint64_t vector_bytes_;
};

}  // namespace kvtier
