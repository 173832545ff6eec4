// What the stand-ins share: faults on command, and counts of calls and of a caller's mistakes.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace fake {

/// Which calls a fault is for; the numbers are the test's.
enum Call {
  kDriverOpen,
  kHandleRegister,
  kBufferRegister,
  kRead,  // also when a stream comes to it
  kWrite,
  kStreamRegister,
  kReadAsync,
  kWriteAsync,
  kInit,
  kContextRetain,
  kContextPush,
  kStreamCreate,
  kStreamSynchronize,
  kCallCount
};

struct Fault {
  int skip = 0;   // calls that go well first
  int count = 0;  // then as many fail
  int code = 0;
};

struct Calls {
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t counts[kCallCount] = {};
  Fault faults[kCallCount];
  std::int64_t mistakes = 0;
  bool is_held = false;
  int passes = 0;  // calls that may yet pass
  int waiting = 0;
};

Calls& calls();

/// The code with which this call is to fail, or 0.
int fault_of(Call call);
/// The caller did what the real library would not forgive.
void mistake();
/// Wait as long as calls are held, unless this is one that may pass.
void pass();

}  // namespace fake
