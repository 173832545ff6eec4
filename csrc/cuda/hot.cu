// The hot buffer: which tokens are in it, which have to come, and their coming. See hot_args.h.
#include "device.h"
#include "hot_args.h"

namespace kvtier::device {

constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr std::int32_t kNoToken = -1;
// A value in the table: where in top_tokens the token is first, or this and its slot.
constexpr std::uint32_t kIsSlot = 0x80000000u;

KVTIER_DEVICE std::uint32_t hash_of(std::int32_t token) {
  return static_cast<std::uint32_t>(token) * 2654435761u >> 7;  // 2^32 over the golden ratio
}

/// Open addressing in shared memory; never full, since it has twice the places.
struct TokenTable {
  std::int32_t* tokens;
  std::uint32_t* values;
  std::uint32_t size;

  /// The place of a token, which is taken for it if it has none yet.
  KVTIER_DEVICE std::uint32_t insert(std::int32_t token) const {
    for (std::uint32_t place = hash_of(token);; ++place) {
      place &= size - 1;
      const std::int32_t held = atomicCAS(&tokens[place], kNoToken, token);
      if (held == kNoToken || held == token) return place;
    }
  }

  /// The place of a token; `size` if it has none. Not while others insert.
  KVTIER_DEVICE std::uint32_t find(std::int32_t token) const {
    for (std::uint32_t place = hash_of(token);; ++place) {
      place &= size - 1;
      const std::int32_t held = tokens[place];
      if (held == token) return place;
      if (held == kNoToken) return size;
    }
  }
};

/// Numbers consecutively the threads of a CTA for which something holds, in their order.
struct Numbering {
  std::uint32_t before = 0;  // of this thread, in this round and the earlier ones
  std::uint32_t all = 0;     // so far

  /// @param counts  one of this numbering for each warp, `stride` apart, written before a barrier
  KVTIER_DEVICE void next(const std::uint32_t* counts, std::uint32_t stride, std::uint32_t lanes) {
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t below = (1u << threadIdx.x % 32) - 1;
    before = all + static_cast<std::uint32_t>(__popc(lanes & below));
    for (std::uint32_t i = 0; i < blockDim.x / 32; ++i) {
      const std::uint32_t count = counts[i * stride];
      if (i < warp) before += count;
      all += count;
    }
  }
};

KVTIER_DEVICE void hot_resolve(const HotArgs& arguments, std::uint32_t* shared) {
  const std::uint32_t threads = blockDim.x;
  const std::uint32_t thread = threadIdx.x;
  const std::uint32_t warp = thread / 32;
  const std::uint32_t top_count = arguments.top_count;
  const std::uint32_t capacity = arguments.capacity;
  const TokenTable table{reinterpret_cast<std::int32_t*>(shared), shared + arguments.table_size,
                         arguments.table_size};
  // Slots that hold none of the step's tokens from the beginning on, the others from the end on.
  auto* const sorted = reinterpret_cast<std::uint16_t*>(shared + 2 * arguments.table_size);
  std::uint32_t* const counts = shared + 2 * arguments.table_size + (capacity + 1) / 2;

  const std::int64_t request = blockIdx.x;
  const std::int32_t* const top_tokens = arguments.top_tokens + request * top_count;
  std::int32_t* const top_slots = arguments.top_slots + request * top_count;
  std::int32_t* const slot_tokens = arguments.slot_tokens + request * capacity;
  std::uint16_t* const order = arguments.order + request * capacity;

  for (std::uint32_t i = thread; i < table.size; i += threads) {
    table.tokens[i] = kNoToken;
    table.values[i] = kIsSlot - 1;
  }
  __syncthreads();

  for (std::uint32_t i = thread; i < top_count; i += threads) {
    const std::int32_t token = top_tokens[i];
    if (token >= 0 && token < arguments.token_end) {
      atomicMin(&table.values[table.insert(token)], i);
    }
  }
  __syncthreads();

  // Oldest first: which slots hold tokens of this step?
  Numbering found;
  Numbering unused;
  for (std::uint32_t base = 0; base < capacity; base += threads) {
    const std::uint32_t i = base + thread;
    std::uint32_t slot = 0;
    std::uint32_t place = table.size;
    if (i < capacity) {
      slot = order[i];
      const std::int32_t token = slot_tokens[slot];
      if (token >= 0) place = table.find(token);
    }
    const bool is_found = place < table.size;
    const std::uint32_t found_lanes = __ballot_sync(kAllLanes, is_found);
    const std::uint32_t unused_lanes = __ballot_sync(kAllLanes, i < capacity && !is_found);
    if (thread % 32 == 0) {
      counts[2 * warp] = static_cast<std::uint32_t>(__popc(found_lanes));
      counts[2 * warp + 1] = static_cast<std::uint32_t>(__popc(unused_lanes));
    }
    __syncthreads();
    found.next(counts, 2, found_lanes);
    unused.next(counts + 1, 2, unused_lanes);
    if (is_found) {
      table.values[place] = kIsSlot | slot;
      sorted[capacity - 1 - found.before] = static_cast<std::uint16_t>(slot);
    } else if (i < capacity) {
      sorted[unused.before] = static_cast<std::uint16_t>(slot);
    }
    __syncthreads();  // counts are read before they are written anew
  }

  // Missing tokens, each where it is first, get the oldest of the unused slots.
  Numbering missing;
  for (std::uint32_t base = 0; base < top_count; base += threads) {
    const std::uint32_t i = base + thread;
    std::int32_t token = kNoToken;
    if (i < top_count) token = top_tokens[i];
    const bool is_token = token >= 0 && token < arguments.token_end;
    const std::uint32_t place = is_token ? table.find(token) : 0;
    const bool is_missing = is_token && table.values[place] == i;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, is_missing);
    if (thread % 32 == 0) counts[warp] = static_cast<std::uint32_t>(__popc(lanes));
    __syncthreads();
    missing.next(counts, 1, lanes);
    if (is_missing) {
      const std::uint32_t slot = sorted[missing.before];
      table.values[place] = kIsSlot | slot;
      slot_tokens[slot] = token;
      const std::int64_t at = request * top_count + missing.before;
      arguments.missing_tokens[at] = token;
      arguments.missing_slots[at] = static_cast<std::int32_t>(slot);
    }
    __syncthreads();  // as above; and all values are slots after the last round
  }

  for (std::uint32_t i = thread; i < top_count; i += threads) {
    const std::int32_t token = top_tokens[i];
    const bool is_token = token >= 0 && token < arguments.token_end;
    top_slots[i] =
        is_token ? static_cast<std::int32_t>(table.values[table.find(token)] & ~kIsSlot) : -1;
  }
  const std::uint32_t untouched = unused.all - missing.all;
  for (std::uint32_t i = thread; i < capacity; i += threads) {
    order[i] = i < untouched    ? sorted[missing.all + i]
               : i < unused.all ? sorted[i - untouched]
                                : sorted[capacity - 1 - (i - unused.all)];
  }
  if (thread == 0) arguments.missing_counts[request] = static_cast<std::int32_t>(missing.all);
}

// ------------------------------------------------------------------------------------------ copy

constexpr int kRowVectorsInFlight = 4;  // of a lane

/// Warp w takes the missing rows w, w + all warps, ... of all requests in a row; its lanes take
/// neighbouring vectors.
template <int kVectorBytes>
KVTIER_DEVICE void hot_copy(const HotCopyArgs& arguments) {
  using Value = Vector<kVectorBytes>;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warps = gridDim.x * (blockDim.x / 32);
  std::uint32_t next = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;  // from this request on
  const std::uint32_t vectors = arguments.row_bytes / kVectorBytes;
  for (std::uint32_t request = 0; request < arguments.request_count; ++request) {
    const auto count = static_cast<std::uint32_t>(arguments.missing_counts[request]);
    for (; next < count; next += warps) {
      const std::int64_t at = static_cast<std::int64_t>(request) * arguments.top_count + next;
      const auto token = static_cast<std::uint32_t>(arguments.missing_tokens[at]);
      const std::uint32_t part = arguments.part_tokens.quotient(token);
      if (part >= arguments.part_count) continue;
      const std::uint64_t token_of_part = token - part * arguments.part_tokens.divisor;
      const std::uint64_t source =
          arguments.sources[static_cast<std::uint64_t>(request) * arguments.part_count + part] +
          arguments.source_offset + token_of_part * arguments.source_stride;
      const std::uint64_t target =
          arguments.target + request * arguments.target_request_stride +
          static_cast<std::uint64_t>(arguments.missing_slots[at]) * arguments.target_stride;
      const auto* const from = reinterpret_cast<const Value*>(source);
      auto* const to = reinterpret_cast<Value*>(target);
      for (std::uint32_t base = lane; base < vectors; base += 32 * kRowVectorsInFlight) {
        Value values[kRowVectorsInFlight];
        KVTIER_UNROLL
        for (std::uint32_t i = 0; i < kRowVectorsInFlight; ++i) {
          const std::uint32_t vector = base + 32 * i;
          values[i] = load_streaming(from + (vector < vectors ? vector : base));
        }
        KVTIER_UNROLL
        for (std::uint32_t i = 0; i < kRowVectorsInFlight; ++i) {
          if (base + 32 * i < vectors) to[base + 32 * i] = values[i];
        }
      }
    }
    next -= count;
  }
}

}  // namespace kvtier::device

extern "C" __global__ void __launch_bounds__(1024)
    kvtier_hot_resolve(const __grid_constant__ kvtier::device::HotArgs arguments) {
  KVTIER_DYNAMIC_SHARED(std::uint32_t, shared);
  kvtier::device::hot_resolve(arguments, shared);
}

#define KVTIER_HOT_COPY_KERNEL(kBytes)                                                           \
  extern "C" __global__ void __launch_bounds__(kvtier::device::kHotCopyThreads)                  \
      kvtier_hot_copy_v##kBytes(const __grid_constant__ kvtier::device::HotCopyArgs arguments) { \
    kvtier::device::hot_copy<kBytes>(arguments);                                                 \
  }

KVTIER_HOT_COPY_KERNEL(16)
KVTIER_HOT_COPY_KERNEL(8)
KVTIER_HOT_COPY_KERNEL(4)
