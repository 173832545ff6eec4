#include "../cuda/bulk.cu"
#include "../cuda/copy.cu"
#include "sim_kernels.hpp"

namespace {

using kvtier::sim::entry;

constexpr kvtier::sim::KernelTraits kCopy{.block_max = 512, .threads_meet = false};
constexpr kvtier::sim::KernelTraits kBulk{.block_max = 512, .architecture_min = 90};

#define KVTIER_ENTRIES(kBytes)                                      \
  entry<kvtier_gather_v##kBytes>("kvtier_gather_v" #kBytes, kCopy), \
      entry<kvtier_scatter_v##kBytes>("kvtier_scatter_v" #kBytes, kCopy)

const kvtier::sim::Entry kEntries[] = {
    KVTIER_ENTRIES(16),
    KVTIER_ENTRIES(8),
    KVTIER_ENTRIES(4),
    KVTIER_ENTRIES(2),
    KVTIER_ENTRIES(1),
    entry<kvtier_bulk_gather>("kvtier_bulk_gather", kBulk),
    entry<kvtier_bulk_scatter>("kvtier_bulk_scatter", kBulk),
};

}  // namespace
