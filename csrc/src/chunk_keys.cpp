#include "kvtier/chunk_keys.hpp"

#include <bit>
#include <stdexcept>
#include <string>

namespace kvtier {
namespace {

std::array<std::uint8_t, 4> little_endian(std::uint32_t value) {
  return {static_cast<std::uint8_t>(value), static_cast<std::uint8_t>(value >> 8),
          static_cast<std::uint8_t>(value >> 16), static_cast<std::uint8_t>(value >> 24)};
}

}  // namespace

void update_with_tokens(Sha256& hash, std::span<const std::uint32_t> tokens) {
  if constexpr (std::endian::native == std::endian::little) {
    hash.update({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
  } else {
    for (const std::uint32_t token : tokens) hash.update(little_endian(token));
  }
}

ChunkKey chain_key(const ChunkKey& parent, std::span<const std::uint32_t> tokens,
                   std::span<const std::uint8_t> extra) {
  Sha256 hash;
  hash.update(parent);
  update_with_tokens(hash, tokens);
  if (!extra.empty()) {
    hash.update(little_endian(static_cast<std::uint32_t>(extra.size())));
    hash.update(extra);
  }
  return hash.finish();
}

void chain_keys(const ChunkKey& parent, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<ChunkKey> keys) {
  if (chunk_tokens == 0 || tokens.size() / chunk_tokens < keys.size()) {
    throw std::invalid_argument(std::to_string(keys.size()) + " chunks of " +
                                std::to_string(chunk_tokens) + " tokens asked of " +
                                std::to_string(tokens.size()) + " tokens");
  }
  ChunkKey previous = parent;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    previous = chain_key(previous, tokens.subspan(i * chunk_tokens, chunk_tokens));
    keys[i] = previous;
  }
}

}  // namespace kvtier
