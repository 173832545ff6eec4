// cuFile's driver while it is open, CUDA beside it, and the files and memory that both were told
// of.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>

#include "../shim/cuda.hpp"
#include "../shim/cufile.hpp"
#include "file_batch.hpp"
#include "gds_staging.hpp"

namespace kvtier::gds {

/// How cuFile is to be called for one segment.
struct Access {
  cufile::Handle file = nullptr;
  void* base = nullptr;  // registered memory is known by its base, other memory by itself
  off_t buffer_offset = 0;
  cuda::Context context = nullptr;  // none for host memory
  bool is_staged = false;
};

/// Any thread.
class State {
 public:
  /// @throws GdsError cuFile's driver does not open
  State(const std::string& wheel_path, std::size_t staging_count, std::uint64_t segment_bytes);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const cufile::Library& cufile() const { return cufile_; }
  /// Only where `no_cuda` is empty.
  const cuda::Library& cuda() const { return cuda_; }
  /// Why CUDA does not work here; empty if it does.
  const std::string& no_cuda() const { return no_cuda_; }

  /// @throws GdsError
  void add_file(int fd);
  void remove_file(int fd);

  /// Make memory known, of a GPU if `device` says of which. @return its number @throws GdsError
  std::uint64_t add_memory(std::uintptr_t address, std::uint64_t nbytes, std::optional<int> device);
  void remove_memory(std::uintptr_t address, std::uint64_t number);

  /// Nothing where the file is not known.
  std::optional<Access> find(const FileSegment& segment) const;

  /// Move a segment, on this thread: bytes, or minus a code.
  std::int64_t request(FileOperation operation, const FileSegment& segment);

  std::string words_of(int code) const;

 private:
  enum class Way {
    kRegistered,
    kPlain,   // works without being registered, as parts of it are elsewhere
    kStaged,  // through buffers of ours
  };
  struct Memory {
    std::uint64_t nbytes = 0;
    cuda::Context context = nullptr;
    Way way = Way::kPlain;
  };
  struct Buffer {
    std::uint64_t nbytes = 0;
    std::size_t uses = 0;
    cuda::Context context = nullptr;
  };

  /// Under the lock. @throws GdsError
  cuda::Context context_of(int device);
  /// Under the lock. @throws GdsError
  Way register_memory(std::uintptr_t address, std::uint64_t nbytes, cuda::Context context);
  void deregister(std::uintptr_t base, const Buffer& buffer) const;
  std::int64_t request_staged(FileOperation operation, const FileSegment& segment,
                              cufile::Handle file);
  std::int64_t call(FileOperation operation, const FileSegment& segment,
                    const Access& access) const;

  std::string no_cuda_;  // first: the libraries are loaded with it
  cuda::Library cuda_;
  cufile::Library cufile_;
  bool is_ours_ = false;
  std::optional<StagingPool> staging_;  // from the driver's opening to its closing
  mutable std::shared_mutex mutex_;
  std::map<int, cufile::Handle> files_;
  std::map<int, std::unique_ptr<const cuda::PrimaryContext>> contexts_;
  std::map<std::uintptr_t, Buffer> buffers_;
  std::map<std::pair<std::uintptr_t, std::uint64_t>, Memory> memory_;  // by address and number
  std::uint64_t last_number_ = 0;
};

}  // namespace kvtier::gds
