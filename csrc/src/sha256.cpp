#include "kvtier/sha256.hpp"

#include <algorithm>
#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

alignas(64) constexpr std::array<std::uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::uint8_t* bytes) {
  return (std::uint32_t{bytes[0]} << 24) | (std::uint32_t{bytes[1]} << 16) |
         (std::uint32_t{bytes[2]} << 8) | std::uint32_t{bytes[3]};
}

void store_big_endian(std::uint8_t* bytes, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (24 - 8 * i));
}

#if defined(__x86_64__)

// Four rounds are two instructions. They form one dependency chain through the block, which bounds
// the speed; the message schedule of the words ahead fills the gaps. The four schedule vectors take
// turns, hence the unrolled indices.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_extensions(std::uint32_t* state,
                                                                         const std::uint8_t* blocks,
                                                                         std::size_t block_count) {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The instructions want the state as (A,B,E,F) and (C,D,G,H).
  const __m128i cdab =
      _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  const __m128i efgh =
      _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

  for (; block_count > 0; --block_count, blocks += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i words[4];
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& now = words[group % 4];
      if (group < 4) {
        now = _mm_shuffle_epi8(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + 16 * group)), to_big_endian);
      } else {
        const __m128i& before_1 = words[(group + 3) % 4];
        const __m128i& before_2 = words[(group + 2) % 4];
        const __m128i& before_3 = words[(group + 1) % 4];
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(now, before_3),
                                              _mm_alignr_epi8(before_1, before_2, 4));
        now = _mm_sha256msg2_epu32(partial, before_1);
      }
      const __m128i input = _mm_add_epi32(
          now,
          _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants.data() + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_extensions() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (!__builtin_cpu_supports("sse4.1") || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) {
    return false;
  }
  return ((ebx >> 29) & 1U) != 0;  // leaf 7: EBX bit 29 = SHA
}

#endif

}  // namespace

void sha256_compress_portable(std::uint32_t* state, const std::uint8_t* blocks,
                              std::size_t block_count) {
  for (; block_count > 0; --block_count, blocks += 64) {
    std::array<std::uint32_t, 64> words;
    for (std::size_t i = 0; i < 16; ++i) words[i] = load_big_endian(blocks + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t x = words[i - 15];
      const std::uint32_t y = words[i - 2];
      const std::uint32_t sigma_0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
      const std::uint32_t sigma_1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
      words[i] = words[i - 16] + sigma_0 + words[i - 7] + sigma_1;
    }
    auto [a, b, c, d, e, f, g, h] = std::array<std::uint32_t, 8>{
        state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]};
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t sum_1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t choice = (e & f) ^ (~e & g);
      const std::uint32_t first = h + sum_1 + choice + kRoundConstants[i] + words[i];
      const std::uint32_t sum_0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + sum_0 + majority;
    }
    const std::array<std::uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += mixed[i];
  }
}

Sha256Compress sha256_compress_best() {
#if defined(__x86_64__)
  static const bool accelerated = has_sha_extensions();
  if (accelerated) return compress_sha_extensions;
#endif
  return sha256_compress_portable;
}

void Sha256::update(std::span<const std::uint8_t> bytes) {
  total_bytes_ += bytes.size();
  if (pending_bytes_ > 0) {
    const std::size_t taken = std::min(kBlockBytes - pending_bytes_, bytes.size());
    std::copy_n(bytes.begin(), taken,
                pending_.begin() + static_cast<std::ptrdiff_t>(pending_bytes_));
    pending_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (pending_bytes_ < kBlockBytes) return;
    compress_(state_.data(), pending_.data(), 1);
    pending_bytes_ = 0;
  }
  const std::size_t block_count = bytes.size() / kBlockBytes;
  if (block_count > 0) compress_(state_.data(), bytes.data(), block_count);
  bytes = bytes.subspan(block_count * kBlockBytes);
  std::copy(bytes.begin(), bytes.end(), pending_.begin());
  pending_bytes_ = bytes.size();
}

Sha256Digest Sha256::finish() {
  std::array<std::uint8_t, 2 * kBlockBytes> tail{};
  std::copy_n(pending_.begin(), pending_bytes_, tail.begin());
  tail[pending_bytes_] = 0x80;
  const std::size_t block_count = pending_bytes_ + 9 <= kBlockBytes ? 1 : 2;  // 9: mark and length
  const std::uint64_t total_bits = total_bytes_ * 8;
  std::uint8_t* length = tail.data() + block_count * kBlockBytes - 8;
  store_big_endian(length, static_cast<std::uint32_t>(total_bits >> 32));
  store_big_endian(length + 4, static_cast<std::uint32_t>(total_bits));
  compress_(state_.data(), tail.data(), block_count);

  Sha256Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i) store_big_endian(&digest[4 * i], state_[i]);
  return digest;
}

}  // namespace kvtier
