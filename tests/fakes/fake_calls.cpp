#include "fake_calls.hpp"

#include <chrono>

namespace fake {

Calls& calls() {
  static Calls instance;
  return instance;
}

int fault_of(Call call) {
  const std::lock_guard lock(calls().mutex);
  ++calls().counts[call];
  Fault& fault = calls().faults[call];
  if (fault.count == 0) return 0;
  if (fault.skip > 0) {
    --fault.skip;
    return 0;
  }
  --fault.count;
  return fault.code;
}

void mistake() {
  const std::lock_guard lock(calls().mutex);
  ++calls().mistakes;
}

void pass() {
  std::unique_lock lock(calls().mutex);
  if (!calls().is_held || calls().passes-- > 0) return;
  ++calls().waiting;
  calls().changed.notify_all();
  calls().changed.wait(lock, [] { return !calls().is_held; });
  --calls().waiting;
}

}  // namespace fake

extern "C" {

/// The calls after the next `skip` of this kind fail, `count` of them, with `code`.
void fake_fail(int call, int skip, int count, int code) {
  const std::lock_guard lock(fake::calls().mutex);
  fake::calls().faults[call] = {skip, count, code};
}

/// Calls that move bytes wait until they are let go, all but the next `passes`.
void fake_hold(int is_held, int passes) {
  const std::lock_guard lock(fake::calls().mutex);
  fake::calls().is_held = is_held != 0;
  fake::calls().passes = passes;
  fake::calls().changed.notify_all();
}

/// Wait until so many calls are held; 0 when none came for a minute.
int fake_wait_held(int count) {
  std::unique_lock lock(fake::calls().mutex);
  return fake::calls().changed.wait_for(lock, std::chrono::seconds(60),
                                        [count] { return fake::calls().waiting >= count; });
}

/// Mistakes so far, then calls of each kind.
void fake_count_calls(std::int64_t* counts) {
  const std::lock_guard lock(fake::calls().mutex);
  *counts++ = fake::calls().mistakes;
  for (const std::int64_t count : fake::calls().counts) *counts++ = count;
}
}
