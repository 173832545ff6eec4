// The stand-in's copies and fills, which a stream does when it comes to them.
#include <array>
#include <cstring>
#include <string_view>

#include "fake_state.hpp"

namespace fake {
namespace {

enum class Side { kDevice, kPinned, kPageable, kWrong };

/// What lies at the whole range. With the lock held.
Side side_of(const Range& range, int device) {
  std::uintptr_t start = 0;
  const Memory* const found = find_memory(range.start, &start);
  if (found == nullptr) {
    for (const auto& [freed_start, nbytes] : state().freed) {
      if (!range.overlaps({freed_start, nbytes})) continue;
      mistake("a copy of memory that was freed");
      return Side::kWrong;
    }
    return overlaps_memory(range) ? Side::kWrong : Side::kPageable;
  }
  if (range.end() > start + found->nbytes) return Side::kWrong;
  if (found->is_host()) return Side::kPinned;
  if (found->device != device) mistake("a copy of another device's memory");
  return Side::kDevice;
}

struct Copy {
  std::uintptr_t target;
  std::uintptr_t source;
  std::size_t nbytes;
  api::SourceOrder order = api::SourceOrder::kStream;
};

using Bytes = std::vector<unsigned char>;

int copy_now(const Copy& copy, const Bytes* early) {
  pass();
  if (const int code = fault_of(kCopyRun)) return code;
  const void* const source =
      early != nullptr ? early->data() : reinterpret_cast<const void*>(copy.source);
  std::memmove(reinterpret_cast<void*>(copy.target), source, copy.nbytes);
  return 0;
}

/// Enqueue it, unless it is wrong. A copy of pageable memory is over when this returns.
int add_copy(const Copy& copy, const std::shared_ptr<Stream>& stream,
             std::unique_lock<std::mutex>& lock) {
  if (copy.nbytes == 0) return 0;
  const Range target{copy.target, copy.nbytes};
  const Range source{copy.source, copy.nbytes};
  const Side to = side_of(target, stream->device());
  const Side from = side_of(source, stream->device());
  if (to == Side::kWrong || from == Side::kWrong) return api::kInvalidValue;
  const bool is_pageable = to == Side::kPageable || from == Side::kPageable;
  state().counters.pageable_copies += is_pageable ? 1 : 0;
  state().counters.copied_bytes += static_cast<std::int64_t>(copy.nbytes);
  // A source that may be read out of order is read too early, every second time.
  std::shared_ptr<Bytes> early;
  static std::minstd_rand chance(1);
  if (copy.order == api::SourceOrder::kDuringApiCall ||
      (copy.order == api::SourceOrder::kAny && (chance() >> 8) % 2 == 0)) {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(copy.source);
    early = std::make_shared<Bytes>(bytes, bytes + copy.nbytes);
    ++state().counters.early_reads;
  }
  Work work{.run = [copy, early] { return copy_now(copy, early.get()); }, .uses = {target}};
  if (!early) work.uses.push_back(source);
  if (is_pageable) work.moment = std::make_shared<Moment>();
  const auto moment = work.moment;
  stream->add(std::move(work));
  if (moment) state().changed.wait(lock, [&] { return moment->is_over; });
  return state().lost[stream->device()];
}

/// The attributes that hold for each copy; a code if they are not as they must be.
int spread(Copy* copies, std::size_t count, const api::CopyAttributes* attributes,
           const std::size_t* first_copies, std::size_t attribute_count) {
  if (attribute_count == 0 || attribute_count > count || first_copies[0] != 0) {
    return api::kInvalidValue;
  }
  for (std::size_t k = 0; k < attribute_count; ++k) {
    const std::size_t end = k + 1 < attribute_count ? first_copies[k + 1] : count;
    if (end <= first_copies[k] || end > count) return api::kInvalidValue;
    const int order = static_cast<int>(attributes[k].source_order);
    if (order < 1 || order > 3 || attributes[k].flags > api::kCopyPreferOverlapWithCompute) {
      return api::kInvalidValue;
    }
    for (std::size_t i = first_copies[k]; i < end; ++i) {
      copies[i].order = attributes[k].source_order;
    }
  }
  return 0;
}

int copy_batch(std::uint64_t* targets, std::uint64_t* sources, std::size_t* lengths,
               std::size_t count, api::CopyAttributes* attributes, std::size_t* first_copies,
               std::size_t attribute_count, std::size_t* failed_copy, void* stream) {
  const Begun begun = begin(kBatchCopy);
  if (begun.code != 0) return begun.code;
  if (count == 0 || reinterpret_cast<std::uintptr_t>(stream) <= 2) return api::kInvalidValue;
  std::vector<Copy> copies(count);
  for (std::size_t i = 0; i < count; ++i) copies[i] = {targets[i], sources[i], lengths[i]};
  if (const int code = spread(copies.data(), count, attributes, first_copies, attribute_count)) {
    return code;
  }
  std::unique_lock lock(state().mutex);
  const auto found = find_stream(stream, begun.device);
  if (!found) return kInvalidHandle;
  ++state().counters.batches;
  state().counters.batch_copies += static_cast<std::int64_t>(count);
  // In any order: the last comes first.
  for (std::size_t i = count; i-- > 0;) {
    if (const int code = add_copy(copies[i], found, lock)) {
      if (failed_copy != nullptr) *failed_copy = i;
      return code;
    }
  }
  return 0;
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

int cuMemcpyAsync(std::uint64_t target, std::uint64_t source, std::size_t nbytes, void* stream) {
  const Begun begun = begin(kCopy);
  if (begun.code != 0) return begun.code;
  std::unique_lock lock(state().mutex);
  const auto found = find_stream(stream, begun.device);
  if (!found) return kInvalidHandle;
  ++state().counters.copies;
  return add_copy({target, source, nbytes}, found, lock);
}

int cuMemsetD8Async(std::uint64_t target, unsigned char value, std::size_t nbytes, void* stream) {
  const Begun begun = begin(kFill);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto found = find_stream(stream, begun.device);
  if (!found) return kInvalidHandle;
  if (nbytes == 0) return 0;
  const Side side = side_of({target, nbytes}, begun.device);
  if (side == Side::kWrong || side == Side::kPageable) return api::kInvalidValue;
  ++state().counters.fills;
  const auto fill = [=] {
    pass();
    if (const int code = fault_of(kCopyRun)) return code;
    std::memset(reinterpret_cast<void*>(target), value, nbytes);
    return 0;
  };
  found->add({.run = fill, .uses = {{target, nbytes}}});
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags,
                        int* status) {
  const std::lock_guard lock(state().mutex);
  *function = nullptr;
  if (flags > 2 || version > state().settings[kSetDriverVersion]) return api::kInvalidValue;
  const bool is_known = std::string_view(name) == "cuMemcpyBatchAsync";
  if (status != nullptr) *status = is_known ? (version < 12080 ? 2 : 0) : 1;
  if (!is_known || version < 12080) return 0;
  if (version >= 13000) {
    mistake("cuMemcpyBatchAsync of CUDA 13, whose signature is another");
    return 0;
  }
  *function = reinterpret_cast<void*>(&copy_batch);
  return 0;
}
}
