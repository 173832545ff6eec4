// SHA-256 (FIPS 180-4), incremental; chunk keys are made of it (chunk_keys.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

using Sha256Digest = std::array<std::uint8_t, 32>;

/// Mixes `block_count` blocks of 64 bytes into the eight state words.
using Sha256Compress = void (*)(std::uint32_t* state, const std::uint8_t* blocks,
                                std::size_t block_count);

/// Runs everywhere; the reference of the accelerated ones.
void sha256_compress_portable(std::uint32_t* state, const std::uint8_t* blocks,
                              std::size_t block_count);

/// The fastest one this processor runs, chosen once (x86: SHA extensions; else portable).
Sha256Compress sha256_compress_best();

/// A running hash. A copy continues on its own, so many digests can share one prefix's work.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress = sha256_compress_best()) : compress_(compress) {}

  void update(std::span<const std::uint8_t> bytes);

  /// The digest of everything so far; the hash must not be used afterwards.
  Sha256Digest finish();

 private:
  static constexpr std::size_t kBlockBytes = 64;

  Sha256Compress compress_;
  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::uint64_t total_bytes_ = 0;
  std::size_t pending_bytes_ = 0;  // always less than a block
  std::array<std::uint8_t, kBlockBytes> pending_;
};

}  // namespace kvtier
