#include "../cuda/hot.cu"
#include "sim_kernels.hpp"

namespace {

using kvtier::sim::entry;

constexpr kvtier::sim::KernelTraits kCopy{.block_max = 256, .threads_meet = false};

const kvtier::sim::Entry kEntries[] = {
    entry<kvtier_hot_resolve>("kvtier_hot_resolve", {.block_max = 1024}),
    entry<kvtier_hot_copy_v16>("kvtier_hot_copy_v16", kCopy),
    entry<kvtier_hot_copy_v8>("kvtier_hot_copy_v8", kCopy),
    entry<kvtier_hot_copy_v4>("kvtier_hot_copy_v4", kCopy),
};

}  // namespace
