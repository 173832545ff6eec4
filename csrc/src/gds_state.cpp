#include "gds_state.hpp"

#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "gds_codes.hpp"
#include "kvtier/gds_engine.hpp"

namespace kvtier::gds {
namespace {

cuda::Library load_cuda(std::string& no_cuda) {
  try {
    return cuda::load();
  } catch (const cuda::Missing& error) {
    no_cuda = error.what();
    return {};
  }
}

cufile::Library load_cufile(const std::string& wheel_path, const std::string& no_cuda) {
  try {
    return cufile::load(wheel_path, no_cuda);
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

State::State(const std::string& wheel_path, std::size_t staging_count, std::uint64_t segment_bytes)
    : cuda_(load_cuda(no_cuda_)), cufile_(load_cufile(wheel_path, no_cuda_)) {
  const cufile::Status status = cufile_.driver_open();
  // Somebody else in this process opened it, who will close it, too.
  is_ours_ = status.code != cufile::kDriverAlreadyOpen;
  if (status.code != 0 && is_ours_) throw error_of("cuFile's driver does not open", status);
  staging_.emplace(cufile_, staging_count, segment_bytes);
}

State::~State() {
  for (const auto& [fd, handle] : files_) cufile_.handle_deregister(handle);
  for (const auto& [base, buffer] : buffers_) deregister(base, buffer);
  staging_.reset();
  if (is_ours_) cufile_.driver_close();
}

void State::add_file(int fd) {
  cufile::FileDescription description = {
      .type = cufile::HandleType::kDescriptor, .file = {.fd = fd}, .operations = nullptr};
  cufile::Handle handle = nullptr;
  const cufile::Status status = cufile_.handle_register(&handle, &description);
  if (status.code != 0) throw error_of("the file cannot be registered", status);
  const std::unique_lock lock(mutex_);
  files_[fd] = handle;
}

void State::remove_file(int fd) {
  const std::unique_lock lock(mutex_);
  const auto found = files_.find(fd);
  if (found == files_.end()) return;
  cufile_.handle_deregister(found->second);
  files_.erase(found);
}

std::uint64_t State::add_memory(std::uintptr_t address, std::uint64_t nbytes,
                                std::optional<int> device) {
  const std::unique_lock lock(mutex_);
  const cuda::Context context = device ? context_of(*device) : nullptr;
  const Way way = register_memory(address, nbytes, context);
  memory_[{address, ++last_number_}] = {nbytes, context, way};
  return last_number_;
}

State::Way State::register_memory(std::uintptr_t address, std::uint64_t nbytes,
                                  cuda::Context context) {
  if (const auto found = buffers_.find(address); found != buffers_.end()) {
    if (found->second.nbytes < nbytes) return Way::kPlain;
    ++found->second.uses;
    return Way::kRegistered;
  }
  const cuda::CurrentContext current(cuda_, context);
  if (current.result() != 0) {
    throw GdsError(EIO, "no context on this thread: " + cuda::words_of(cuda_, current.result()));
  }
  const cufile::Status status =
      cufile_.buffer_register(reinterpret_cast<void*>(address), nbytes, 0);
  if (status.code == cufile::kMemoryAlreadyRegistered) return Way::kPlain;
  if (status.code == 0) {
    buffers_[address] = {nbytes, 1, context};
    return Way::kRegistered;
  }
  const GdsError error = error_of("the memory cannot be registered", status);
  if (context != nullptr) {
    throw GdsError(error.error_number(), std::string(error.what()) +
                                             "; there is no staging for GPU memory, which would "
                                             "need copies by CUDA");
  }
  if (staging_->prepare() != 0) throw error;
  return Way::kStaged;
}

cuda::Context State::context_of(int device) {
  if (!no_cuda_.empty()) throw GdsError(ENODEV, no_cuda_);
  if (const auto found = contexts_.find(device); found != contexts_.end()) {
    return found->second->get();
  }
  auto context = std::make_unique<const cuda::PrimaryContext>(cuda_, device);
  if (const int result = context->result(); result != 0) {
    throw GdsError(
        errno_of(code_of_cuda(result)),
        "GPU " + std::to_string(device) + " has no context: " + cuda::words_of(cuda_, result));
  }
  return (contexts_[device] = std::move(context))->get();
}

void State::remove_memory(std::uintptr_t address, std::uint64_t number) {
  const std::unique_lock lock(mutex_);
  const auto found = memory_.find({address, number});
  if (found == memory_.end()) return;
  const bool is_registered = found->second.way == Way::kRegistered;
  memory_.erase(found);
  if (!is_registered) return;
  const auto buffer = buffers_.find(address);
  if (--buffer->second.uses > 0) return;
  deregister(address, buffer->second);
  buffers_.erase(buffer);
}

void State::deregister(std::uintptr_t base, const Buffer& buffer) const {
  const cuda::CurrentContext current(cuda_, buffer.context);
  cufile_.buffer_deregister(reinterpret_cast<void*>(base));
}

std::optional<Access> State::find(const FileSegment& segment) const {
  const auto address = reinterpret_cast<std::uintptr_t>(segment.address);
  const std::shared_lock lock(mutex_);
  const auto file = files_.find(segment.fd);
  if (file == files_.end()) return std::nullopt;
  Access access{.file = file->second, .base = segment.address};
  // Of the regions that hold the segment, one that is registered is best; as a rule the first is.
  auto memory = memory_.upper_bound({address, std::numeric_limits<std::uint64_t>::max()});
  while (memory != memory_.begin()) {
    --memory;
    const std::uintptr_t base = memory->first.first;
    if (address + segment.remaining > base + memory->second.nbytes) continue;
    access.context = memory->second.context;
    access.is_staged = memory->second.way == Way::kStaged;
    if (memory->second.way != Way::kRegistered) continue;
    access.base = reinterpret_cast<void*>(base);
    access.buffer_offset = static_cast<off_t>(address - base);
    break;
  }
  return access;
}

std::int64_t State::request(FileOperation operation, const FileSegment& segment) {
  if (is_sync(operation)) return -EINVAL;
  const std::optional<Access> access = find(segment);
  if (!access) return -EBADF;
  if (access->is_staged) return request_staged(operation, segment, access->file);
  const cuda::CurrentContext current(cuda_, access->context);
  if (current.result() != 0) return -code_of_cuda(current.result());
  return call(operation, segment, *access);
}

std::int64_t State::request_staged(FileOperation operation, const FileSegment& segment,
                                   cufile::Handle file) {
  const StagingPool::Loan buffer(*staging_);
  const Access access{.file = file, .base = buffer.get()};
  if (operation == FileOperation::kWrite) {
    std::memcpy(buffer.get(), segment.address, segment.remaining);
    return call(operation, segment, access);
  }
  const std::int64_t moved = call(operation, segment, access);
  if (moved > 0) std::memcpy(segment.address, buffer.get(), static_cast<std::size_t>(moved));
  return moved;
}

std::int64_t State::call(FileOperation operation, const FileSegment& segment,
                         const Access& access) const {
  const auto offset = static_cast<off_t>(segment.offset);
  errno = 0;
  const ssize_t moved =
      operation == FileOperation::kRead
          ? cufile_.read(access.file, access.base, segment.remaining, offset, access.buffer_offset)
          : cufile_.write(access.file, access.base, segment.remaining, offset,
                          access.buffer_offset);
  if (moved != -1) return moved;
  return errno != 0 ? -errno : -EIO;
}

std::string State::words_of(int code) const {
  if (code <= kCudaBase || !no_cuda_.empty()) return cufile::words_of(code);
  return cuda::words_of(cuda_, code - kCudaBase);
}

}  // namespace kvtier::gds
