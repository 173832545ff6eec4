#include "../cuda/rope.cu"
#include "sim_kernels.hpp"

namespace {

using kvtier::sim::entry;

constexpr kvtier::sim::KernelTraits kRope{.block_max = 256, .threads_meet = false};

const kvtier::sim::Entry kEntries[] = {
    entry<kvtier_rope_shift_neox>("kvtier_rope_shift_neox", kRope),
    entry<kvtier_rope_shift_interleaved>("kvtier_rope_shift_interleaved", kRope),
};

}  // namespace
