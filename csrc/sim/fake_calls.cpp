#include "fake_calls.hpp"

#include <chrono>
#include <cstddef>
#include <cstring>

namespace {
constexpr std::size_t kWordsMax = 64;  // mistakes that are kept in words; all are counted
}

namespace fake {

Calls& calls() {
  // Never ends: threads of streams may outlive what a process destroys at its end.
  static Calls& instance = *new Calls;
  return instance;
}

int fault_of(Call call, bool* is_lasting) {
  const std::lock_guard lock(calls().mutex);
  ++calls().counts[call];
  Fault& fault = calls().faults[call];
  if (fault.count == 0) return 0;
  if (fault.skip > 0) {
    --fault.skip;
    return 0;
  }
  --fault.count;
  if (is_lasting != nullptr) *is_lasting = fault.is_lasting;
  return fault.code;
}

void mistake(const std::string& words) {
  const std::lock_guard lock(calls().mutex);
  ++calls().mistake_count;
  if (calls().mistakes.size() < kWordsMax) calls().mistakes.push_back(words);
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

/// The calls after the next `skip` of this kind fail, `count` of them, with `code`; where it is
/// lasting, so does all that follows on that context.
void fake_fail(int call, int skip, int count, int code, int is_lasting) {
  const std::lock_guard lock(fake::calls().mutex);
  fake::calls().faults[call] = {skip, count, code, is_lasting != 0};
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
  *counts++ = fake::calls().mistake_count;
  for (const std::int64_t count : fake::calls().counts) *counts++ = count;
}

/// Mistakes in words, a line each, as far as they fit; they are forgotten, their number is not.
void fake_mistakes(char* words, std::size_t capacity_bytes) {
  const std::lock_guard lock(fake::calls().mutex);
  std::string lines;
  for (const std::string& mistake : fake::calls().mistakes) lines += mistake + "\n";
  fake::calls().mistakes.clear();
  std::strncpy(words, lines.c_str(), capacity_bytes - 1);
  words[capacity_bytes - 1] = '\0';
}
}
