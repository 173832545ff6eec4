// What the stand-ins share: faults on command, and counts of calls and of a caller's mistakes.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

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
  kDriverGetVersion,
  kDeviceGetCount,
  kDeviceGetAttribute,
  kStreamQuery,
  kStreamWaitEvent,
  kStreamDestroy,
  kEventCreate,
  kEventRecord,
  kEventQuery,
  kEventSynchronize,
  kEventElapsedTime,
  kMemoryAllocate,
  kMemoryFree,
  kMemoryGetInfo,
  kHostAllocate,
  kHostRegister,
  kHostUnregister,
  kHostGetDevicePointer,
  kPointerGetAttribute,
  kCopy,
  kBatchCopy,
  kFill,
  kModuleLoad,
  kModuleGetFunction,
  kFunctionSetAttribute,
  kLaunch,
  kCopyRun,    // when a stream comes to a copy or a fill
  kKernelRun,  // when a stream comes to a kernel
  kCallCount
};

struct Fault {
  int skip = 0;   // calls that go well first
  int count = 0;  // then as many fail
  int code = 0;
  bool is_lasting = false;  // the context is lost with it
};

struct Calls {
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t counts[kCallCount] = {};
  Fault faults[kCallCount];
  std::int64_t mistake_count = 0;
  std::vector<std::string> mistakes;  // the first of them, in words
  bool is_held = false;
  int passes = 0;  // calls that may yet pass
  int waiting = 0;
};

Calls& calls();

/// The code with which this call is to fail, or 0.
int fault_of(Call call, bool* is_lasting = nullptr);
/// The caller did what the real library would not forgive.
void mistake(const std::string& words);
/// Wait as long as calls are held, unless this is one that may pass.
void pass();

}  // namespace fake
