#include "kvtier/slab.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace kvtier {
namespace {

constexpr std::uint64_t kHugePageBytes = 2 << 20;
constexpr std::uint64_t kPageBytes = Slab::kAlignBytes;
// Between two looks at the stop flag: at the 0.15 GB/s of memory the host has to find first, 50 ms.
constexpr std::uint64_t kPrefaultStepBytes = 4 * kHugePageBytes;
constexpr std::uint64_t kCapacityBytesMax = std::uint64_t{1} << 46;  // a process's address space

// Linux 5.14; older C libraries do not name them.
#ifndef MADV_POPULATE_WRITE
constexpr int kMadvPopulateRead = 22;
constexpr int kMadvPopulateWrite = 23;
#else
constexpr int kMadvPopulateRead = MADV_POPULATE_READ;
constexpr int kMadvPopulateWrite = MADV_POPULATE_WRITE;
#endif
constexpr int kMadvCollapse = 25;  // Linux 6.1

constexpr std::uint64_t round_up(std::uint64_t nbytes, std::uint64_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

std::uint64_t checked_capacity(std::uint64_t capacity_bytes) {
  if (capacity_bytes == 0 || capacity_bytes > kCapacityBytesMax) {
    throw std::invalid_argument("slab of " + std::to_string(capacity_bytes) +
                                " bytes, between 1 and " + std::to_string(kCapacityBytesMax));
  }
  return round_up(capacity_bytes, kPageBytes);
}

/// Make each page real without changing a byte: the slab is in use by then.
void touch(std::byte* address, std::uint64_t nbytes, bool is_writable) {
  for (std::uint64_t at = 0; at < nbytes; at += kPageBytes) {
    auto& byte = reinterpret_cast<unsigned char&>(address[at]);
    const std::atomic_ref<unsigned char> whole(byte);
    if (is_writable) {
      whole.fetch_or(0, std::memory_order_relaxed);
    } else {
      static_cast<void>(whole.load(std::memory_order_relaxed));
    }
  }
}

/// Address space on a huge page's border, kept free for a mapping of `nbytes`.
std::byte* reserve(std::uint64_t nbytes) {
  // The kernel aligns to 4 KiB only: ask for one huge page more and give back both ends.
  const std::uint64_t room = round_up(nbytes, kHugePageBytes);
  const std::uint64_t asked = room + kHugePageBytes;
  void* raw = mmap(nullptr, asked, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw MappingFailed("cannot map " + std::to_string(nbytes) +
                        " bytes of memory: " + std::strerror(errno));
  }
  auto* const first = static_cast<std::byte*>(raw);
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uint64_t before = round_up(start, kHugePageBytes) - start;
  const std::uint64_t after = asked - before - room;
  if (before > 0) munmap(first, before);
  if (after > 0) munmap(first + before + room, after);
  return first + before;
}

/// Map over what `reserve` gave.
///
/// @throws MappingFailed and gives the address space back
void map_over(std::byte* address, std::uint64_t nbytes, int protection, int flags, int fd) {
  const std::uint64_t room = round_up(nbytes, kHugePageBytes);
  if (mmap(address, nbytes, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(address, room);
    throw MappingFailed("cannot map " + std::to_string(nbytes) +
                        " bytes of memory: " + std::strerror(error));
  }
  // Advice: a kernel that has no huge pages, or lacks one of these, still gives working memory.
  madvise(address, nbytes, MADV_HUGEPAGE);
  madvise(address, nbytes, MADV_DONTDUMP);
}

}  // namespace

Mapping::Mapping(std::uint64_t capacity_bytes)
    : size_bytes_(round_up(capacity_bytes, kHugePageBytes)) {
  address_ = reserve(size_bytes_);
  map_over(address_, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  madvise(address_, size_bytes_, MADV_DONTFORK);
}

Mapping::Mapping(int fd, std::uint64_t size_bytes, bool is_writable)
    : size_bytes_(size_bytes), is_writable_(is_writable), is_shared_(true) {
  address_ = reserve(size_bytes_);
  map_over(address_, size_bytes_, PROT_READ | (is_writable ? PROT_WRITE : 0), MAP_SHARED, fd);
}

// The address space up to the next huge page's border was reserved too.
Mapping::~Mapping() { munmap(address_, round_up(size_bytes_, kHugePageBytes)); }

Slab::Slab(std::uint64_t capacity_bytes, bool prefault)
    : capacity_bytes_(checked_capacity(capacity_bytes)),
      mapping_(std::make_shared<const Mapping>(capacity_bytes_)) {
  start(prefault);
}

Slab::Slab(std::shared_ptr<const Mapping> mapping, bool prefault)
    : capacity_bytes_(checked_capacity(mapping->size_bytes())), mapping_(std::move(mapping)) {
  if (capacity_bytes_ != mapping_->size_bytes()) {
    throw std::invalid_argument("slab over " + std::to_string(mapping_->size_bytes()) +
                                " bytes, must be a multiple of " + std::to_string(kAlignBytes));
  }
  start(prefault);
}

void Slab::start(bool prefault) {
  insert_free(0, capacity_bytes_);
  if (prefault) {
    prefault_thread_ = std::jthread([this, mapping = mapping_](const std::stop_token& stop) {
      this->prefault(stop, *mapping);
      // One process is enough: the others' mappings follow.
      if (mapping->is_shared() && mapping->is_writable()) this->join_pages(stop, *mapping);
    });
  }
}

Slab::~Slab() { close(); }

std::optional<std::uint64_t> Slab::allocate(std::uint64_t nbytes) {
  if (nbytes == 0) throw std::invalid_argument("0 bytes asked of a slab, at least 1");
  const std::lock_guard lock(mutex_);
  if (!mapping_) throw std::invalid_argument("the slab is closed");
  if (nbytes > capacity_bytes_) return std::nullopt;
  const std::uint64_t needed = round_up(nbytes, kAlignBytes);
  const auto best = free_by_size_.lower_bound({needed, 0});
  if (best == free_by_size_.end()) return std::nullopt;
  const auto [found, offset] = *best;
  used_by_offset_.emplace(offset, needed);  // first what may throw, so that a failure loses no run
  erase_free(free_by_offset_.find(offset));
  if (found > needed) insert_free(offset + needed, found - needed);
  used_bytes_ += needed;
  return offset;
}

void Slab::free(std::uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto used = used_by_offset_.find(offset);
  if (used == used_by_offset_.end()) {
    throw std::invalid_argument("nothing is allocated at offset " + std::to_string(offset));
  }
  std::uint64_t start = offset;
  std::uint64_t nbytes = used->second;
  used_bytes_ -= nbytes;
  used_by_offset_.erase(used);
  const auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      nbytes += previous->second;
      erase_free(previous);
    }
  }
  if (next != free_by_offset_.end() && next->first == start + nbytes) {
    nbytes += next->second;
    erase_free(next);
  }
  insert_free(start, nbytes);
}

std::shared_ptr<const Mapping> Slab::hold(std::uint64_t offset, std::uint64_t nbytes) const {
  if (offset > capacity_bytes_ || nbytes > capacity_bytes_ - offset) {
    throw std::invalid_argument(std::to_string(nbytes) + " bytes at offset " +
                                std::to_string(offset) + " of a slab of " +
                                std::to_string(capacity_bytes_) + " bytes");
  }
  const std::lock_guard lock(mutex_);
  if (!mapping_) throw std::invalid_argument("the slab is closed");
  return mapping_;
}

void Slab::close() {
  std::jthread thread;
  {
    const std::lock_guard lock(mutex_);
    thread.swap(prefault_thread_);  // so that of two closing at once only one joins
  }
  if (thread.joinable()) {
    thread.request_stop();
    thread.join();
  }
  std::shared_ptr<const Mapping> last;  // unmapped after the lock: that takes a while
  const std::lock_guard lock(mutex_);
  last.swap(mapping_);
}

std::uint64_t Slab::address() const {
  const std::lock_guard lock(mutex_);
  return mapping_ ? reinterpret_cast<std::uintptr_t>(mapping_->address()) : 0;
}

std::uint64_t Slab::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::uint64_t Slab::largest_free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void Slab::insert_free(std::uint64_t offset, std::uint64_t nbytes) {
  free_by_offset_.emplace(offset, nbytes);
  free_by_size_.emplace(nbytes, offset);
}

void Slab::erase_free(std::map<std::uint64_t, std::uint64_t>::iterator run) {
  free_by_size_.erase({run->second, run->first});
  free_by_offset_.erase(run);
}

void Slab::prefault(const std::stop_token& stop, const Mapping& mapping) {
  const int advice = mapping.is_writable() ? kMadvPopulateWrite : kMadvPopulateRead;
  bool has_populate = true;
  for (std::uint64_t at = 0; at < capacity_bytes_ && !stop.stop_requested();) {
    const std::uint64_t step = std::min(kPrefaultStepBytes, capacity_bytes_ - at);
    std::byte* const address = mapping.address() + at;
    if (has_populate && madvise(address, step, advice) != 0) {
      // Interrupted: again. Unknown to this kernel: by hand. Out of memory: stop here, the rest
      // comes in on use or fails there.
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno != EINVAL) return;
      has_populate = false;
    }
    if (!has_populate) touch(address, step, mapping.is_writable());
    at += step;
    prefaulted_bytes_.store(at);
  }
}

void Slab::join_pages(const std::stop_token& stop, const Mapping& mapping) {
  // Shared memory is given huge pages from the start only where the system's owner says so, which
  // few do; asked for them afterwards, the kernel copies what is there. A step that it refuses, as
  // when a device holds a page, stays as it is.
  for (std::uint64_t at = 0; at < capacity_bytes_ && !stop.stop_requested();) {
    const std::uint64_t step = std::min(kPrefaultStepBytes, capacity_bytes_ - at);
    if (madvise(mapping.address() + at, step, kMadvCollapse) != 0 && errno == EINVAL) return;
    at += step;
    joined_bytes_.store(at);
  }
}

}  // namespace kvtier
