// The stand-in's streams and events. A stream is a thread that does its work late and at a pace of
// its own: who does not wait for it sees wrong bytes.
#include "fake_state.hpp"

namespace fake {

Stream::Stream(int device, std::uint32_t seed)
    : device_(device), chance_(seed), thread_([this] { loop(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(state().mutex);
    is_closing_ = true;
  }
  state().changed.notify_all();
  thread_.join();
}

void Stream::add(Work work) {
  for (const Range& range : work.uses) {
    state().uses.emplace(state().next_use++, range);
    work.use_numbers.push_back(state().next_use - 1);
  }
  queue_.push_back(std::move(work));
  state().changed.notify_all();
}

bool Stream::uses_module(const void* module) const {
  if (busy_module_ == module) return true;
  for (const Work& work : queue_) {
    if (work.module == module) return true;
  }
  return false;
}

void Stream::loop() {
  std::unique_lock lock(state().mutex);
  while (true) {
    state().changed.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    busy_module_ = work.module;
    const auto is_lost = [this] { return state().lost[device_] != 0; };
    if (work.waits_for) {
      state().changed.wait(lock, [&] { return work.waits_for->is_over || is_lost(); });
    }
    if (!is_lost()) {
      const std::int64_t delay_max_us = state().settings[kSetDelayMaxUs];
      lock.unlock();
      if (delay_max_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(chance_() % delay_max_us));
      }
      const int code = work.run ? work.run() : 0;
      lock.lock();
      if (code != 0) lose(device_, code);
    }
    if (work.moment) {
      work.moment->is_over = true;
      work.moment->at = std::chrono::steady_clock::now();
    }
    for (const std::uint64_t number : work.use_numbers) state().uses.erase(number);
    is_busy_ = false;
    busy_module_ = nullptr;
    state().changed.notify_all();
  }
}

std::shared_ptr<Stream> find_stream(void* stream, int device) {
  const auto number = reinterpret_cast<std::uintptr_t>(stream);
  if (number <= 2) {  // the default streams: of the context, and of the thread
    auto& found = state().default_streams[device];
    if (!found) found = std::make_shared<Stream>(device, 1);
    return found;
  }
  const auto found = state().streams.find(number);
  return found == state().streams.end() || found->second->device() != device ? nullptr
                                                                             : found->second;
}

int device_of_stream(void* stream) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  return found == state().streams.end() ? kNoDevice : found->second->device();
}

void enqueue(void* stream, std::function<void()> work) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  if (found == state().streams.end()) return;
  found->second->add({.run = [work = std::move(work)] {
    work();
    return 0;
  }});
}

namespace {

std::shared_ptr<Event> find_event(void* event) {
  const auto found = state().events.find(reinterpret_cast<std::uintptr_t>(event));
  return found == state().events.end() ? nullptr : found->second;
}

int create_stream(void** stream, unsigned flags) {
  const Begun begun = begin(kStreamCreate);
  if (begun.code != 0) return begun.code;
  if (flags != api::kNonBlocking) mistake("a stream that waits for the default stream");
  const std::lock_guard lock(state().mutex);
  const std::uintptr_t number = state().next_handle++;
  const auto seed = static_cast<std::uint32_t>(state().settings[kSetSeed]) * 7919 +
                    static_cast<std::uint32_t>(number);
  state().streams[number] = std::make_shared<Stream>(begun.device, seed);
  *stream = handle_of(number);
  return 0;
}

/// Wait until it is over, or its context is lost: why.
int wait_for(std::unique_lock<std::mutex>& lock, int device, const std::function<bool()>& is_over) {
  state().changed.wait(lock, [&] { return is_over() || state().lost[device] != 0; });
  return state().lost[device];
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

int cuStreamCreate(void** stream, unsigned flags) { return create_stream(stream, flags); }

int cuStreamCreateWithPriority(void** stream, unsigned flags, int /*priority*/) {
  return create_stream(stream, flags);
}

int cuStreamDestroy_v2(void* stream) {
  const Begun begun = begin(kStreamDestroy);
  if (begun.code != 0) return begun.code;
  std::shared_ptr<Stream> ending;
  {
    const std::lock_guard lock(state().mutex);
    const auto number = reinterpret_cast<std::uintptr_t>(stream);
    const auto found = state().streams.find(number);
    if (found == state().streams.end() || found->second->device() != begun.device) {
      mistake("cuStreamDestroy of no stream of this context");
      return kInvalidHandle;
    }
    if (!found->second->is_idle()) mistake("a stream was destroyed before its work was over");
    ending = std::move(found->second);
    state().streams.erase(found);
  }
  return 0;
}

int cuStreamSynchronize(void* stream) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  {
    std::unique_lock lock(state().mutex);
    const auto found = find_stream(stream, begun.device);
    if (!found) return kInvalidHandle;
    if (const int code = wait_for(lock, begun.device, [&] { return found->is_idle(); })) {
      return code;
    }
  }
  return begin(kStreamSynchronize).code;
}

int cuStreamQuery(void* stream) {
  const Begun begun = begin(kStreamQuery);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto found = find_stream(stream, begun.device);
  if (!found) return kInvalidHandle;
  return found->is_idle() ? 0 : api::kNotReady;
}

int cuStreamGetCtx(void* stream, void** context) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  const bool is_default = reinterpret_cast<std::uintptr_t>(stream) <= 2;
  const int device = is_default ? begun.device : device_of_stream(stream);
  if (device == kNoDevice) return kInvalidHandle;
  *context = context_of(device);
  return 0;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  const Begun begun = begin(kStreamWaitEvent);
  if (begun.code != 0) return begun.code;
  if (flags != 0) return api::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  const auto waiting = find_stream(stream, begun.device);
  const auto awaited = find_event(event);
  if (!waiting || !awaited) return kInvalidHandle;
  if (!awaited->last) {
    mistake("cuStreamWaitEvent on an event that was never recorded");
    return 0;
  }
  waiting->add({.waits_for = awaited->last});
  return 0;
}

int cuEventCreate(void** event, unsigned flags) {
  const Begun begun = begin(kEventCreate);
  if (begun.code != 0) return begun.code;
  if (flags > (api::kEventBlockingSync | api::kEventDisableTiming)) return api::kInvalidValue;
  const std::lock_guard lock(state().mutex);
  const std::uintptr_t number = state().next_handle++;
  state().events[number] = std::make_shared<Event>(Event{begun.device, flags, nullptr});
  *event = handle_of(number);
  return 0;
}

int cuEventDestroy_v2(void* event) {
  const Begun begun = begin();
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  if (state().events.erase(reinterpret_cast<std::uintptr_t>(event)) == 1) return 0;
  mistake("cuEventDestroy of no event");
  return kInvalidHandle;
}

int cuEventRecord(void* event, void* stream) {
  const Begun begun = begin(kEventRecord);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto recording = find_stream(stream, begun.device);
  const auto recorded = find_event(event);
  if (!recording || !recorded || recorded->device != begun.device) return kInvalidHandle;
  recorded->last = std::make_shared<Moment>();
  recording->add({.moment = recorded->last});
  return 0;
}

int cuEventQuery(void* event) {
  const Begun begun = begin(kEventQuery);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto found = find_event(event);
  if (!found) return kInvalidHandle;
  return !found->last || found->last->is_over ? 0 : api::kNotReady;
}

int cuEventSynchronize(void* event) {
  const Begun begun = begin(kEventSynchronize);
  if (begun.code != 0) return begun.code;
  std::unique_lock lock(state().mutex);
  const auto found = find_event(event);
  if (!found) return kInvalidHandle;
  const auto moment = found->last;
  if (!moment) return 0;
  return wait_for(lock, found->device, [&] { return moment->is_over; });
}

int cuEventElapsedTime(float* elapsed_ms, void* start, void* end) {
  const Begun begun = begin(kEventElapsedTime);
  if (begun.code != 0) return begun.code;
  const std::lock_guard lock(state().mutex);
  const auto from = find_event(start);
  const auto to = find_event(end);
  if (!from || !to || !from->last || !to->last) return kInvalidHandle;
  if (((from->flags | to->flags) & api::kEventDisableTiming) != 0) return kInvalidHandle;
  if (!from->last->is_over || !to->last->is_over) return api::kNotReady;
  *elapsed_ms = std::chrono::duration<float, std::milli>(to->last->at - from->last->at).count();
  return 0;
}
}
