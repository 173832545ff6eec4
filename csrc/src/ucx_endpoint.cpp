#include "ucx_endpoint.hpp"

#include <stdexcept>
#include <utility>

namespace kvtier {

UcxWorker::UcxWorker(std::shared_ptr<const UcxContext> its_context)
    : context(std::move(its_context)) {
  ucp::WorkerParams params{};
  params.field_mask = ucp::kWorkerParamThreadMode | ucp::kWorkerParamFlags;
  params.thread_mode = ucp::ThreadMode::kSerialized;
  params.flags = ucp::kWorkerIgnoreRequestLeak;  // those of a dead peer go down with the worker
  context->check(context->library.worker_create(context->handle, &params, &handle),
                 "UCX gives no worker");
  const ucp::Status status = context->library.worker_get_efd(handle, &efd);
  if (status != ucp::kOk) {
    context->library.worker_destroy(handle);
    throw std::runtime_error("UCX cannot sleep here: " + context->words(status));
  }
}

UcxWorker::~UcxWorker() { context->library.worker_destroy(handle); }

std::string UcxWorker::address() const {
  ucp::Address address = nullptr;
  std::size_t length = 0;
  context->check(context->library.worker_get_address(handle, &address, &length),
                 "UCX gives no address");
  std::string bytes(reinterpret_cast<const char*>(address), length);
  context->library.worker_release_address(handle, address);
  return bytes;
}

UcxEndpoint::UcxEndpoint(std::shared_ptr<UcxWorker> worker, const std::string& address,
                         bool* has_news)
    : library_(worker->context->library), worker_(std::move(worker)), has_news_(has_news) {
  ucp::EndpointParams params{};
  params.field_mask = ucp::kEndpointParamRemoteAddress | ucp::kEndpointParamErrorMode |
                      ucp::kEndpointParamErrorHandler;
  params.address = reinterpret_cast<const ucp::OpaqueAddress*>(address.data());
  params.error_mode = ucp::ErrorMode::kPeer;
  params.error_handler = {&on_failed, this};
  worker_->context->check(library_.ep_create(worker_->handle, &params, &handle_),
                          "UCX finds no way to the peer");
}

void UcxEndpoint::close_by_force() {
  is_closing_ = true;
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpFlags | ucp::kOpCallback | ucp::kOpUserData;
  params.flags = ucp::kCloseForce;
  params.send_callback = &on_closed;
  params.user_data = this;
  const ucp::Request request = library_.ep_close_nbx(handle_, &params);
  is_closed_ = request == nullptr || ucp::is_error(request);
  *has_news_ = true;
}

void UcxEndpoint::on_failed(void* self, ucp::Endpoint, ucp::Status status) {
  // UCX does not like its endpoints closed from in here: the loop does it.
  static_cast<UcxEndpoint*>(self)->failure_ = status;
  *static_cast<UcxEndpoint*>(self)->has_news_ = true;
}

void UcxEndpoint::on_closed(void* request, ucp::Status, void* self) {
  UcxEndpoint& closed = *static_cast<UcxEndpoint*>(self);
  closed.is_closed_ = true;
  *closed.has_news_ = true;
  closed.library_.request_free(request);
}

}  // namespace kvtier
