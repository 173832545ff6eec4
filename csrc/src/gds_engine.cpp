#include "kvtier/gds_engine.hpp"

#include <cerrno>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>

#include "../shim/cufile.hpp"
#include "file_batch.hpp"

namespace kvtier {
namespace {

cufile::Library load(const std::string& wheel_path) {
  try {
    return cufile::load(wheel_path);
  } catch (const cufile::Missing& error) {
    throw GdsError(ENODEV, error.what());
  }
}

GdsError error_of(const std::string& what, cufile::Status status) {
  const std::string cuda =
      status.cuda != 0 ? " (CUDA error " + std::to_string(status.cuda) + ")" : std::string();
  return {cufile::errno_of(status.code), what + ": " + cufile::words_of(status.code) + cuda};
}

}  // namespace

/// cuFile's driver while it is open, and what it was told of.
class GdsEngine::State {
 public:
  explicit State(const std::string& wheel_path) : library_(load(wheel_path)) {
    const cufile::Status status = library_.driver_open();
    // Somebody else in this process opened it, who will close it, too.
    is_ours_ = status.code != cufile::kDriverAlreadyOpen;
    if (status.code != 0 && is_ours_) throw error_of("cuFile's driver does not open", status);
  }
  ~State() {
    for (const auto& [fd, handle] : files_) library_.handle_deregister(handle);
    for (const auto& [base, memory] : memory_) {
      library_.buffer_deregister(reinterpret_cast<void*>(base));
    }
    if (is_ours_) library_.driver_close();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const std::string& path() const { return library_.path; }

  void add_file(int fd) {
    cufile::FileDescription description = {
        .type = cufile::HandleType::kDescriptor, .file = {.fd = fd}, .operations = nullptr};
    cufile::Handle handle = nullptr;
    const cufile::Status status = library_.handle_register(&handle, &description);
    if (status.code != 0) throw error_of("the file cannot be registered", status);
    const std::unique_lock lock(mutex_);
    files_[fd] = handle;
  }

  void remove_file(int fd) {
    const std::unique_lock lock(mutex_);
    const auto found = files_.find(fd);
    if (found == files_.end()) return;
    library_.handle_deregister(found->second);
    files_.erase(found);
  }

  bool add_memory(std::uintptr_t address, std::uint64_t nbytes) {
    const std::unique_lock lock(mutex_);
    if (const auto found = memory_.find(address); found != memory_.end()) {
      if (found->second.nbytes < nbytes) return false;
      ++found->second.uses;
      return true;
    }
    const cufile::Status status =
        library_.buffer_register(reinterpret_cast<void*>(address), nbytes, 0);
    if (status.code == cufile::kMemoryAlreadyRegistered) return false;
    if (status.code != 0) throw error_of("the memory cannot be registered", status);
    memory_[address] = {nbytes, 1};
    return true;
  }

  void remove_memory(std::uintptr_t address) {
    const std::unique_lock lock(mutex_);
    const auto found = memory_.find(address);
    if (found == memory_.end() || --found->second.uses > 0) return;
    library_.buffer_deregister(reinterpret_cast<void*>(address));
    memory_.erase(found);
  }

  /// What a thread does for one segment.
  std::int64_t request(FileOperation operation, const FileSegment& segment) const {
    if (is_sync(operation)) return -EINVAL;
    const auto address = reinterpret_cast<std::uintptr_t>(segment.address);
    cufile::Handle handle = nullptr;
    std::uintptr_t base = address;
    {
      const std::shared_lock lock(mutex_);
      const auto file = files_.find(segment.fd);
      if (file == files_.end()) return -EBADF;
      handle = file->second;
      // A registered buffer is known by its base; other memory by itself.
      auto memory = memory_.upper_bound(address);
      if (memory != memory_.begin()) {
        --memory;
        if (address + segment.remaining <= memory->first + memory->second.nbytes) {
          base = memory->first;
        }
      }
    }
    const auto file_offset = static_cast<off_t>(segment.offset);
    const auto buffer_offset = static_cast<off_t>(address - base);
    errno = 0;
    const ssize_t moved = operation == FileOperation::kRead
                              ? library_.read(handle, reinterpret_cast<void*>(base),
                                              segment.remaining, file_offset, buffer_offset)
                              : library_.write(handle, reinterpret_cast<void*>(base),
                                               segment.remaining, file_offset, buffer_offset);
    if (moved != -1) return moved;
    return errno != 0 ? -errno : -EIO;
  }

 private:
  struct Memory {
    std::uint64_t nbytes = 0;
    std::size_t uses = 0;
  };

  cufile::Library library_;
  bool is_ours_ = false;
  mutable std::shared_mutex mutex_;
  std::map<int, cufile::Handle> files_;
  std::map<std::uintptr_t, Memory> memory_;
};

GdsEngine::GdsEngine(std::uint32_t threads, std::uint64_t segment_bytes,
                     const std::string& wheel_path) {
  if (threads < 1 || threads > FileEngine::kDepthMax) {
    throw std::invalid_argument(std::to_string(threads) + " threads, between 1 and " +
                                std::to_string(FileEngine::kDepthMax));
  }
  state_ = std::make_shared<State>(wheel_path);
  engine_ = std::make_unique<FileEngine>(
      segment_bytes, make_thread_runner(threads, [state = state_](FileOperation operation,
                                                                  const FileSegment& segment) {
        return state->request(operation, segment);
      }));
  path_ = state_->path();
}

GdsEngine::~GdsEngine() { close(); }

void GdsEngine::add_file(int fd) { open_state()->add_file(fd); }

void GdsEngine::remove_file(int fd) {
  if (const auto state = this->state()) state->remove_file(fd);
}

bool GdsEngine::add_memory(std::uint64_t address, std::uint64_t nbytes) {
  return open_state()->add_memory(address, nbytes);
}

void GdsEngine::remove_memory(std::uint64_t address) {
  if (const auto state = this->state()) state->remove_memory(address);
}

void GdsEngine::read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                     StopFlag* stop) {
  engine_->read(items, results, stop);
}

void GdsEngine::write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                      StopFlag* stop) {
  engine_->write(items, results, stop);
}

void GdsEngine::close() {
  engine_->close();  // its threads are gone after that, and with them their hold of the state
  std::shared_ptr<State> last;
  const std::lock_guard lock(mutex_);
  last.swap(state_);
}

std::shared_ptr<GdsEngine::State> GdsEngine::state() {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::shared_ptr<GdsEngine::State> GdsEngine::open_state() {
  std::shared_ptr<State> state = this->state();
  if (!state) throw std::invalid_argument("the GDS engine is closed");
  return state;
}

int GdsEngine::error_number_of(int code) { return cufile::errno_of(code); }

std::string GdsEngine::words_of(int code) { return cufile::words_of(code); }

}  // namespace kvtier
