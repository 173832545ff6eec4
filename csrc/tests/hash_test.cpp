// Known digests, and every fast path against the portable one, on exact-size heap blocks, so that
// a sanitizer sees any byte read outside.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kvtier/chunk_keys.hpp"
#include "kvtier/sha256.hpp"
#include "kvtier/xxh3.hpp"

namespace {

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

template <std::size_t kSize>
std::string to_hex(const std::array<std::uint8_t, kSize>& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::vector<std::uint8_t> pattern(std::size_t length) {
  std::vector<std::uint8_t> bytes(length);
  std::uint32_t state = 1;
  for (std::uint8_t& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  return bytes;
}

std::string sha256_hex(std::string_view text, kvtier::Sha256Compress compress) {
  kvtier::Sha256 hash(compress);
  hash.update({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  return to_hex(hash.finish());
}

void sha256_gives_the_standard_s_examples() {
  for (const auto compress : {kvtier::sha256_compress_portable, kvtier::sha256_compress_best()}) {
    check(sha256_hex("", compress) ==
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
          "sha256 of nothing");
    check(sha256_hex("abc", compress) ==
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
          "sha256 of abc");
    check(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", compress) ==
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
          "sha256 of two blocks");
  }
}

void sha256_is_the_same_by_every_path_and_in_any_pieces() {
  for (std::size_t length = 0; length < 400; ++length) {
    const std::vector<std::uint8_t> bytes = pattern(length);
    kvtier::Sha256 portable(kvtier::sha256_compress_portable);
    portable.update(bytes);
    kvtier::Sha256 best;
    const std::span<const std::uint8_t> all(bytes);
    for (std::size_t first = 0; first < length; first += 37) {
      best.update(all.subspan(first, std::min<std::size_t>(37, length - first)));
    }
    check(portable.finish() == best.finish(), "sha256 of " + std::to_string(length));
  }
}

void chain_keys_are_the_keys_one_by_one() {
  const std::vector<std::uint32_t> tokens = {1, 2, 3, 0xffffffff, 5, 6, 7};
  const kvtier::ChunkKey root{};
  std::vector<kvtier::ChunkKey> keys(3);
  kvtier::chain_keys(root, tokens, 2, keys);
  kvtier::ChunkKey previous = root;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    previous = kvtier::chain_key(previous, std::span(tokens).subspan(2 * i, 2));
    check(keys[i] == previous, "key " + std::to_string(i));
  }
  bool refused = false;
  try {
    kvtier::chain_keys(root, tokens, 3, keys);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "three chunks of three of seven tokens are refused");
}

void xxh3_gives_the_reference_s_digests() {
  check(to_hex(kvtier::xxh3_128({})) == "99aa06d3014798d86001c324468d497f", "xxh3 of nothing");
}

void xxh3_is_the_same_by_every_path() {
  const auto paths = kvtier::xxh3_paths();
  for (std::size_t length = 0; length < 2500; ++length) {
    const std::vector<std::uint8_t> bytes = pattern(length);
    const auto portable = kvtier::xxh3_128(bytes, kvtier::Xxh3Path::kPortable);
    for (const auto path : paths) {
      check(kvtier::xxh3_128(bytes, path) == portable, "xxh3 of " + std::to_string(length));
    }
  }
}

void xxh3_of_pieces_is_that_of_each() {
  kvtier::ThreadPool pool(3);
  std::vector<std::vector<std::uint8_t>> pieces;
  std::vector<std::uint64_t> addresses;
  std::vector<std::uint64_t> lengths;
  for (std::size_t i = 0; i < 200; ++i) pieces.push_back(pattern(i % 7 == 0 ? 300'000 : i));
  for (const auto& piece : pieces) {
    addresses.push_back(reinterpret_cast<std::uint64_t>(piece.data()));
    lengths.push_back(piece.size());
  }
  std::vector<kvtier::Xxh3Digest> digests(pieces.size());
  kvtier::xxh3_128_pieces(pool, addresses, lengths, digests);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    check(digests[i] == kvtier::xxh3_128(pieces[i]), "piece " + std::to_string(i));
  }
}

}  // namespace

int main() {
  sha256_gives_the_standard_s_examples();
  sha256_is_the_same_by_every_path_and_in_any_pieces();
  chain_keys_are_the_keys_one_by_one();
  xxh3_gives_the_reference_s_digests();
  xxh3_is_the_same_by_every_path();
  xxh3_of_pieces_is_that_of_each();
  return 0;
}
