// Workers and endpoints of UCX with their ends: what owns them, and when they are gone. One thread.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "ucx_context.hpp"

namespace kvtier {

/// A UCX worker and the fd that becomes readable when it should be progressed.
struct UcxWorker {
  /// @throws std::runtime_error UCX gives none
  explicit UcxWorker(std::shared_ptr<const UcxContext> context);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  /// How a peer's endpoint finds it.
  std::string address() const;

  std::shared_ptr<const UcxContext> context;
  ucp::Worker handle = nullptr;
  int efd = -1;
};

/// An endpoint with which UCX handles errors, so that it can be closed while requests are under
/// way: each of them ends then.
class UcxEndpoint {
 public:
  /// `has_news` becomes true when it fails, and when it is closed.
  /// @throws std::runtime_error UCX finds no way to the address
  UcxEndpoint(std::shared_ptr<UcxWorker> worker, const std::string& address, bool* has_news);
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  ucp::Endpoint handle() const { return handle_; }
  /// What the transport reported of its own, or OK.
  ucp::Status failure() const { return failure_; }
  /// Begin to close; it must stay until `is_closed`, or until its worker is gone.
  void close_by_force();
  bool is_closing() const { return is_closing_; }
  bool is_closed() const { return is_closed_; }
  void forget_worker() { worker_.reset(); }

 private:
  static void on_failed(void* self, ucp::Endpoint endpoint, ucp::Status status);
  static void on_closed(void* request, ucp::Status status, void* self);

  const ucp::Library& library_;
  std::shared_ptr<UcxWorker> worker_;
  bool* has_news_;
  ucp::Endpoint handle_ = nullptr;
  ucp::Status failure_ = ucp::kOk;
  bool is_closing_ = false;
  bool is_closed_ = false;
};

}  // namespace kvtier
