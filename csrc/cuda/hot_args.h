// Arguments of the hot buffer's kernels: the KV of a request's most needed tokens, kept in device
// memory while all of it lies on the host.
//
// A request has `capacity` slots. `kvtier_hot_resolve` finds, for the tokens that a step attends
// to, the slots that hold them, gives the others the slots unused for longest, and writes down
// which tokens are missing where. `kvtier_hot_copy_*` fetches these rows, once for each layer: what
// was resolved holds for all layers alike.
#pragma once

#include "types.h"

namespace kvtier::device {

/// One launch of `kvtier_hot_resolve`: CTA r does request r.
///
/// Of each request: `top_tokens`, in any order, duplicates allowed. A token below 0 or from
/// `token_end` on is none: its slot is -1. All others get a slot, each distinct one its own.
/// Missing tokens are numbered in the order of their first appearance, and number i gets the i-th
/// of the slots that hold none of the step's tokens, oldest first. Afterwards `order` is: slots
/// that were not touched, then those of missing tokens, then those found, each in the order before.
///
/// Block: a multiple of 32, up to 1024. Shared memory: hot_shared_bytes(). Bound by latency.
struct HotArgs {
  const std::int32_t* top_tokens;  // [request][top_count]
  std::int32_t* slot_tokens;     // [request][capacity]: the token in each slot, -1 if none; updated
  std::uint16_t* order;          // [request][capacity]: slots, oldest use first; updated
  std::int32_t* top_slots;       // out, [request][top_count]
  std::int32_t* missing_tokens;  // out, [request][top_count], of which missing_counts are written
  std::int32_t* missing_slots;   // out, likewise
  std::int32_t* missing_counts;  // out, [request]
  std::uint32_t top_count;       // 1 up to capacity
  std::uint32_t capacity;        // up to 65,535
  std::uint32_t table_size;      // a power of two, at least twice top_count
  std::int32_t token_end;
};

/// One launch of `kvtier_hot_copy_v*`: the missing rows of one layer's K, V or latent.
///
/// Token t of request r lies at sources[r * part_count + t / part_tokens]
/// + (t % part_tokens) * source_stride + source_offset, in pinned host memory that the device sees,
/// and goes to target + r * target_request_stride + slot * target_stride. All of these and
/// row_bytes are multiples of the vector. Tokens beyond the parts are left out.
///
/// Grid: any number of CTAs of kHotCopyThreads; a warp takes a row. Bound by PCIe.
struct HotCopyArgs {
  const std::uint64_t* sources;        // device memory, [request][part]
  const std::int32_t* missing_tokens;  // as kvtier_hot_resolve wrote them
  const std::int32_t* missing_slots;
  const std::int32_t* missing_counts;
  std::uint64_t target;
  std::uint64_t source_offset;
  std::uint64_t source_stride;
  std::uint64_t target_stride;
  std::uint64_t target_request_stride;
  std::uint32_t row_bytes;
  std::uint32_t request_count;
  std::uint32_t top_count;
  std::uint32_t part_count;
  FastDiv part_tokens;
};

constexpr std::uint32_t kHotCopyThreads = 256;

/// Bytes of shared memory that one CTA of `kvtier_hot_resolve` needs: a hash table of tokens and
/// their values, a list of slots, and two counters a warp.
KVTIER_HOST_DEVICE constexpr std::uint32_t hot_shared_bytes(std::uint32_t table_size,
                                                            std::uint32_t capacity,
                                                            std::uint32_t threads) {
  return table_size * 8 + (capacity + 1) / 2 * 4 + threads / 32 * 8;
}

}  // namespace kvtier::device
