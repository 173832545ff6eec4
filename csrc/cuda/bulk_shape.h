// How a CTA of the bulk kernels divides its dynamic shared memory into rings; host and device.
//
// First come the mbarriers, one for each slot, then the slots. A ring is one warp's:
// blocks have 32 threads for each.
#pragma once

#include "types.h"

namespace kvtier::device {

constexpr std::uint32_t kBulkSlots = 4;         // of a ring
constexpr std::uint32_t kBulkRingsMax = 16;     // of a CTA
constexpr std::uint32_t kBulkSlotUnit = 128;    // slots lie at, and have, multiples of it
constexpr std::uint32_t kBulkBarrierBytes = 8;  // of one mbarrier

KVTIER_HOST_DEVICE constexpr std::uint32_t bulk_barriers_bytes(std::uint32_t rings) {
  const std::uint32_t bytes = rings * kBulkSlots * kBulkBarrierBytes;
  return (bytes + kBulkSlotUnit - 1) / kBulkSlotUnit * kBulkSlotUnit;
}

/// Dynamic shared memory of a launch whose slots have `slot_bytes`, a multiple of kBulkSlotUnit.
KVTIER_HOST_DEVICE constexpr std::uint32_t bulk_shared_bytes(std::uint32_t rings,
                                                             std::uint32_t slot_bytes) {
  return bulk_barriers_bytes(rings) + rings * kBulkSlots * slot_bytes;
}

/// What a slot has in that much shared memory; 0 if it is too little.
KVTIER_HOST_DEVICE constexpr std::uint32_t bulk_slot_bytes(std::uint32_t rings,
                                                           std::uint32_t shared_bytes) {
  const std::uint32_t barriers = bulk_barriers_bytes(rings);
  if (shared_bytes < barriers) return 0;
  return (shared_bytes - barriers) / (rings * kBulkSlots) / kBulkSlotUnit * kBulkSlotUnit;
}

}  // namespace kvtier::device
