// Connections on the progress thread: made, failed, taken down until nothing touches memory.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "packing.hpp"
#include "ucx_progress.hpp"

namespace kvtier {
namespace {

bool has_unsettled(const UcxLink& link) {
  return std::ranges::any_of(link.jobs, [](const UcxJob* job) { return job->is_unsettled; });
}

}  // namespace

UcxRemote::UcxRemote(std::shared_ptr<UcxLink> its_link, const std::string& packed)
    : link(std::move(its_link)) {
  Unpacker unpacker(packed);
  number = unpacker.number<std::uint64_t>();
  packed_key = unpacker.part();
  unpacker.end();
}

/// @throws std::runtime_error UCX finds no way to the peer
void UcxProgress::open_connection(UcxLink& link) {
  auto connection = std::make_unique<UcxConnection>();
  connection->number = next_connection_++;
  connection->progress = this;
  connection->link = &link;
  connection->way = UcxWay::kHost;
  if (link.process == nullptr) {
    connection->endpoint = std::make_unique<UcxEndpoint>(worker_, link.address, &has_news_);
    connection->way = way_of(*connection->endpoint);
  }
  link.connection = std::move(connection);
  if (link.connection->way == UcxWay::kMessages) {
    connections_.emplace(link.connection->number, link.connection.get());
    greet(*link.connection);
  }
}

UcxWay UcxProgress::way_of(const UcxEndpoint& endpoint) const {
  std::array<ucp::Transport, 64> transports{};
  ucp::EndpointAttributes attributes{};
  attributes.field_mask = ucp::kEndpointTransports;
  attributes.transports = transports.data();
  attributes.transport_count = static_cast<unsigned>(transports.size());
  attributes.transport_bytes = sizeof(ucp::Transport);
  if (library_.ep_query(endpoint.handle(), &attributes) != ucp::kOk) return UcxWay::kMessages;
  for (unsigned i = 0; i < attributes.transport_count; ++i) {
    if (is_rdma(transports[i].name)) return UcxWay::kRdma;
  }
  return UcxWay::kMessages;
}

/// After this the link has none; requests may still end. `gently` gives the peer a while to say
/// that it has done with what it was sent; else it has had that.
void UcxProgress::close_connection(UcxLink& link, bool gently) {
  if (link.connection == nullptr) return;
  std::unique_ptr<UcxConnection> connection = std::move(link.connection);
  if (connection->endpoint == nullptr) return;
  connection->is_closing = true;
  connection->closing_link = link.shared_from_this();
  give_up_awaited(*connection);
  const bool can_say_bye =
      gently && connection->way == UcxWay::kMessages && connection->endpoint->failure() == ucp::kOk;
  if (can_say_bye) {
    connection->good_bye_due = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                  std::chrono::duration<double>(options_.drain_s));
  }
  closing_.push_back(std::move(connection));
  look_at_closing();
}

/// End what is in flight on the link; unless `for_good`, the next transfer connects again.
void UcxProgress::fail_link(UcxLink& link, const std::string& why, bool for_good) {
  if (for_good && link.closed_because.empty()) link.closed_because = why;
  const std::vector<UcxJob*> jobs(link.jobs.begin(), link.jobs.end());
  // Told while the connection is there: what arrived is sure or not by its way.
  for (UcxJob* const job : jobs) {
    if (!job->is_told) end(*job, ECONNRESET, why);
  }
  close_connection(link, for_good);
  std::erase(busy_, &link);
  if (for_good || !has_unsettled(link)) return;
  try {
    open_connection(link);  // to hear from the peer that it has dropped the rest
  } catch (const std::runtime_error& error) {
    link.closed_because = error.what();
    settle_all(link);
  }
}

/// There is nobody left to ask: who is gone does not write, and of who is lost nothing is known.
void UcxProgress::settle_all(UcxLink& link) {
  for (UcxJob* const job : link.jobs) {
    job->is_unsettled = false;
    touched_.push_back(job->ticket);
  }
}

/// Take connections that are on their way down one step further.
void UcxProgress::look_at_closing() {
  if (closing_.empty()) return;
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < closing_.size(); ++i) {
    UcxConnection& connection = *closing_[i];
    if (!connection.endpoint->is_closing()) {
      const bool is_over =
          now >= connection.good_bye_due || connection.endpoint->failure() != ucp::kOk;
      if (is_over) {
        connection.endpoint->close_by_force();
      } else if (connection.peers_number && !connection.is_bye_said) {
        say_bye(connection);
      }
    }
  }
  std::erase_if(closing_, [this](const std::unique_ptr<UcxConnection>& connection) {
    if (!connection->endpoint->is_closed() || connection->requests != 0) return false;
    release_keys(*connection);
    connections_.erase(connection->number);
    if (!connection->closing_link->closed_because.empty()) settle_all(*connection->closing_link);
    return true;
  });
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
  if (remote->packed_key.empty() ||
      library_.ep_rkey_unpack(connection.handle(), remote->packed_key.data(), &key) != ucp::kOk) {
    return nullptr;
  }
  remote->key = key;
  remote->connection_number = connection.number;
  connection.imported.emplace_back(remote, key);
  return key;
}

/// Some endpoint has failed or is closed: see which, and what follows.
void UcxProgress::look_at_endpoints() {
  for (const auto& [number, link] : links_) {
    if (link->connection == nullptr || link->connection->endpoint == nullptr) continue;
    const ucp::Status failure = link->connection->endpoint->failure();
    if (failure != ucp::kOk) fail_link(*link, context_->words(failure), true);
  }
  look_at_closing();
  responder_->settle();
}

}  // namespace kvtier
