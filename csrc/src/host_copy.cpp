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

using RunCopy = void(std::byte* target, const std::byte* source, std::size_t bytes);

void copy_memcpy(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}

template <RunCopy* kCopy>
void copy_lanes_in_turn(std::byte* const* targets, const std::byte* const* sources,
                        std::size_t bytes) {
  for (std::size_t lane = 0; lane < kCopyLanes; ++lane) kCopy(targets[lane], sources[lane], bytes);
}

#if defined(__x86_64__)

void copy_movsb(std::byte* target, const std::byte* source, std::size_t bytes) {
  asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(bytes) : : "memory");
}

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kLaneStepBytes =
    2 * kLineBytes;                           // lines of a lane at a turn: 1 is 5 % slower
constexpr std::size_t kPrefetchBytes = 1024;  // ahead in one stream: 5 % faster than none

// The next four move whole lines: `target` is aligned to a line, `bytes` is a multiple of one (of a
// lane's step in the lanes). Nothing is prefetched in the lanes, which have enough under way.

__attribute__((target("avx2"))) inline void stream_line_256(std::byte* target,
                                                            const std::byte* source) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), high);
}

__attribute__((target("avx2"))) void stream_one_256(std::byte* target, const std::byte* source,
                                                    std::size_t bytes) {
  std::size_t i = 0;
  for (; i + kPrefetchBytes < bytes; i += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i + kPrefetchBytes), _MM_HINT_NTA);
    stream_line_256(target + i, source + i);
  }
  for (; i < bytes; i += kLineBytes) stream_line_256(target + i, source + i);
}

__attribute__((target("avx2"))) void stream_lanes_256(std::byte* const* targets,
                                                      const std::byte* const* sources,
                                                      std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLaneStepBytes) {
#pragma GCC unroll 4
    for (std::size_t lane = 0; lane < kCopyLanes; ++lane) {
      stream_line_256(targets[lane] + i, sources[lane] + i);
      stream_line_256(targets[lane] + i + kLineBytes, sources[lane] + i + kLineBytes);
    }
  }
}

__attribute__((target("avx512f"))) inline void stream_line_512(std::byte* target,
                                                               const std::byte* source) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
}

__attribute__((target("avx512f"))) void stream_one_512(std::byte* target, const std::byte* source,
                                                       std::size_t bytes) {
  std::size_t i = 0;
  for (; i + kPrefetchBytes < bytes; i += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i + kPrefetchBytes), _MM_HINT_NTA);
    stream_line_512(target + i, source + i);
  }
  for (; i < bytes; i += kLineBytes) stream_line_512(target + i, source + i);
}

__attribute__((target("avx512f"))) void stream_lanes_512(std::byte* const* targets,
                                                         const std::byte* const* sources,
                                                         std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kLaneStepBytes) {
#pragma GCC unroll 4
    for (std::size_t lane = 0; lane < kCopyLanes; ++lane) {
      stream_line_512(targets[lane] + i, sources[lane] + i);
      stream_line_512(targets[lane] + i + kLineBytes, sources[lane] + i + kLineBytes);
    }
  }
}

/// Bytes up to the next line. Only whole lines are streamed: of a part of one, the memory would
/// have to read the rest back.
std::size_t head_bytes(const std::byte* target, std::size_t bytes) {
  return std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(target) % kLineBytes, bytes);
}

template <RunCopy* kStream>
void copy_non_temporal(std::byte* target, const std::byte* source, std::size_t bytes) {
  const std::size_t head = head_bytes(target, bytes);
  if (head > 0) std::memcpy(target, source, head);
  const std::size_t body = (bytes - head) / kLineBytes * kLineBytes;
  kStream(target + head, source + head, body);
  const std::size_t done = head + body;
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

template <auto* kStreamLanes, RunCopy* kStream>
void copy_lanes_non_temporal(std::byte* const* targets, const std::byte* const* sources,
                             std::size_t bytes) {
  std::array<std::byte*, kCopyLanes> lane_targets;
  std::array<const std::byte*, kCopyLanes> lane_sources;
  std::array<std::size_t, kCopyLanes> heads;
  for (std::size_t lane = 0; lane < kCopyLanes; ++lane) {
    heads[lane] = head_bytes(targets[lane], bytes);
    if (heads[lane] > 0) std::memcpy(targets[lane], sources[lane], heads[lane]);
    lane_targets[lane] = targets[lane] + heads[lane];
    lane_sources[lane] = sources[lane] + heads[lane];
  }
  const std::size_t head_max = *std::max_element(heads.begin(), heads.end());
  const std::size_t body = (bytes - head_max) / kLaneStepBytes * kLaneStepBytes;
  kStreamLanes(lane_targets.data(), lane_sources.data(), body);
  for (std::size_t lane = 0; lane < kCopyLanes; ++lane) {
    const std::size_t left = bytes - heads[lane] - body;
    if (left == 0) continue;
    copy_non_temporal<kStream>(lane_targets[lane] + body, lane_sources[lane] + body, left);
  }
}

#endif

constexpr std::array kModeNames = {std::string_view("auto"), std::string_view("memcpy"),
                                   std::string_view("nt256"), std::string_view("nt512"),
                                   std::string_view("movsb")};

std::size_t last_level_cache_bytes() {
  // A usual server's share of one core complex, and a cap: in virtual machines on AMD the C library
  // answers ten times as much, which would keep whole batches from being streamed.
  constexpr std::size_t kShareBytesMax = std::size_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return std::min(static_cast<std::size_t>(bytes), kShareBytesMax);
#endif
  return kShareBytesMax;
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
  // Below, sources and targets may still lie in the cache, where memcpy finds and leaves them.
  static const std::size_t total_bytes_min = last_level_cache_bytes() / 4;
  // Runs of whole lines are worth streaming at any length; in others two lines are shared with the
  // neighbours, which must not be the greater part.
  constexpr std::size_t kRaggedRunBytesMin = 512;
  const bool streams = run_bytes % 64 == 0 || run_bytes >= kRaggedRunBytesMin;
  if (!streams || total_bytes < total_bytes_min) return CopyMode::kMemcpy;
  return find_copy_mode("nt256").value_or(CopyMode::kMemcpy);
}

CopyKernel copy_kernel(CopyMode mode) {
#if defined(__x86_64__)
  if (mode == CopyMode::kNt256) {
    return {copy_non_temporal<stream_one_256>,
            copy_lanes_non_temporal<stream_lanes_256, stream_one_256>};
  }
  if (mode == CopyMode::kNt512) {
    return {copy_non_temporal<stream_one_512>,
            copy_lanes_non_temporal<stream_lanes_512, stream_one_512>};
  }
  if (mode == CopyMode::kMovsb) return {copy_movsb, copy_lanes_in_turn<copy_movsb>};
#endif
  static_cast<void>(mode);
  return {copy_memcpy, copy_lanes_in_turn<copy_memcpy>};
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
  const CopyKernel kernel = copy_kernel(mode);
  pool.run(unit_starts.size(), [&](WorkUnits& units) {
    for (std::size_t unit = 0; units.take(unit);) {
      auto [piece, offset] = unit_starts[unit];
      for (std::size_t left = kUnitBytes; left > 0 && piece < lengths.size(); ++piece, offset = 0) {
        const std::size_t bytes = std::min<std::size_t>(left, lengths[piece] - offset);
        if (bytes == 0) continue;
        // The caller's addresses become memory here and nowhere else.
        kernel.one(reinterpret_cast<std::byte*>(targets[piece] + offset),
                   reinterpret_cast<const std::byte*>(sources[piece] + offset), bytes);
        left -= bytes;
      }
    }
    copy_fence();
  });
}

}  // namespace kvtier
