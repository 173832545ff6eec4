#include "kvtier/host_copy.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {
namespace {

void copy_memcpy(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void copy_nt256(std::byte* target, const std::byte* source,
                                                std::size_t bytes) {
  // Whole cache lines only: a part of one would be read back from memory before it is written.
  const std::size_t head =
      std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(target) & 63U, bytes);
  if (head > 0) std::memcpy(target, source, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i + 32), high);
  }
  if (i < bytes) std::memcpy(target + i, source + i, bytes - i);
}

__attribute__((target("avx512f"))) void copy_nt512(std::byte* target, const std::byte* source,
                                                   std::size_t bytes) {
  const std::size_t head =
      std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(target) & 63U, bytes);
  if (head > 0) std::memcpy(target, source, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
  }
  if (i < bytes) std::memcpy(target + i, source + i, bytes - i);
}

void copy_movsb(std::byte* target, const std::byte* source, std::size_t bytes) {
  asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(bytes) : : "memory");
}

#endif

constexpr std::array kModeNames = {std::string_view("auto"), std::string_view("memcpy"),
                                   std::string_view("nt256"), std::string_view("nt512"),
                                   std::string_view("movsb")};

std::size_t last_level_cache_bytes() {
  constexpr std::size_t kUnknown = std::size_t{32} << 20;  // a usual server's share
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return static_cast<std::size_t>(bytes);
#endif
  return kUnknown;
}

}  // namespace

std::string_view copy_mode_name(CopyMode mode) {
  return kModeNames[static_cast<std::size_t>(mode)];
}

std::span<const CopyMode> copy_modes() {
  static const std::vector<CopyMode> modes = [] {
    std::vector<CopyMode> runnable = {CopyMode::kAuto, CopyMode::kMemcpy};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") != 0) runnable.push_back(CopyMode::kNt256);
    if (__builtin_cpu_supports("avx512f") != 0) runnable.push_back(CopyMode::kNt512);
    runnable.push_back(CopyMode::kMovsb);
#endif
    return runnable;
  }();
  return modes;
}

std::optional<CopyMode> find_copy_mode(std::string_view name) {
  for (const CopyMode mode : copy_modes()) {
    if (copy_mode_name(mode) == name) return mode;
  }
  return std::nullopt;
}

CopyMode choose_copy_mode(std::size_t run_bytes, std::size_t total_bytes) {
  constexpr std::size_t kNonTemporalRunBytes = 1024;
  static const std::size_t non_temporal_total_bytes = last_level_cache_bytes() / 2;
  if (run_bytes < kNonTemporalRunBytes || total_bytes < non_temporal_total_bytes) {
    return CopyMode::kMemcpy;
  }
  return find_copy_mode("nt256").value_or(CopyMode::kMemcpy);
}

CopyRun copy_run(CopyMode mode) {
#if defined(__x86_64__)
  if (mode == CopyMode::kNt256) return copy_nt256;
  if (mode == CopyMode::kNt512) return copy_nt512;
  if (mode == CopyMode::kMovsb) return copy_movsb;
#endif
  static_cast<void>(mode);
  return copy_memcpy;
}

void copy_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_pieces(ThreadPool& pool, std::span<const std::uint64_t> targets,
                 std::span<const std::uint64_t> sources, std::span<const std::uint64_t> lengths,
                 CopyMode mode) {
  if (targets.size() != lengths.size() || sources.size() != lengths.size()) {
    throw std::invalid_argument(std::to_string(targets.size()) + " targets, " +
                                std::to_string(sources.size()) + " sources and " +
                                std::to_string(lengths.size()) + " lengths, must be as many");
  }
  std::size_t total_bytes = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::uint64_t last_start = std::numeric_limits<std::uint64_t>::max() - lengths[i];
    if (lengths[i] > 0 && (targets[i] == 0 || sources[i] == 0)) {
      throw std::invalid_argument("piece " + std::to_string(i) + " has address 0");
    }
    if (targets[i] > last_start || sources[i] > last_start) {
      throw std::invalid_argument("piece " + std::to_string(i) + " of " +
                                  std::to_string(lengths[i]) + " bytes ends beyond all addresses");
    }
    total_bytes += lengths[i];
  }
  if (total_bytes == 0) return;

  // A unit is a stretch of the pieces laid end to end. Slices start on a unit's border or a
  // piece's.
  constexpr std::size_t kUnitBytes = std::size_t{1} << 20;  // some 100 us: far above a wake-up
  struct Place {
    std::size_t piece;
    std::size_t offset;
  };
  std::vector<Place> unit_starts;
  std::size_t room = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    for (std::size_t offset = 0; offset < lengths[i];) {
      if (room == 0) {
        unit_starts.push_back({i, offset});
        room = kUnitBytes;
      }
      const std::size_t bytes = std::min<std::size_t>(room, lengths[i] - offset);
      room -= bytes;
      offset += bytes;
    }
  }
  if (mode == CopyMode::kAuto) mode = choose_copy_mode(total_bytes / lengths.size(), total_bytes);
  const CopyRun run = copy_run(mode);
  pool.run(unit_starts.size(), [&](WorkUnits& units) {
    for (std::size_t unit = 0; units.take(unit);) {
      auto [piece, offset] = unit_starts[unit];
      for (std::size_t left = kUnitBytes; left > 0 && piece < lengths.size(); ++piece, offset = 0) {
        const std::size_t bytes = std::min<std::size_t>(left, lengths[piece] - offset);
        if (bytes == 0) continue;
        // The caller's addresses become memory here and nowhere else.
        run(reinterpret_cast<std::byte*>(targets[piece] + offset),
            reinterpret_cast<const std::byte*>(sources[piece] + offset), bytes);
        left -= bytes;
      }
    }
    copy_fence();
  });
}

}  // namespace kvtier
