// Asking a peer's engine for bytes, and sending it some: the side that reads and writes.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "ucx_progress.hpp"

namespace kvtier {

/// Say who we are; the answer has the number to ask by.
void UcxProgress::greet(UcxConnection& connection) {
  UcxRequest& request = connection.take_request();
  request.connection = &connection;
  request.job = nullptr;
  request.bytes = 0;
  request.is_flush = request.is_awaited = false;
  request.head = {UcxMessage::kHello, 0, connection.number, connection.link->line};
  request.payload = {{worker_address_.data(), worker_address_.size()}};
  take_up(request);
  send(request);
}

/// Let the peer forget us; its answer comes after all that it was still sent.
void UcxProgress::say_bye(UcxConnection& connection) {
  connection.is_bye_said = true;
  UcxRequest& request = connection.take_request();
  request.connection = &connection;
  request.job = nullptr;
  request.bytes = 0;
  request.is_flush = request.is_awaited = false;
  request.head = {UcxMessage::kBye, 0, *connection.peers_number, 0};
  take_up(request);
  send(request);
}

/// One message for as many of the transfer's next bytes as it takes; gives their number.
std::uint64_t UcxProgress::ask_one(UcxConnection& connection, UcxJob& job) {
  const UcxPrepared& prepared = *job.prepared;
  const bool is_read = prepared.op == UcxOp::kRead;
  UcxRequest& request = connection.take_request();
  request.connection = &connection;
  request.job = &job;
  request.bytes = 0;
  request.piece = static_cast<std::uint32_t>(job.next_piece);
  request.is_flush = false;
  request.is_awaited = true;
  while (!job.is_all_asked() && request.remote.size() < kUcxRangesMax &&
         request.bytes < options_.message_bytes_max) {
    const UcxPiece& piece = prepared.pieces[job.next_piece];
    const std::uint64_t bytes =
        std::min(piece.length - job.next_offset, options_.message_bytes_max - request.bytes);
    request.remote.push_back(
        {prepared.remotes[piece.remote]->number, piece.remote_address + job.next_offset, bytes});
    request.local.push_back(
        {reinterpret_cast<void*>(piece.local_address + job.next_offset), bytes});
    request.bytes += bytes;
    job.next_offset += bytes;
    if (job.next_offset == piece.length) {
      ++job.next_piece;
      job.next_offset = 0;
    }
  }
  request.head = {is_read ? UcxMessage::kGet : UcxMessage::kPut,
                  static_cast<std::uint32_t>(request.remote.size()), *connection.peers_number,
                  ++next_request_};
  request.payload.push_back({request.remote.data(), request.remote.size() * sizeof(UcxRange)});
  if (!is_read) {
    request.payload.insert(request.payload.end(), request.local.begin(), request.local.end());
  }
  const std::uint64_t bytes = request.bytes;
  connection.awaited.emplace(request.head.request, &request);
  take_up(request);
  send(request);
  return bytes;
}

void UcxProgress::send(UcxRequest& request) {
  request.is_sending = true;
  const ucp::Request sent = send_message(library_, request.connection->handle(), request.head,
                                         request.payload, &on_request_done, &request);
  if (sent != nullptr && !ucp::is_error(sent)) return;
  if (sent != nullptr && request.is_awaited) {
    request.connection->awaited.erase(request.head.request);
    request.is_awaited = false;
  }
  note(request, ucp::status_of(sent));
  finish(request);
}

ucp::Status UcxProgress::on_message(void* argument, const void* header, std::size_t header_length,
                                    void* data, std::size_t length,
                                    const ucp::AmReceived* received) {
  UcxProgress& self = *static_cast<UcxProgress*>(argument);
  UcxHead head;
  // One that comes in another form than ours is not ours.
  if (header_length != sizeof head || (received->attributes & ucp::kAmReceivedRendezvous) != 0) {
    return ucp::kOk;
  }
  std::memcpy(&head, header, sizeof head);
  const std::span<const std::byte> payload(static_cast<const std::byte*>(data), length);
  switch (head.message) {
    case UcxMessage::kHello:
      self.responder_->on_hello(head, payload);
      break;
    case UcxMessage::kGet:
      self.responder_->on_get(head, payload);
      break;
    case UcxMessage::kPut:
      self.responder_->on_put(head, payload);
      break;
    case UcxMessage::kBye:
      self.responder_->on_bye(head);
      break;
    case UcxMessage::kGone:
      if (const auto found = self.connections_.find(head.link);
          found != self.connections_.end() && found->second->is_closing) {
        found->second->good_bye_due = {};
      }
      break;
    case UcxMessage::kWelcome:
      self.on_welcome(head);
      break;
    case UcxMessage::kData:
    case UcxMessage::kPutDone:
      self.on_answer(head, payload);
      break;
  }
  return ucp::kOk;
}

void UcxProgress::on_welcome(const UcxHead& head) {
  const auto found = connections_.find(head.link);
  if (found == connections_.end()) return;
  UcxConnection& connection = *found->second;
  connection.peers_number = head.request;
  if (!connection.is_closing) settle_before(connection);
}

/// Nothing that went over earlier connections of the link can change memory any more.
void UcxProgress::settle_before(const UcxConnection& connection) {
  for (UcxJob* const job : connection.link->jobs) {
    if (!job->is_unsettled || job->connection_number == connection.number) continue;
    job->is_unsettled = false;
    touched_.push_back(job->ticket);
  }
}

/// Bytes that were asked for, or word that those sent are in place, or neither and why.
void UcxProgress::on_answer(const UcxHead& head, std::span<const std::byte> payload) {
  const auto connection = connections_.find(head.link);
  if (connection == connections_.end()) return;
  auto& awaited = connection->second->awaited;
  const auto found = awaited.find(head.request);
  if (found == awaited.end()) return;
  UcxRequest& request = *found->second;
  UcxJob& job = *request.job;
  awaited.erase(found);
  request.is_awaited = false;
  // Once the transfer is told its memory is its owner's again: what comes late is dropped.
  if (!job.is_told) {
    const bool is_data = head.message == UcxMessage::kData;
    int code = static_cast<int>(head.count);
    if (code == 0 && is_data != (job.prepared->op == UcxOp::kRead)) code = EPROTO;
    if (code == 0 && is_data && payload.size() != request.bytes) code = EPROTO;
    for (std::size_t i = 0; i < request.local.size(); ++i) {
      const ucp::Iov& part = request.local[i];
      const std::size_t piece = request.piece + i;
      if (code != 0) {
        job.ledger.failed(piece, code);
        continue;
      }
      if (is_data) {
        std::memcpy(part.buffer, payload.data(), part.length);
        payload = payload.subspan(part.length);
      }
      job.ledger.arrived(piece, part.length);
    }
    if (code == 0) {
      job.prepared->arrived_bytes.fetch_add(request.bytes, std::memory_order_relaxed);
    } else {
      fail(job, code, "the peer refused: " + std::string(std::strerror(code)));
    }
  }
  finish(request);
}

/// No answer counts any more.
void UcxProgress::give_up_awaited(UcxConnection& connection) {
  const auto awaited = std::exchange(connection.awaited, {});
  for (const auto& [number, request] : awaited) {
    request->is_awaited = false;
    if (request->job->prepared->op == UcxOp::kWrite) request->job->is_unsettled = true;
    finish(*request);
  }
}

}  // namespace kvtier
