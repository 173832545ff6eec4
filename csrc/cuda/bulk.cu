// Gather and scatter by bulk copies: long runs through shared memory, no register touched. sm_90
// on.
//
// Grid: any number of CTAs; block: up to 16 warps, each of which has a ring of its own in dynamic
// shared memory (bulk_shape.h) and takes every so-many-th run; a run that is longer than a slot
// goes in pieces. Runs, addresses and strides are multiples of 16; what is gained begins at runs of
// 512 bytes. Bound as copy.cu's kernels are, but with few threads: bytes in flight are slots, not
// registers.
#include "async.h"
#include "bulk_shape.h"
#include "locate.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace kvtier::device {

/// Goes through the pieces of a ring's runs.
struct BulkPieces {
  const CopyArgs& arguments;
  std::uint32_t slot_bytes;
  std::uint32_t step;  // from one of the ring's runs to its next
  std::uint64_t run;
  std::uint32_t left = 0;  // of the run
  CopyPlace place = {};

  KVTIER_DEVICE bool more() const { return run < arguments.total; }
  KVTIER_DEVICE std::uint32_t piece_bytes() const { return left < slot_bytes ? left : slot_bytes; }

  KVTIER_DEVICE void begin_run() {
    if (!more()) return;
    left = arguments.run_bytes;
    place = locate(arguments, static_cast<std::uint32_t>(run), 0);
  }
  KVTIER_DEVICE void next() {
    const std::uint32_t piece = piece_bytes();
    place.paged += piece;
    place.stored += piece;
    left -= piece;
    if (left == 0) {
      run += step;
      begin_run();
    }
  }
};

/// One warp's ring, which a single thread drives: the instructions of bulk copies are a warp's, and
/// would take its threads one by one. Piece i goes through slot i % kBulkSlots. When piece i is
/// being stored, up to kBulkSlots - 1 later ones are being loaded; the next of those takes the slot
/// of piece i - 1.
template <bool kGather>
KVTIER_DEVICE void bulk_copy(const CopyArgs& arguments, unsigned char* shared) {
  if (blockDim.x % 32 != 0) stop();
  if (threadIdx.x % 32 != 0) return;
  const std::uint32_t rings = blockDim.x / 32;
  const std::uint32_t ring = threadIdx.x / 32;
  const std::uint32_t slot_bytes = bulk_slot_bytes(rings, dynamic_shared_bytes());
  if (slot_bytes == 0) stop();  // a launch with too little shared memory would never end
  Barrier* const barriers = reinterpret_cast<Barrier*>(shared) + ring * kBulkSlots;
  unsigned char* const slots = shared + bulk_barriers_bytes(rings) + ring * kBulkSlots * slot_bytes;

  for (std::uint32_t slot = 0; slot < kBulkSlots; ++slot) barrier_init(barriers + slot, 1);
  fence_async();

  const std::uint32_t step = gridDim.x * rings;
  const std::uint64_t first = static_cast<std::uint64_t>(blockIdx.x) * rings + ring;
  BulkPieces loading{arguments, slot_bytes, step, first};
  BulkPieces storing{arguments, slot_bytes, step, first};
  loading.begin_run();
  storing.begin_run();

  const auto load_next = [&](std::uint32_t piece) {
    const std::uint32_t slot = piece % kBulkSlots;
    const std::uint32_t nbytes = loading.piece_bytes();
    barrier_arrive_expect(barriers + slot, nbytes);
    bulk_load(slots + slot * slot_bytes, kGather ? loading.place.paged : loading.place.stored,
              nbytes, barriers + slot);
    loading.next();
  };

  for (std::uint32_t piece = 0; piece < kBulkSlots - 1 && loading.more(); ++piece) {
    load_next(piece);
  }
  for (std::uint32_t piece = 0; storing.more(); ++piece) {
    const std::uint32_t slot = piece % kBulkSlots;
    barrier_wait(barriers + slot, piece / kBulkSlots % 2);
    bulk_store(kGather ? storing.place.stored : storing.place.paged, slots + slot * slot_bytes,
               storing.piece_bytes());
    bulk_commit();
    storing.next();
    if (loading.more()) {
      bulk_wait_read<1>();  // all but this store: the one before has let go of its slot
      load_next(piece + kBulkSlots - 1);
    }
  }
  bulk_wait_read<0>();  // shared memory ends with the CTA
}

}  // namespace kvtier::device

extern "C" __global__ void __launch_bounds__(512)
    kvtier_bulk_gather(const __grid_constant__ kvtier::device::CopyArgs arguments) {
  KVTIER_DYNAMIC_SHARED(unsigned char, shared);
  kvtier::device::bulk_copy<true>(arguments, shared);
}

extern "C" __global__ void __launch_bounds__(512)
    kvtier_bulk_scatter(const __grid_constant__ kvtier::device::CopyArgs arguments) {
  KVTIER_DYNAMIC_SHARED(unsigned char, shared);
  kvtier::device::bulk_copy<false>(arguments, shared);
}

#endif
