// Chunk keys: key[i] = SHA-256(key[i-1] || tokens of chunk i as little-endian uint32 || extra i).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/sha256.hpp"

namespace kvtier {

using ChunkKey = Sha256Digest;

/// Mixes `tokens` into `hash` in their stored form, whatever the host's byte order.
void update_with_tokens(Sha256& hash, std::span<const std::uint32_t> tokens);

/// The key of one chunk. `extra`, when not empty, is appended as its length in four
/// little-endian bytes and then its bytes; it must be shorter than 4 GiB.
ChunkKey chain_key(const ChunkKey& parent, std::span<const std::uint32_t> tokens,
                   std::span<const std::uint8_t> extra = {});

/// Fills `keys` with the keys of the first `keys.size()` whole chunks of `tokens`.
///
/// @throws std::invalid_argument if `tokens` is shorter than that many chunks
void chain_keys(const ChunkKey& parent, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<ChunkKey> keys);

}  // namespace kvtier
