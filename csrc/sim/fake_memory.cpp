// The stand-in's memory. Device memory is heap memory of exactly the size asked for, poisoned when
// it is given and when it is taken back; a write beyond it or after it is a mistake, at once with
// AddressSanitizer, else when the memory is freed or next looked at.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fake_state.hpp"

namespace fake {
namespace {

constexpr unsigned char kFresh = 0xCD;
constexpr unsigned char kGone = 0xDD;
constexpr unsigned char kGuard = 0xFD;
constexpr std::size_t kDeviceAlign = 256;  // as the real one's least
constexpr std::size_t kHostAlign = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kGuardBytes = 0;  // it has its own
#else
constexpr std::size_t kGuardBytes = 4096;  // before and after
#endif
constexpr std::size_t kQuarantineBytes = 16 << 20;  // of freed memory, before the first goes back

bool is_filled(std::uintptr_t address, std::size_t nbytes, unsigned char value) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(address);
  return nbytes == 0 || (*bytes == value && std::memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

/// Poisoned, between guards; its block is null where the heap has no more.
Memory make(Kind kind, std::size_t nbytes, int device, std::size_t align) {
  Memory memory{.kind = kind, .nbytes = nbytes, .device = device};
  if (posix_memalign(&memory.block, align, nbytes + 2 * kGuardBytes) != 0) memory.block = nullptr;
  if (memory.block == nullptr) return memory;
  std::memset(memory.block, kGuard, nbytes + 2 * kGuardBytes);
  memory.device_start = reinterpret_cast<std::uintptr_t>(memory.block) + kGuardBytes;
  std::memset(reinterpret_cast<void*>(memory.device_start), kFresh, nbytes);
  return memory;
}

/// Free it, later: what uses it may not be over, and nobody may write to it meanwhile.
void free_block(const Memory& memory, bool is_used) {
  if (!is_filled(memory.device_start - kGuardBytes, kGuardBytes, kGuard) ||
      !is_filled(memory.device_start + memory.nbytes, kGuardBytes, kGuard)) {
    mistake("a write before or beyond an allocation");
  }
  if (!is_used) std::memset(reinterpret_cast<void*>(memory.device_start), kGone, memory.nbytes);
  if (!is_used && kGuardBytes == 0) {  // the sanitizer keeps it
    std::free(memory.block);
    return;
  }
  state().freed[memory.device_start] = memory.nbytes;
  state().quarantine.push_back({memory, !is_used});
}

bool is_any_busy() {
  const auto is_busy = [](const auto& entry) { return !entry.second->is_idle(); };
  return std::any_of(state().streams.begin(), state().streams.end(), is_busy) ||
         std::any_of(state().default_streams.begin(), state().default_streams.end(), is_busy);
}

/// Say once that it was written to.
void check_freed(Freed& freed) {
  const Memory& memory = freed.memory;
  if (!freed.is_poisoned || is_filled(memory.device_start, memory.nbytes, kGone)) return;
  mistake("a write to memory after it was freed");
  freed.is_poisoned = false;
}

std::size_t bytes_of(Kind kind, int device) {
  std::size_t sum = 0;
  for (const auto& [start, memory] : state().memory) {
    const bool is_alias = memory.is_host() && start != memory.host_start;
    if (memory.kind == kind && !is_alias && (device == kNoDevice || memory.device == device)) {
      sum += memory.nbytes;
    }
  }
  return sum;
}

std::size_t pinned_bytes() {
  return bytes_of(Kind::kPinned, kNoDevice) + bytes_of(Kind::kRegistered, kNoDevice);
}

void add(const Memory& memory) {
  const std::uintptr_t start = memory.is_host() ? memory.host_start : memory.device_start;
  take_place({start, memory.nbytes});
  state().memory[start] = memory;
  if (memory.is_host() && memory.device_start != 0 && memory.device_start != start) {
    state().memory[memory.device_start] = memory;
  }
}

void remove(const Memory& memory) {
  state().memory.erase(memory.device_start);
  if (memory.is_host()) state().memory.erase(memory.host_start);
}

/// The same bytes at another address, where `host_start` would be for devices; 0 if it cannot be.
///
/// The pages take the place of those that were there, with their contents.
std::uintptr_t make_alias(std::uintptr_t host_start, std::size_t nbytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t base = host_start & ~(page - 1);
  const std::size_t extent = (host_start + nbytes - base + page - 1) & ~(page - 1);
  void* const pages = reinterpret_cast<void*>(base);
  // Shared pages have a second address for the asking; private ones become shared first.
  void* alias = mremap(pages, 0, extent, MREMAP_MAYMOVE);
  if (alias == MAP_FAILED) {
    const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    const bool is_kept =
        file >= 0 && pwrite(file, pages, extent, 0) == static_cast<ssize_t>(extent);
    constexpr int kAccess = PROT_READ | PROT_WRITE;
    if (is_kept && mmap(pages, extent, kAccess, MAP_SHARED | MAP_FIXED, file, 0) == pages) {
      alias = mmap(nullptr, extent, kAccess, MAP_SHARED, file, 0);
    }
    if (file >= 0) close(file);
  }
  return alias == MAP_FAILED ? 0 : reinterpret_cast<std::uintptr_t>(alias) + (host_start - base);
}

/// What a kernel still does there is lost, and harms nobody.
void end_alias(const Memory& memory) {
  if (memory.kind != Kind::kRegistered || memory.device_start == 0 ||
      memory.device_start == memory.host_start) {
    return;
  }
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t base = memory.device_start & ~(page - 1);
  const std::size_t extent = memory.device_start + memory.nbytes - base;
  mmap(reinterpret_cast<void*>(base), extent, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/// The live memory that begins there.
const Memory* find_start(std::uintptr_t address, Kind kind) {
  std::uintptr_t start = 0;
  const Memory* const found = find_memory(address, &start);
  return found != nullptr && start == address && found->kind == kind ? found : nullptr;
}

}  // namespace

const Memory* find_memory(std::uintptr_t address, std::uintptr_t* start) {
  auto found = state().memory.upper_bound(address);
  if (found == state().memory.begin()) return nullptr;
  --found;
  if (address - found->first >= found->second.nbytes) return nullptr;
  if (start != nullptr) *start = found->first;
  return &found->second;
}

bool overlaps_memory(const Range& range) {
  const auto next = state().memory.lower_bound(range.start);
  return find_memory(range.start) != nullptr ||
         (next != state().memory.end() && next->first < range.end());
}

bool is_in_use(const Range& range) {
  return std::any_of(state().uses.begin(), state().uses.end(),
                     [&](const auto& use) { return use.second.overlaps(range); });
}

void take_place(const Range& range) {
  std::erase_if(state().memory, [&](const auto& entry) {
    const bool is_said = entry.second.kind == Kind::kOwned || entry.second.kind == Kind::kManaged;
    return is_said && range.overlaps({entry.first, entry.second.nbytes});
  });
  std::erase_if(state().freed,
                [&](const auto& entry) { return range.overlaps({entry.first, entry.second}); });
}

void sweep() {
  if (is_any_busy()) return;
  std::size_t sum = 0;
  for (const Freed& freed : state().quarantine) sum += freed.memory.nbytes;
  while (sum > kQuarantineBytes) {
    Freed& first = state().quarantine.front();
    check_freed(first);
    sum -= first.memory.nbytes;
    state().freed.erase(first.memory.device_start);
    std::free(first.memory.block);
    state().quarantine.pop_front();
  }
}

void check_quarantine() {
  for (Freed& freed : state().quarantine) check_freed(freed);
}

int drop_memory(int device, bool is_leak) {
  std::vector<Memory> left;
  for (const auto& [start, memory] : state().memory) {
    const bool is_said = memory.kind == Kind::kOwned || memory.kind == Kind::kManaged;
    const bool is_alias = memory.is_host() && start != memory.host_start;
    if (memory.device == device && !is_said && !is_alias) left.push_back(memory);
  }
  for (const Memory& memory : left) {
    remove(memory);
    end_alias(memory);
    if (memory.block != nullptr) free_block(memory, false);
    if (!is_leak) continue;
    const char* const what = memory.kind == Kind::kDevice   ? " B of device memory"
                             : memory.kind == Kind::kPinned ? " B of pinned memory"
                                                            : " B of registered memory";
    mistake("context released with " + std::to_string(memory.nbytes) + what);
  }
  return static_cast<int>(left.size());
}

int device_at(std::uintptr_t address) {
  const std::lock_guard lock(state().mutex);
  const Memory* const found = find_memory(address);
  return found == nullptr || found->is_host() ? kNoDevice : found->device;
}

}  // namespace fake

using namespace fake;

extern "C" {

int cuMemAlloc_v2(std::uint64_t* address, std::size_t nbytes) {
  const Begun begun = begin(kMemoryAllocate);
  if (begun.code != 0) return begun.code;
  if (nbytes == 0) return api::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  sweep();
  const auto most = static_cast<std::size_t>(state().settings[kSetMemoryBytes]);
  const std::size_t used = bytes_of(Kind::kDevice, begun.device);
  if (used > most || nbytes > most - used) return api::kOutOfMemory;
  const Memory memory = make(Kind::kDevice, nbytes, begun.device, kDeviceAlign);
  if (memory.block == nullptr) return api::kOutOfMemory;
  add(memory);
  *address = memory.device_start;
  return 0;
}

int cuMemFree_v2(std::uint64_t address) {
  const Begun begun = begin(kMemoryFree);
  if (begun.code != 0) return begun.code;
  if (address == 0) return 0;
  const std::lock_guard lock(state().mutex);
  const Memory* const found = find_start(address, Kind::kDevice);
  if (found == nullptr) {
    mistake(state().freed.contains(address) ? "cuMemFree of memory that was freed already"
                                            : "cuMemFree of what is no allocation");
    return api::kInvalidValue;
  }
  if (found->device != begun.device) mistake("cuMemFree in another context");
  const Memory memory = *found;
  const bool is_used = is_in_use({memory.device_start, memory.nbytes});
  if (is_used) mistake("cuMemFree of memory that enqueued work uses");
  remove(memory);
  free_block(memory, is_used);
  sweep();
  return 0;
}

int cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  const Begun begun = begin(kMemoryGetInfo);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  *total_bytes = static_cast<std::size_t>(state().settings[kSetMemoryBytes]);
  *free_bytes = *total_bytes - std::min(*total_bytes, bytes_of(Kind::kDevice, begun.device));
  return 0;
}

int cuMemGetAddressRange_v2(std::uint64_t* base, std::size_t* nbytes, std::uint64_t address) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  std::uintptr_t start = 0;
  const Memory* const found = find_memory(address, &start);
  if (found == nullptr || found->is_host()) return api::kNotFound;
  if (base != nullptr) *base = start;
  if (nbytes != nullptr) *nbytes = found->nbytes;
  return 0;
}

int cuMemHostAlloc(void** address, std::size_t nbytes, unsigned flags) {
  const Begun begun = begin(kHostAllocate);
  if (begun.code != 0) return begun.code;
  if (nbytes == 0) return api::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  sweep();
  const auto most = static_cast<std::size_t>(state().settings[kSetPinnedBytes]);
  if (pinned_bytes() > most || nbytes > most - pinned_bytes()) return api::kOutOfMemory;
  Memory memory = make(Kind::kPinned, nbytes, begun.device, kHostAlign);
  if (memory.block == nullptr) return api::kOutOfMemory;
  memory.host_start = memory.device_start;
  memory.is_mapped = (flags & api::kHostDeviceMap) != 0;
  add(memory);
  *address = reinterpret_cast<void*>(memory.host_start);
  return 0;
}

int cuMemFreeHost(void* address) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const Memory* const found = find_start(reinterpret_cast<std::uintptr_t>(address), Kind::kPinned);
  if (found == nullptr) {
    mistake("cuMemFreeHost of what is no pinned allocation");
    return api::kInvalidValue;
  }
  const Memory memory = *found;
  const bool is_used = is_in_use({memory.host_start, memory.nbytes});
  if (is_used) mistake("cuMemFreeHost of memory that enqueued work uses");
  remove(memory);
  free_block(memory, is_used);
  sweep();
  return 0;
}

int cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned flags) {
  const Begun begun = begin(kHostRegister);
  if (begun.code != 0) return begun.code;
  if (address == nullptr || nbytes == 0) return api::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  take_place({start, nbytes});
  if (overlaps_memory({start, nbytes})) return api::kHostMemoryAlreadyRegistered;
  const auto most = static_cast<std::size_t>(state().settings[kSetPinnedBytes]);
  if (pinned_bytes() > most || nbytes > most - pinned_bytes()) return api::kOutOfMemory;
  Memory memory{.kind = Kind::kRegistered,
                .nbytes = nbytes,
                .device = begun.device,
                .host_start = start,
                .device_start = start};
  memory.is_mapped = (flags & api::kHostDeviceMap) != 0;
  if (state().settings[kSetIsAliasing] != 0) {
    memory.device_start = make_alias(start, nbytes);
    if (memory.device_start == 0) return api::kInvalidValue;
  }
  add(memory);
  return 0;
}

int cuMemHostUnregister(void* address) {
  const Begun begun = begin(kHostUnregister);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  const Memory* const found = find_start(start, Kind::kRegistered);
  if (found == nullptr || found->host_start != start) {
    mistake("cuMemHostUnregister of what is not registered");
    return api::kHostMemoryNotRegistered;
  }
  const Memory memory = *found;
  if (is_in_use({memory.host_start, memory.nbytes}) ||
      is_in_use({memory.device_start, memory.nbytes})) {
    mistake("cuMemHostUnregister of memory that enqueued work uses");
  }
  remove(memory);
  end_alias(memory);
  return 0;
}

int cuMemHostGetDevicePointer_v2(std::uint64_t* device_address, void* address, unsigned flags) {
  const Begun begun = begin(kHostGetDevicePointer);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto host = reinterpret_cast<std::uintptr_t>(address);
  const Memory* const found = find_memory(host);
  if (flags != 0 || found == nullptr || !found->is_host() || !found->is_mapped ||
      host - found->host_start >= found->nbytes) {
    return api::kInvalidValue;
  }
  *device_address = found->device_start + (host - found->host_start);
  return 0;
}

int cuPointerGetAttribute(void* value, int attribute, std::uint64_t address) {
  const Begun begun = begin(kPointerGetAttribute);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  std::uintptr_t start = 0;
  const Memory* const found = find_memory(address, &start);
  if (found == nullptr) return api::kInvalidValue;
  const std::uintptr_t offset = address - start;
  const auto give = [value](const auto& what) { std::memcpy(value, &what, sizeof(what)); };
  switch (attribute) {
    case api::kPointerContext:
      give(context_of(found->device));
      return 0;
    case api::kPointerMemoryType:
      give(found->is_host() ? api::kMemoryTypeHost : api::kMemoryTypeDevice);
      return 0;
    case api::kPointerDevicePointer:
      give(std::uint64_t{found->device_start + offset});
      return 0;
    case api::kPointerHostPointer:
      if (!found->is_host()) return api::kInvalidValue;
      give(found->host_start + offset);
      return 0;
    case api::kPointerIsManaged:
      give(unsigned{found->kind == Kind::kManaged});
      return 0;
    case api::kPointerDeviceOrdinal:
      give(found->device);
      return 0;
    case api::kPointerRangeStart:
      give(std::uint64_t{start});
      return 0;
    case api::kPointerRangeBytes:
      give(found->nbytes);
      return 0;
    default:
      return api::kInvalidValue;
  }
}

/// Memory is a GPU's from now on.
void fake_own(std::uintptr_t address, std::size_t nbytes, int device) {
  const std::lock_guard lock(state().mutex);
  add({.kind = Kind::kOwned, .nbytes = nbytes, .device = device, .device_start = address});
}

/// Memory is managed by a GPU's driver from now on.
void fake_manage(std::uintptr_t address, std::size_t nbytes, int device) {
  const std::lock_guard lock(state().mutex);
  add({.kind = Kind::kManaged, .nbytes = nbytes, .device = device, .device_start = address});
}

/// What `fake_own` and `fake_manage` said is the host's again.
void fake_disown() {
  const std::lock_guard lock(state().mutex);
  std::erase_if(state().memory, [](const auto& entry) {
    return entry.second.kind == Kind::kOwned || entry.second.kind == Kind::kManaged;
  });
}
}
