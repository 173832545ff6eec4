// Small kernels for the tests of the simulator itself: right ones, and one for each mistake.
//
// Not among csrc/cuda's: no GPU ever runs them.
#include "async.h"
#include "device.h"
#include "sim_kernels.hpp"

namespace {

using namespace kvtier::device;

enum Mistake : std::uint32_t {
  kNone,
  kNoBarrier,
  kBarrierAfterExit,
  kTwoBarriers,
  kMaskWithoutCaller,
  kTwoMasks,
  kLaneThatExited,
  kHalfAtCollective,
  kShuffleWidth,
  kNoMbarrier,
  kMbarrierForNobody,
  kMbarrierAlignment,
  kNoFence,
  kTwoArrivals,
  kEndlessPhase,
  kShortLoad,
  kLoadBeyondShared,
  kLoadUnderEnd,
  kStoreUnderEnd,
  kMisalignedVector,
  kStop,
  kBarrierAlone,
};

struct ProbeArgs {
  std::uint64_t target;  // 64 words
  std::uint64_t source;  // 1024 bytes
  Mistake mistake;
  std::uint32_t padding;
};

/// Each thread takes its neighbour's number, of the next warp.
void exchange(const ProbeArgs arguments) {
  KVTIER_DYNAMIC_SHARED(std::uint32_t, shared);
  auto* const target = reinterpret_cast<std::uint32_t*>(arguments.target);
  const std::uint32_t thread = threadIdx.x;
  shared[thread] = thread + 1;
  switch (arguments.mistake) {
    case kNoBarrier:
      break;
    case kBarrierAfterExit:
      if (thread == 7) return;
      __syncthreads();
      break;
    case kTwoBarriers:
      if (thread < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    default:
      __syncthreads();
  }
  target[thread] = shared[(thread + 32) % 64];
}

/// What is in shared memory at first.
void begin(const ProbeArgs arguments) {
  KVTIER_DYNAMIC_SHARED(std::uint32_t, shared);
  KVTIER_STATIC_SHARED(std::uint32_t, fixed, 32);
  auto* const target = reinterpret_cast<std::uint32_t*>(arguments.target);
  const std::uint32_t thread = threadIdx.x;
  target[thread] = thread < 32 ? shared[thread] : fixed[thread - 32];
}

/// Words 0 to 7: of lane 5 what each collective gives it.
void collectives(const ProbeArgs arguments) {
  auto* const target = reinterpret_cast<std::uint32_t*>(arguments.target);
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t value = 100 + lane;
  const unsigned all = 0xffffffffu;
  switch (arguments.mistake) {
    case kMaskWithoutCaller:
      __syncwarp(1);
      break;
    case kTwoMasks:
      __syncwarp(lane < 16 ? all : 0xffff0000u);
      break;
    case kLaneThatExited:
      if (lane == 3) return;
      __syncwarp();
      break;
    case kHalfAtCollective:
      if (lane < 16) {
        __syncwarp();
      } else {
        __ballot_sync(all, true);
      }
      break;
    case kShuffleWidth:
      __shfl_sync(all, value, 0, 12);
      break;
    default:
      break;
  }
  const std::uint32_t found[] = {
      __shfl_sync(all, value, 9),
      __shfl_xor_sync(all, value, 3),
      __shfl_up_sync(all, value, 2),
      __shfl_down_sync(all, value, 28),  // beyond the warp: its own
      __shfl_sync(all, value, 9, 4),     // of its four: the second
      __ballot_sync(all, lane % 3 == 0),
      std::uint32_t{__any_sync(all, lane == 31)},
      std::uint32_t{__all_sync(all, lane < 31)},
  };
  for (int i = 0; lane == 5 && i < 8; ++i) target[i] = found[i];
}

/// 64 bytes through shared memory, twice by the same mbarrier.
void bulk(const ProbeArgs arguments) {
  KVTIER_DYNAMIC_SHARED(unsigned char, shared);
  if (threadIdx.x != 0) return;
  const Mistake mistake = arguments.mistake;
  const auto is = [mistake](Mistake other) { return mistake == other; };
  auto* const barrier = reinterpret_cast<Barrier*>(shared + (is(kMbarrierAlignment) ? 4 : 0));
  unsigned char* const slot = shared + 128;
  if (!is(kNoMbarrier)) barrier_init(barrier, is(kMbarrierForNobody) ? 0 : 1);
  if (!is(kNoFence)) fence_async();
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t nbytes = is(kShortLoad) ? 24 : 64;
    barrier_arrive_expect(barrier, is(kEndlessPhase) ? nbytes + 16 : nbytes);
    if (is(kTwoArrivals)) barrier_arrive_expect(barrier, nbytes);
    bulk_load(slot + (is(kLoadBeyondShared) ? 80 : 0), arguments.source + 64 * i, nbytes, barrier);
    if (is(kLoadUnderEnd)) return;
    barrier_wait(barrier, i);
    bulk_store(arguments.target + 64 * i, slot, nbytes);
    bulk_commit();
    if (is(kStoreUnderEnd)) return;
    bulk_wait_read<0>();
  }
}

/// One word of each CTA added to one number, and one vector loaded.
void alone(const ProbeArgs arguments) {
  auto* const target = reinterpret_cast<std::uint32_t*>(arguments.target);
  if (arguments.mistake == kStop) stop();
  const std::uint64_t shift = arguments.mistake == kMisalignedVector ? 8 : 0;
  load_streaming(reinterpret_cast<const Vector16*>(arguments.source + shift));
  if (arguments.mistake == kBarrierAlone) __syncthreads();
  atomicAdd(target, blockIdx.x * 1000 + threadIdx.x);
  atomicMax(target + 1, blockIdx.x);
}

using kvtier::sim::entry;

const kvtier::sim::Entry kEntries[] = {
    entry<exchange>("exchange", {.block_max = 64}),
    entry<begin>("begin", {.block_max = 64}),
    entry<collectives>("collectives", {.block_max = 64}),
    entry<bulk>("bulk", {.block_max = 64}),
    entry<alone>("alone", {.block_max = 64, .threads_meet = false}),
};

}  // namespace
