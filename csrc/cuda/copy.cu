// Gather and scatter: paged KV <-> blocks, any layout, five vector widths.
//
// Grid: any number of CTAs (the budget of SMs), each of which takes every gridDim.x-th tile; block:
// up to 512; no shared memory. Moves every byte once, so bound by HBM, or by the bus when the
// stored side is mapped host memory: bandwidth is then what is in flight over the round trip.
#include "locate.h"

namespace kvtier::device {

constexpr int kVectorsInFlight = 4;  // of a thread

/// Thread t of a tile that begins at vector v takes v + t, v + t + blockDim.x, ...: neighbours in a
/// warp touch neighbours in memory.
template <int kVectorBytes, bool kGather>
KVTIER_DEVICE void copy(const CopyArgs& arguments) {
  using Value = Vector<kVectorBytes>;
  const std::uint64_t tile = static_cast<std::uint64_t>(blockDim.x) * kVectorsInFlight;
  for (std::uint64_t first = blockIdx.x * tile; first < arguments.total;
       first += gridDim.x * tile) {
    CopyPlace places[kVectorsInFlight];
    bool inside[kVectorsInFlight];
    Value values[kVectorsInFlight];
    // Addresses first, then every load, then every store: nothing stands between the loads, so all
    // of them are in flight at once. Past the end a thread reads the last vector, so that no load
    // hangs on a condition, and writes nothing.
    KVTIER_UNROLL
    for (int i = 0; i < kVectorsInFlight; ++i) {
      const std::uint64_t index = first + static_cast<std::uint64_t>(i) * blockDim.x + threadIdx.x;
      inside[i] = index < arguments.total;
      places[i] =
          locate(arguments, inside[i] ? static_cast<std::uint32_t>(index) : arguments.total - 1,
                 kVectorBytes);
    }
    KVTIER_UNROLL
    for (int i = 0; i < kVectorsInFlight; ++i) {
      values[i] = load_streaming(
          reinterpret_cast<const Value*>(kGather ? places[i].paged : places[i].stored));
    }
    KVTIER_UNROLL
    for (int i = 0; i < kVectorsInFlight; ++i) {
      if (inside[i]) {
        store_streaming(reinterpret_cast<Value*>(kGather ? places[i].stored : places[i].paged),
                        values[i]);
      }
    }
  }
}

}  // namespace kvtier::device

#define KVTIER_COPY_KERNELS(kBytes)                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                          \
      kvtier_gather_v##kBytes(const __grid_constant__ kvtier::device::CopyArgs arguments) {  \
    kvtier::device::copy<kBytes, true>(arguments);                                           \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                          \
      kvtier_scatter_v##kBytes(const __grid_constant__ kvtier::device::CopyArgs arguments) { \
    kvtier::device::copy<kBytes, false>(arguments);                                          \
  }

KVTIER_COPY_KERNELS(16)
KVTIER_COPY_KERNELS(8)
KVTIER_COPY_KERNELS(4)
KVTIER_COPY_KERNELS(2)
KVTIER_COPY_KERNELS(1)
