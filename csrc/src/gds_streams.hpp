// Segments by operations on CUDA streams: no thread of ours waits in a call for each.
#pragma once
#include <cstdint>
#include <memory>

#include "file_batch.hpp"
#include "gds_state.hpp"

namespace kvtier::gds {

/// Each batch has `depth` segments in flight, half on each of two streams of its own per GPU, so
/// that one works while the other's results are looked at. At most `kLanesMax` batches at a time.
///
/// Only for memory of a GPU. Needs a cuFile library with operations on streams, and CUDA.
std::shared_ptr<FileRunner> make_stream_runner(std::shared_ptr<State> state, std::uint32_t depth);

}  // namespace kvtier::gds
