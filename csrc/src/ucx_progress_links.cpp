// Connections on the progress thread: made, failed, taken down until nothing touches memory.
#include <sys/epoll.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ucx_progress.hpp"

namespace kvtier {

/// @throws std::runtime_error UCX finds no way to the address, or gives no worker
void UcxProgress::open_connection(UcxLink& link) {
  auto connection = std::make_unique<UcxConnection>();
  connection->number = ++connection_count_;
  connection->progress = this;
  connection->link = &link;
  const bool is_local = link.process != nullptr;
  connection->worker = is_local ? std::make_shared<UcxWorker>(context_) : main_worker_;
  ucp::EndpointParams params{};
  params.field_mask = ucp::kEndpointParamRemoteAddress | ucp::kEndpointParamErrorMode;
  params.address = reinterpret_cast<const ucp::OpaqueAddress*>(link.address.data());
  // With errors handled UCX does not copy between processes directly, so on one host they are
  // not: we watch the process instead, and can take down the worker with all its requests.
  params.error_mode = is_local ? ucp::ErrorMode::kNone : ucp::ErrorMode::kPeer;
  if (!is_local) {
    params.field_mask |= ucp::kEndpointParamErrorHandler;
    params.error_handler = {&on_connection_failed, connection.get()};
  }
  context_->check(library_.ep_create(connection->worker->handle, &params, &connection->endpoint),
                  "UCX finds no way to the peer");
  if (is_local) {
    watch(connection->worker->efd, link.number * 2);
    awake_.push_back(connection->worker.get());
  } else {
    wake(*main_worker_);
  }
  link.connection = std::move(connection);
}

/// After this the link has none; requests may still end, on a peer across a network.
void UcxProgress::close_connection(UcxLink& link) {
  if (link.connection == nullptr) return;
  std::unique_ptr<UcxConnection> connection = std::move(link.connection);
  connection->is_closing = true;
  if (connection->worker != main_worker_) {
    // Only this worker's own calls touch memory for it, or a device does that the worker has to
    // itself. So when it is gone the memory is quiet, whatever the peer does or does not.
    release_keys(*connection);
    std::erase(awake_, connection->worker.get());
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->worker->efd, nullptr);
    connection->worker.reset();
    requests_ -= connection->requests;
    for (UcxJob* const job : link.jobs) {
      job->requests = 0;
      touched_.push_back(job->ticket);
    }
    return;
  }
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpFlags | ucp::kOpCallback | ucp::kOpUserData;
  params.flags = ucp::kCloseForce;
  params.send_callback = &on_closed;
  params.user_data = connection.get();
  const ucp::Request request = library_.ep_close_nbx(connection->endpoint, &params);
  connection->is_closed = request == nullptr || ucp::is_error(request);
  wake(*main_worker_);
  closing_.push_back(std::move(connection));
}

/// End what is in flight on the link; unless `for_good`, the next transfer connects again.
void UcxProgress::fail_link(UcxLink& link, const std::string& why, bool for_good) {
  if (for_good && link.closed_because.empty()) link.closed_because = why;
  close_connection(link);
  const std::vector<UcxJob*> jobs(link.jobs.begin(), link.jobs.end());
  for (UcxJob* const job : jobs) {
    if (!job->is_told) end(*job, ECONNRESET, why);
  }
  std::erase(busy_, &link);
}

void UcxProgress::release_keys(UcxConnection& connection) {
  for (const auto& [remote, key] : connection.imported) {
    library_.rkey_destroy(key);
    if (remote->connection_number == connection.number) remote->connection_number = 0;
  }
  connection.imported.clear();
}

/// The key made for this connection; null if UCX does not take it.
ucp::RemoteKey UcxProgress::key_of(UcxConnection& connection,
                                   const std::shared_ptr<UcxRemote>& remote) {
  if (remote->connection_number == connection.number) return remote->key;
  ucp::RemoteKey key = nullptr;
  if (library_.ep_rkey_unpack(connection.endpoint, remote->packed.data(), &key) != ucp::kOk) {
    return nullptr;
  }
  remote->key = key;
  remote->connection_number = connection.number;
  connection.imported.emplace_back(remote, key);
  return key;
}

void UcxProgress::sweep_closing() {
  std::erase_if(closing_, [this](const std::unique_ptr<UcxConnection>& connection) {
    if (!connection->is_closed || connection->requests != 0) return false;
    release_keys(*connection);
    return true;
  });
}

void UcxProgress::on_connection_failed(void* connection, ucp::Endpoint, ucp::Status status) {
  // UCX does not like its endpoints closed from in here: the loop does it.
  UcxConnection& failed = *static_cast<UcxConnection*>(connection);
  failed.failure = status;
  if (!failed.is_closing) failed.progress->failed_.push_back(failed.link->number);
}

void UcxProgress::on_closed(void* request, ucp::Status, void* connection) {
  UcxConnection& closed = *static_cast<UcxConnection*>(connection);
  closed.is_closed = true;
  closed.progress->library_.request_free(request);
}

}  // namespace kvtier
