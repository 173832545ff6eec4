// XXH3, 128 bits, seed 0: the checksum of stored segments. Equal to the reference implementation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/thread_pool.hpp"

namespace kvtier {

/// In canonical form: the high half first, big-endian.
using Xxh3Digest = std::array<std::uint8_t, 16>;

/// How inputs of more than 240 bytes are mixed; the digest does not depend on it.
enum class Xxh3Path { kPortable, kAvx2, kAvx512 };

/// The paths this processor runs, slowest first; never empty.
std::span<const Xxh3Path> xxh3_paths();

/// The digest of `input` by the fastest path. Reads memory once, so it is bound by its bandwidth.
Xxh3Digest xxh3_128(std::span<const std::uint8_t> input);

/// Digests of `lengths[i]` bytes at `addresses[i]` into `digests[i]`, in parallel over the pieces.
///
/// @throws std::invalid_argument, before anything is read, if the counts differ or a piece that is
///         not empty has address 0
void xxh3_128_pieces(ThreadPool& pool, std::span<const std::uint64_t> addresses,
                     std::span<const std::uint64_t> lengths, std::span<Xxh3Digest> digests);

/// `xxh3_128` by a chosen path, which must be one of `xxh3_paths()`.
Xxh3Digest xxh3_128(std::span<const std::uint8_t> input, Xxh3Path path);

}  // namespace kvtier
