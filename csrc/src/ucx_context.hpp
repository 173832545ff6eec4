// UCX as this process uses it: the library, its settings, and what it found on this machine.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../shim/ucp.hpp"
#include "kvtier/ucx_engine.hpp"

namespace kvtier {

/// Lives as long as anything made from it, such as mapped memory. Any thread.
class UcxContext {
 public:
  explicit UcxContext(const UcxOptions& options);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  /// @throws std::runtime_error with `what` and UCX's own words, unless `status` is OK
  void check(ucp::Status status, const std::string& what) const;
  std::string words(ucp::Status status) const { return library.status_string(status); }

  const ucp::Library& library;
  ucp::Context handle = nullptr;
  std::string version;
  std::vector<std::string> transports;
};

/// Whether a transport moves bytes by a network device, without either processor.
bool is_rdma(const std::string& transport);

class UcxMemory {
 public:
  UcxMemory(std::shared_ptr<const UcxContext> context, std::uint64_t number, std::uint64_t address,
            std::uint64_t length, bool is_writable);
  ~UcxMemory() { unmap(); }
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  const std::uint64_t number;  ///< what messages call it; of no other, of this or another engine
  const std::uint64_t address;
  const std::uint64_t length;
  const bool is_writable;

  ucp::Memory handle() const { return handle_; }
  std::string pack() const;
  void unmap();

 private:
  std::shared_ptr<const UcxContext> context_;
  ucp::Memory handle_ = nullptr;
};

}  // namespace kvtier
