// Device memory that copies pass through, and the tables that kernels read. For device_*.cpp only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "../shim/cuda.hpp"

namespace kvtier::device {

class State;

/// An event of the state's own, used again and again; before its first record it is over.
class Fence {
 public:
  explicit Fence(State& state) : state_(state) {}
  ~Fence();
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;

  /// What is on `stream` now has to be over.
  void record(cuda::Stream stream);
  /// What is put on `stream` from now on waits for it.
  void wait_on(cuda::Stream stream) const;
  bool is_over() const;

 private:
  State& state_;  // which owns what has this
  cuda::Event event_ = nullptr;
};

/// Device memory in slots, taken in turn. All calls with the context current, one at a time.
class Slots {
 public:
  static constexpr std::size_t kCount = 4;  // one fills, one empties, two hide what is between

  /// Of slots that have so much together.
  static std::uint64_t slot_bytes_of(std::uint64_t nbytes);

  /// @throws DeviceError the device has not so much memory
  Slots(State& state, std::uint64_t nbytes);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  std::uint64_t slot_bytes() const { return slot_bytes_; }
  /// Where the slot lies that will be taken after `ahead` others.
  cuda::Address peek(std::size_t ahead) const;
  /// The next slot; what is put on `stream` from now on waits until its last use is over.
  std::size_t take(cuda::Stream stream);
  /// What is put on `second` from now on waits until what is on `first` now has filled the slot.
  void hand_over(std::size_t slot, cuda::Stream first, cuda::Stream second);
  /// Its use ends with what is on `stream` now.
  void give_back(std::size_t slot, cuda::Stream stream);

 private:
  State& state_;
  std::uint64_t slot_bytes_;
  cuda::Address address_ = 0;
  std::size_t next_ = 0;
  std::vector<std::unique_ptr<Fence>> filled_;  // of each slot
  std::vector<std::unique_ptr<Fence>> ended_;
};

/// Tables for kernels: written here, copied to the device in order with the kernels that read them.
/// All calls with the context current, one at a time.
class Tables {
 public:
  explicit Tables(State& state);
  ~Tables();
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  struct Buffer {
    explicit Buffer(State& state) : last_use(state) {}

    std::byte* host = nullptr;  // page-locked: to be written before `upload`
    cuda::Address device = 0;
    std::size_t nbytes = 0;
    Fence last_use;
  };

  /// A buffer that nothing uses any more, of at least so many bytes.
  ///
  /// @throws DeviceError there is no memory, or the device does not get on
  Buffer& take(std::size_t nbytes);
  /// Work put on `stream` from now on finds the first `nbytes` at `device`.
  void upload(const Buffer& buffer, std::size_t nbytes, cuda::Stream stream);
  /// What is on `stream` now are the buffer's last readers.
  void give_back(Buffer& buffer, cuda::Stream stream);

 private:
  void free(const Buffer& buffer);

  State& state_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace kvtier::device
