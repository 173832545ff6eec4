// One large run of huge-page memory that records live in, cut into 4 KiB multiples.
//
// The memory tier and staging stand on it: huge pages faulted in once are worth more to O_DIRECT
// and to copies than any choice of I/O interface.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

namespace kvtier {

/// Memory, 2 MiB-aligned, on huge pages where the system grants them. Not part of core dumps: it
/// holds what users said.
class Mapping {
 public:
  /// Anonymous private memory. Not inherited by forked children: a page that a disk is writing to
  /// must not become copy-on-write under it.
  ///
  /// @throws MappingFailed the system refuses that much memory
  explicit Mapping(std::uint64_t capacity_bytes);

  /// The first `size_bytes` of a file that other processes map too; `fd` may be closed afterwards.
  /// The caller has made sure that the file has them and never becomes shorter: reading past its
  /// end would end the process.
  ///
  /// @throws MappingFailed the system refuses
  Mapping(int fd, std::uint64_t size_bytes, bool is_writable);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* address() const { return address_; }
  std::uint64_t size_bytes() const { return size_bytes_; }
  bool is_writable() const { return is_writable_; }
  bool is_shared() const { return is_shared_; }

 private:
  std::byte* address_ = nullptr;
  std::uint64_t size_bytes_ = 0;
  bool is_writable_ = true;
  bool is_shared_ = false;
};

/// The system has no such memory; says how much was asked for and what it answered.
class MappingFailed : public std::bad_alloc {
 public:
  explicit MappingFailed(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// Hands out pieces of one `Mapping`, best fit, joined again when freed. Any thread.
///
/// Best fit, because records of a few sizes come and go for days: the smallest run that is large
/// enough keeps the large ones whole. O(log n) in the number of free runs.
class Slab {
 public:
  static constexpr std::uint64_t kAlignBytes = 4096;

  /// Map `capacity_bytes`, rounded up to a page. With `prefault` a thread of the slab's own makes
  /// the memory real from the low end up, where pieces are handed out first, and after that joins
  /// the small pages of shared memory into huge ones.
  ///
  /// @throws std::invalid_argument the capacity is zero or absurd
  /// @throws MappingFailed the system refuses
  Slab(std::uint64_t capacity_bytes, bool prefault);

  /// The same over memory that is there already, all of it, which is a multiple of 4 KiB.
  ///
  /// @throws std::invalid_argument it is not, or it is absurdly large
  Slab(std::shared_ptr<const Mapping> mapping, bool prefault);
  ~Slab();
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  /// Offset of a run of `nbytes`, rounded up to 4 KiB; nothing when no free run is that long.
  std::optional<std::uint64_t> allocate(std::uint64_t nbytes);

  /// Give back what `allocate` returned.
  ///
  /// @throws std::invalid_argument nothing is allocated at `offset`; nothing changes
  void free(std::uint64_t offset);

  /// The memory itself, to be held by whoever looks at it; checks that the piece lies inside.
  std::shared_ptr<const Mapping> hold(std::uint64_t offset, std::uint64_t nbytes) const;

  /// Stop the prefault thread and let go of the memory, which stays while somebody holds it.
  void close();

  std::uint64_t address() const;
  std::uint64_t capacity_bytes() const { return capacity_bytes_; }
  std::uint64_t used_bytes() const;
  std::uint64_t largest_free_bytes() const;
  std::uint64_t prefaulted_bytes() const { return prefaulted_bytes_.load(); }
  std::uint64_t joined_bytes() const { return joined_bytes_.load(); }

 private:
  void start(bool prefault);
  void insert_free(std::uint64_t offset, std::uint64_t nbytes);
  void erase_free(std::map<std::uint64_t, std::uint64_t>::iterator run);
  void prefault(const std::stop_token& stop, const Mapping& mapping);
  void join_pages(const std::stop_token& stop, const Mapping& mapping);

  const std::uint64_t capacity_bytes_;
  std::atomic<std::uint64_t> prefaulted_bytes_ = 0;
  std::atomic<std::uint64_t> joined_bytes_ = 0;
  mutable std::mutex mutex_;  // guards everything below but the thread
  std::shared_ptr<const Mapping> mapping_;
  std::map<std::uint64_t, std::uint64_t> free_by_offset_;            // offset -> bytes
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;   // (bytes, offset)
  std::unordered_map<std::uint64_t, std::uint64_t> used_by_offset_;  // offset -> bytes
  std::uint64_t used_bytes_ = 0;
  std::jthread prefault_thread_;  // last: it stops before what it works on goes away
};

}  // namespace kvtier
