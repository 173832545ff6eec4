// How the stand-in for libcufile looks into the one for libcuda.
#pragma once
#include <cstdint>
#include <functional>

namespace fake {

constexpr int kNoDevice = -1;

/// The GPU whose context is current on this thread.
int current_device();
/// The GPU whose memory is at this address; kNoDevice for host memory.
int device_at(std::uintptr_t address);
/// The GPU of a stream; kNoDevice for what is none.
int device_of_stream(void* stream);
/// Have the stream do it in its turn.
void enqueue(void* stream, std::function<void()> work);

}  // namespace fake
