#include <nanobind/nanobind.h>

#include <algorithm>

#include "bindings.hpp"
#include "kvtier/chunk_keys.hpp"
#include "kvtier/xxh3.hpp"
#include "read_buffer.hpp"
#include "tokens.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {
namespace {

ChunkKey to_key(const nb::bytes& key) {
  ChunkKey result;
  if (key.size() != result.size()) {
    throw std::invalid_argument("a key of " + std::to_string(key.size()) + " bytes, must be " +
                                std::to_string(result.size()));
  }
  std::copy_n(static_cast<const std::uint8_t*>(key.data()), result.size(), result.begin());
  return result;
}

nb::bytes xxh3_128_of(nb::handle data) {
  const ReadBuffer buffer(data);
  Xxh3Digest digest;
  {
    const nb::gil_scoped_release release;
    digest = xxh3_128(buffer.bytes());
  }
  return nb::bytes(digest.data(), digest.size());
}

nb::bytes chain_keys_of(const nb::bytes& parent, nb::handle tokens_argument,
                        std::size_t chunk_tokens) {
  if (chunk_tokens == 0) throw std::invalid_argument("chunk_tokens is 0, must be at least 1");
  const ChunkKey root = to_key(parent);
  const Tokens tokens(tokens_argument);
  const std::size_t key_count = tokens.size() / chunk_tokens;
  std::vector<ChunkKey> keys(key_count);
  std::vector<std::uint32_t> scratch;
  if (tokens.needs_gil()) {
    const auto whole = tokens.read(0, key_count * chunk_tokens, scratch);
    const nb::gil_scoped_release release;
    chain_keys(root, whole, chunk_tokens, keys);
  } else {
    const nb::gil_scoped_release release;
    // Piece by piece, so that converted tokens are hashed while they lie in the L1 cache.
    constexpr std::size_t kPieceTokens = 4096;
    const std::size_t piece_keys = std::max<std::size_t>(1, kPieceTokens / chunk_tokens);
    for (std::size_t done = 0; done < key_count;) {
      const std::size_t count = std::min(piece_keys, key_count - done);
      const auto piece = tokens.read(done * chunk_tokens, count * chunk_tokens, scratch);
      const ChunkKey previous = done == 0 ? root : keys[done - 1];
      chain_keys(previous, piece, chunk_tokens, std::span(keys).subspan(done, count));
      done += count;
    }
  }
  return nb::bytes(keys.data(), keys.size() * sizeof(ChunkKey));
}

nb::bytes chain_key_of(const nb::bytes& parent, nb::handle tokens_argument,
                       const nb::bytes& extra) {
  const ChunkKey root = to_key(parent);
  const Tokens tokens(tokens_argument);
  if (extra.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("extra of " + std::to_string(extra.size()) +
                                " bytes, at most 4294967295");
  }
  std::vector<std::uint32_t> scratch;
  const auto all = tokens.read_all(scratch);
  const std::span extra_bytes(static_cast<const std::uint8_t*>(extra.data()), extra.size());
  ChunkKey key;
  {
    const nb::gil_scoped_release release;
    key = chain_key(root, all, extra_bytes);
  }
  return nb::bytes(key.data(), key.size());
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("xxh3_128", xxh3_128_of, nb::arg("data"),
        "XXH3-128 of any contiguous buffer: 16 bytes in canonical (big-endian) form.");
  m.def("chain_keys", chain_keys_of, nb::arg("parent"), nb::arg("tokens"), nb::arg("chunk_tokens"),
        "Chained keys of all whole chunks of `tokens`, 32 bytes each, concatenated.");
  m.def("chain_key", chain_key_of, nb::arg("parent"), nb::arg("tokens"),
        nb::arg("extra") = nb::bytes(""),
        "One key over all of `tokens`; `extra`, when not empty, is mixed in with its length.");
}

}  // namespace kvtier::bindings
