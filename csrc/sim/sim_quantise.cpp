#include "../cuda/boosted.cu"
#include "../cuda/quantise.cu"
#include "sim_kernels.hpp"

namespace {

using kvtier::sim::entry;

constexpr kvtier::sim::KernelTraits kAlone{.block_max = 256, .threads_meet = false};
constexpr kvtier::sim::KernelTraits kMeet{.block_max = 256};

#define KVTIER_ENTRIES(kBits)                                                                     \
  entry<kvtier_quantise_v_per_token_b##kBits>("kvtier_quantise_v_per_token_b" #kBits, kMeet),     \
      entry<kvtier_quantise_k_per_channel_b##kBits>("kvtier_quantise_k_per_channel_b" #kBits,     \
                                                    kAlone),                                      \
      entry<kvtier_dequantise_v_per_token_b##kBits>("kvtier_dequantise_v_per_token_b" #kBits,     \
                                                    kAlone),                                      \
      entry<kvtier_dequantise_k_per_channel_b##kBits>("kvtier_dequantise_k_per_channel_b" #kBits, \
                                                      kAlone)

const kvtier::sim::Entry kEntries[] = {
    KVTIER_ENTRIES(8),
    KVTIER_ENTRIES(4),
    KVTIER_ENTRIES(2),
    entry<kvtier_quantise_k2x2>("kvtier_quantise_k2x2", kMeet),
    entry<kvtier_dequantise_k2x2>("kvtier_dequantise_k2x2", kMeet),
};

}  // namespace
