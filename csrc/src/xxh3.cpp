// Written from the algorithm's specification (doc/xxhash_spec.md of the xxHash project, version
// 0.2.0), whose names the constants keep. All arithmetic wraps and all words are little-endian.
#include "kvtier/xxh3.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

constexpr std::uint32_t kPrime32_1 = 0x9E3779B1U;
constexpr std::uint32_t kPrime32_2 = 0x85EBCA77U;
constexpr std::uint32_t kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5U;
constexpr std::uint64_t kPrimeMx1 = 0x165667919E3779F9U;
constexpr std::uint64_t kPrimeMx2 = 0x9FB21C651E98DF25U;

constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kSecretStep = 8;  // the secret moves on by this much with each stripe
constexpr std::size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / kSecretStep;
constexpr std::size_t kBlockBytes = kStripesPerBlock * kStripeBytes;
constexpr std::size_t kScrambleSecret = kSecretBytes - kStripeBytes;
constexpr std::size_t kLastStripeSecret = kSecretBytes - kStripeBytes - 7;

alignas(64) constexpr std::array<std::uint8_t, kSecretBytes> kSecret = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Halves {
  std::uint64_t low;
  std::uint64_t high;
};

template <typename Word>
Word load(const std::uint8_t* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof(word));
  if constexpr (std::endian::native == std::endian::big) {
    word = sizeof(Word) == 8
               ? static_cast<Word>(__builtin_bswap64(word))
               : static_cast<Word>(__builtin_bswap32(static_cast<std::uint32_t>(word)));
  }
  return word;
}

std::uint64_t load64(const std::uint8_t* bytes) { return load<std::uint64_t>(bytes); }
std::uint32_t load32(const std::uint8_t* bytes) { return load<std::uint32_t>(bytes); }
std::uint64_t secret64(std::size_t offset) { return load64(kSecret.data() + offset); }

Halves multiply(std::uint64_t left, std::uint64_t right) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(left) * right;
  return {static_cast<std::uint64_t>(product), static_cast<std::uint64_t>(product >> 64)};
}

std::uint64_t multiply_fold(std::uint64_t left, std::uint64_t right) {
  const Halves product = multiply(left, right);
  return product.low ^ product.high;
}

std::uint64_t xor_shift(std::uint64_t value, int bits) { return value ^ (value >> bits); }

std::uint64_t avalanche(std::uint64_t value) {
  return xor_shift(xor_shift(value, 37) * kPrimeMx1, 32);
}

std::uint64_t avalanche_xxh64(std::uint64_t value) {
  return xor_shift(xor_shift(xor_shift(value, 33) * kPrime64_2, 29) * kPrime64_3, 32);
}

Halves hash_0() {
  return {avalanche_xxh64(secret64(64) ^ secret64(72)),
          avalanche_xxh64(secret64(80) ^ secret64(88))};
}

Halves hash_1_to_3(const std::uint8_t* input, std::size_t length) {
  const std::uint32_t low = (std::uint32_t{input[0]} << 16) |
                            (std::uint32_t{input[length >> 1]} << 24) | input[length - 1] |
                            (static_cast<std::uint32_t>(length) << 8);
  const std::uint32_t high = std::rotl(__builtin_bswap32(low), 13);
  const std::uint32_t flip_low = load32(kSecret.data()) ^ load32(kSecret.data() + 4);
  const std::uint32_t flip_high = load32(kSecret.data() + 8) ^ load32(kSecret.data() + 12);
  return {avalanche_xxh64(low ^ flip_low), avalanche_xxh64(high ^ flip_high)};
}

Halves hash_4_to_8(const std::uint8_t* input, std::size_t length) {
  const std::uint64_t both = load32(input) | (std::uint64_t{load32(input + length - 4)} << 32);
  Halves hash = multiply(both ^ secret64(16) ^ secret64(24), kPrime64_1 + (length << 2));
  hash.high += hash.low << 1;
  hash.low ^= hash.high >> 3;
  hash.low = xor_shift(xor_shift(hash.low, 35) * kPrimeMx2, 28);
  hash.high = avalanche(hash.high);
  return hash;
}

Halves hash_9_to_16(const std::uint8_t* input, std::size_t length) {
  const std::uint64_t first = load64(input);
  const std::uint64_t last = load64(input + length - 8);
  const std::uint64_t flipped = last ^ secret64(48) ^ secret64(56);
  Halves hash = multiply(first ^ last ^ secret64(32) ^ secret64(40), kPrime64_1);
  hash.low += static_cast<std::uint64_t>(length - 1) << 54;
  hash.high += flipped + (flipped & 0xffffffffU) * (kPrime32_2 - 1);
  hash.low ^= __builtin_bswap64(hash.high);
  Halves mixed = multiply(hash.low, kPrime64_2);
  mixed.high += hash.high * kPrime64_2;
  return {avalanche(mixed.low), avalanche(mixed.high)};
}

std::uint64_t mix_16(const std::uint8_t* input, std::size_t secret) {
  return multiply_fold(load64(input) ^ secret64(secret), load64(input + 8) ^ secret64(secret + 8));
}

void mix_32(Halves& sum, const std::uint8_t* first, const std::uint8_t* second,
            std::size_t secret) {
  sum.low = (sum.low + mix_16(first, secret)) ^ (load64(second) + load64(second + 8));
  sum.high = (sum.high + mix_16(second, secret + 16)) ^ (load64(first) + load64(first + 8));
}

Halves finish_mixed(const Halves& sum, std::size_t length) {
  const std::uint64_t high = sum.low * kPrime64_1 + sum.high * kPrime64_4 + length * kPrime64_2;
  return {avalanche(sum.low + sum.high), std::uint64_t{0} - avalanche(high)};
}

Halves hash_17_to_128(const std::uint8_t* input, std::size_t length) {
  Halves sum{length * kPrime64_1, 0};
  for (std::size_t i = (length - 1) / 32 + 1; i-- > 0;) {  // from the middle outwards
    mix_32(sum, input + 16 * i, input + length - 16 * (i + 1), 32 * i);
  }
  return finish_mixed(sum, length);
}

Halves hash_129_to_240(const std::uint8_t* input, std::size_t length) {
  Halves sum{length * kPrime64_1, 0};
  for (std::size_t i = 0; i < 128; i += 32) mix_32(sum, input + i, input + i + 16, i);
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (std::size_t i = 128; i + 32 <= length; i += 32) {
    mix_32(sum, input + i, input + i + 16, i - 128 + 3);
  }
  mix_32(sum, input + length - 16, input + length - 32, 136 - 17 - 16);
  return finish_mixed(sum, length);
}

// ---- More than 240 bytes: eight 64-bit lanes take a stripe of 64 bytes at a time.

using Lanes = std::array<std::uint64_t, 8>;

void accumulate_portable(Lanes& lanes, const std::uint8_t* stripe, std::size_t secret) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::uint64_t value = load64(stripe + 8 * i);
    const std::uint64_t keyed = value ^ secret64(secret + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (keyed & 0xffffffffU) * (keyed >> 32);
  }
}

void mix_long_portable(Lanes& lanes, const std::uint8_t* input, std::size_t length) {
  const std::uint8_t* const last_stripe = input + length - kStripeBytes;
  std::size_t left = length - 1;  // a final whole block is not scrambled
  for (; left >= kBlockBytes; left -= kBlockBytes) {
    for (std::size_t i = 0; i < kStripesPerBlock; ++i, input += kStripeBytes) {
      accumulate_portable(lanes, input, kSecretStep * i);
    }
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = (xor_shift(lanes[i], 47) ^ secret64(kScrambleSecret + 8 * i)) * kPrime32_1;
    }
  }
  for (std::size_t i = 0; i < left / kStripeBytes; ++i, input += kStripeBytes) {
    accumulate_portable(lanes, input, kSecretStep * i);
  }
  accumulate_portable(lanes, last_stripe, kLastStripeSecret);
}

#if defined(__x86_64__)

// No software prefetch: the hardware one is faster at reading a single stream (measured).

#define KVTIER_TARGET __attribute__((target("avx2"))) inline

KVTIER_TARGET __m256i load_256(const void* bytes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(bytes));
}

KVTIER_TARGET __m256i accumulate_256(__m256i lanes, const std::uint8_t* input,
                                     const std::uint8_t* secret) {
  const __m256i value = load_256(input);
  const __m256i keyed = _mm256_xor_si256(value, load_256(secret));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i neighbour = _mm256_shuffle_epi32(value, 0x4e);
  return _mm256_add_epi64(product, _mm256_add_epi64(lanes, neighbour));
}

KVTIER_TARGET __m256i scramble_256(__m256i lanes, const std::uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  const __m256i shifted = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
  const __m256i keyed = _mm256_xor_si256(shifted, load_256(secret));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) void mix_long_avx2(Lanes& lanes, const std::uint8_t* input,
                                                   std::size_t length) {
  const std::uint8_t* const secret = kSecret.data();
  const std::uint8_t* const last_stripe = input + length - kStripeBytes;
  __m256i low = load_256(lanes.data());
  __m256i high = load_256(lanes.data() + 4);
  std::size_t left = length - 1;
  for (; left >= kBlockBytes; left -= kBlockBytes) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kStripesPerBlock; ++i, input += kStripeBytes) {
      low = accumulate_256(low, input, secret + kSecretStep * i);
      high = accumulate_256(high, input + 32, secret + kSecretStep * i + 32);
    }
    low = scramble_256(low, secret + kScrambleSecret);
    high = scramble_256(high, secret + kScrambleSecret + 32);
  }
  for (std::size_t i = 0; i < left / kStripeBytes; ++i, input += kStripeBytes) {
    low = accumulate_256(low, input, secret + kSecretStep * i);
    high = accumulate_256(high, input + 32, secret + kSecretStep * i + 32);
  }
  low = accumulate_256(low, last_stripe, secret + kLastStripeSecret);
  high = accumulate_256(high, last_stripe + 32, secret + kLastStripeSecret + 32);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.data()), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.data() + 4), high);
}

#undef KVTIER_TARGET
#define KVTIER_TARGET __attribute__((target("avx512f"))) inline

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
// GCC 12's own header starts "undefined" vectors from themselves (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

KVTIER_TARGET __m512i accumulate_512(__m512i lanes, const std::uint8_t* input, __m512i secret) {
  const __m512i value = _mm512_loadu_si512(input);
  const __m512i keyed = _mm512_xor_si512(value, secret);
  const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  const __m512i neighbour = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
  return _mm512_add_epi64(product, _mm512_add_epi64(lanes, neighbour));
}

KVTIER_TARGET __m512i scramble_512(__m512i lanes, const std::uint8_t* secret) {
  const __m512i prime = _mm512_set1_epi64(kPrime32_1);
  const __m512i shifted = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
  const __m512i keyed = _mm512_xor_si512(shifted, _mm512_loadu_si512(secret));
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(keyed, prime), _mm512_slli_epi64(high, 32));
}

__attribute__((target("avx512f"))) void mix_long_avx512(Lanes& lanes, const std::uint8_t* input,
                                                        std::size_t length) {
  const std::uint8_t* const secret = kSecret.data();
  const std::uint8_t* const last_stripe = input + length - kStripeBytes;
  // The unaligned secrets straddle cache lines, so loading them again would cost as much as the
  // input does. They stay in registers; the empty asm keeps the compiler from undoing that.
  __m512i secrets[kStripesPerBlock];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kStripesPerBlock; ++i) {
    secrets[i] = _mm512_loadu_si512(secret + kSecretStep * i);
    asm("" : "+v"(secrets[i]));
  }
  __m512i all = _mm512_loadu_si512(lanes.data());
  std::size_t left = length - 1;
  for (; left >= kBlockBytes; left -= kBlockBytes) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kStripesPerBlock; ++i, input += kStripeBytes) {
      all = accumulate_512(all, input, secrets[i]);
    }
    all = scramble_512(all, secret + kScrambleSecret);
  }
  for (std::size_t i = 0; i < left / kStripeBytes; ++i, input += kStripeBytes) {
    all = accumulate_512(all, input, _mm512_loadu_si512(secret + kSecretStep * i));
  }
  all = accumulate_512(all, last_stripe, _mm512_loadu_si512(secret + kLastStripeSecret));
  _mm512_storeu_si512(lanes.data(), all);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#undef KVTIER_TARGET

#endif  // __x86_64__

std::uint64_t merge_lanes(const Lanes& lanes, std::size_t secret, std::uint64_t start) {
  for (std::size_t i = 0; i < lanes.size(); i += 2) {
    start += multiply_fold(lanes[i] ^ secret64(secret + 8 * i),
                           lanes[i + 1] ^ secret64(secret + 8 * i + 8));
  }
  return avalanche(start);
}

Halves hash_long(const std::uint8_t* input, std::size_t length, Xxh3Path path) {
  Lanes lanes = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
#if defined(__x86_64__)
  if (path == Xxh3Path::kAvx512) {
    mix_long_avx512(lanes, input, length);
  } else if (path == Xxh3Path::kAvx2) {
    mix_long_avx2(lanes, input, length);
  } else {
    mix_long_portable(lanes, input, length);
  }
#else
  static_cast<void>(path);
  mix_long_portable(lanes, input, length);
#endif
  return {merge_lanes(lanes, 11, length * kPrime64_1),
          merge_lanes(lanes, kSecretBytes - kStripeBytes - 11, ~(length * kPrime64_2))};
}

Halves hash_any(const std::uint8_t* input, std::size_t length, Xxh3Path path) {
  if (length > 240) return hash_long(input, length, path);
  if (length > 128) return hash_129_to_240(input, length);
  if (length > 16) return hash_17_to_128(input, length);
  if (length > 8) return hash_9_to_16(input, length);
  if (length > 3) return hash_4_to_8(input, length);
  return length > 0 ? hash_1_to_3(input, length) : hash_0();
}

}  // namespace

std::span<const Xxh3Path> xxh3_paths() {
  static constexpr std::array kPaths = {Xxh3Path::kPortable, Xxh3Path::kAvx2, Xxh3Path::kAvx512};
#if defined(__x86_64__)
  static const std::size_t count = __builtin_cpu_supports("avx512f") != 0 ? 3U
                                   : __builtin_cpu_supports("avx2") != 0  ? 2U
                                                                          : 1U;
  return std::span(kPaths).first(count);
#else
  return std::span(kPaths).first(1);
#endif
}

Xxh3Digest xxh3_128(std::span<const std::uint8_t> input) {
  return xxh3_128(input, xxh3_paths().back());
}

Xxh3Digest xxh3_128(std::span<const std::uint8_t> input, Xxh3Path path) {
  const Halves hash = hash_any(input.data(), input.size(), path);
  Xxh3Digest digest;
  for (std::size_t i = 0; i < 8; ++i) {
    digest[i] = static_cast<std::uint8_t>(hash.high >> (56 - 8 * i));
    digest[8 + i] = static_cast<std::uint8_t>(hash.low >> (56 - 8 * i));
  }
  return digest;
}

void xxh3_128_pieces(ThreadPool& pool, std::span<const std::uint64_t> addresses,
                     std::span<const std::uint64_t> lengths, std::span<Xxh3Digest> digests) {
  const std::size_t piece_count = addresses.size();
  if (lengths.size() != piece_count || digests.size() != piece_count) {
    throw std::invalid_argument(std::to_string(piece_count) + " addresses, " +
                                std::to_string(lengths.size()) + " lengths and " +
                                std::to_string(digests.size()) + " digests, must be as many");
  }
  std::uint64_t total_bytes = 0;
  for (std::size_t i = 0; i < piece_count; ++i) {
    if (addresses[i] == 0 && lengths[i] > 0) {
      throw std::invalid_argument("piece " + std::to_string(i) + " has address 0");
    }
    total_bytes += lengths[i];
  }
  // Small pieces share a unit, so that a unit is worth waking a thread for.
  constexpr std::uint64_t kUnitBytes = std::uint64_t{1} << 20;
  const std::size_t pieces_per_unit =
      std::max<std::size_t>(1, kUnitBytes * piece_count / std::max<std::uint64_t>(1, total_bytes));
  const std::size_t unit_count = (piece_count + pieces_per_unit - 1) / pieces_per_unit;
  pool.run(unit_count, [&](WorkUnits& units) {
    for (std::size_t unit = 0; units.take(unit);) {
      const std::size_t end = std::min((unit + 1) * pieces_per_unit, piece_count);
      for (std::size_t i = unit * pieces_per_unit; i < end; ++i) {
        // The caller's addresses become memory here and nowhere else.
        digests[i] = xxh3_128({reinterpret_cast<const std::uint8_t*>(addresses[i]), lengths[i]});
      }
    }
  });
}

}  // namespace kvtier
