// The stand-in's copies and fills, which a stream does when it comes to them.
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

/// Copies in stream order, from the last to the first: among themselves they have no order.
int copy_now(const std::vector<Copy>& copies, const std::vector<Bytes>& early) {
  pass();
  if (const int code = fault_of(kCopyRun)) return code;
  for (std::size_t i = copies.size(); i-- > 0;) {
    const void* const source =
        early[i].empty() ? reinterpret_cast<const void*>(copies[i].source) : early[i].data();
    std::memmove(reinterpret_cast<void*>(copies[i].target), source, copies[i].nbytes);
  }
  return 0;
}

/// Whether a source is read before the stream comes to it: every second time where it may be.
bool is_read_early(api::SourceOrder order) {
  static std::minstd_rand chance(1);
  return order == api::SourceOrder::kDuringApiCall ||
         (order == api::SourceOrder::kAny && (chance() >> 8) % 2 == 0);
}

/// Enqueue them as one piece of work, unless one is wrong: its number goes to `failed_copy`.
/// Copies of pageable memory are over when this returns.
int add_copies(std::vector<Copy> copies, const std::shared_ptr<Stream>& stream,
               std::unique_lock<std::mutex>& lock, std::size_t* failed_copy) {
  Counters& counters = state().counters;
  Work work;
  std::vector<Bytes> early(copies.size());
  bool is_any_pageable = false;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const Copy& copy = copies[i];
    if (copy.nbytes == 0) continue;
    const Side to = side_of({copy.target, copy.nbytes}, stream->device());
    const Side from = side_of({copy.source, copy.nbytes}, stream->device());
    if (to == Side::kWrong || from == Side::kWrong) {
      if (failed_copy != nullptr) *failed_copy = i;
      return api::kInvalidValue;
    }
    const bool is_pageable = to == Side::kPageable || from == Side::kPageable;
    is_any_pageable = is_any_pageable || is_pageable;
    counters.pageable_copies += is_pageable ? 1 : 0;
    counters.copied_bytes += static_cast<std::int64_t>(copy.nbytes);
    work.uses.push_back({copy.target, copy.nbytes});
    if (is_read_early(copy.order)) {
      const auto* const bytes = reinterpret_cast<const unsigned char*>(copy.source);
      early[i].assign(bytes, bytes + copy.nbytes);
      ++counters.early_reads;
    } else {
      work.uses.push_back({copy.source, copy.nbytes});
    }
  }
  work.run = [copies = std::move(copies), early = std::move(early)] {
    return copy_now(copies, early);
  };
  const auto moment = std::make_shared<Moment>();
  work.moment = moment;
  stream->add(std::move(work));
  if (is_any_pageable) state().changed.wait(lock, [&] { return moment->is_over; });
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
  return add_copies(std::move(copies), found, lock, failed_copy);
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
  return add_copies({{target, source, nbytes}}, found, lock, nullptr);
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
