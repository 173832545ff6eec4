// Transfers on the progress thread: requests out, results in, one end each.
#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "ucx_progress.hpp"

namespace kvtier {
namespace {

constexpr std::uint64_t kIssueBytes = 2 << 20;  // of one link before others have their turn
constexpr std::uint64_t kTurnBytes = 1 << 20;   // of one transfer before the link's next has its

/// A lost peer shows itself in many ways; what is the caller's or this machine's fault in few.
int errno_of(ucp::Status status) {
  switch (status) {
    case ucp::kNoMemory:
      return ENOMEM;
    case ucp::kInvalidParam:
      return EINVAL;
    case ucp::kUnsupported:
      return EOPNOTSUPP;
    default:
      return ECONNRESET;
  }
}

}  // namespace

UcxPart* UcxConnection::take_part() {
  if (free_parts_.empty()) return &parts_.emplace_back();
  UcxPart* const part = free_parts_.back();
  free_parts_.pop_back();
  return part;
}

void UcxProgress::begin(std::shared_ptr<UcxPrepared> prepared, std::uint64_t ticket,
                        Clock::time_point due) {
  UcxLink& link = *prepared->link;
  UcxJob& job = *jobs_.emplace(ticket, std::make_unique<UcxJob>(std::move(prepared), ticket, due))
                     .first->second;
  job.in_jobs = link.jobs.insert(link.jobs.end(), &job);
  if (due <= Clock::now()) return end(job, ETIMEDOUT, "deadline passed");
  if (!link.closed_because.empty()) return end(job, ECONNRESET, link.closed_because);
  deadlines_.add(due, ticket);
  if (std::ranges::find(busy_, &link) == busy_.end()) busy_.push_back(&link);
  job.in_ready = link.ready.insert(link.ready.end(), &job);
}

void UcxProgress::expire() {
  if (deadlines_.is_empty()) return;
  const Clock::time_point now = Clock::now();
  while (const auto ticket = deadlines_.take_due(now)) {
    UcxJob& job = *jobs_.at(*ticket);
    if (!job.is_told) {
      end(job, ETIMEDOUT, "deadline passed");
      continue;
    }
    UcxLink& link = *job.prepared->link;
    // If the link has another connection by now, this one is on its way down already.
    if (link.connection != nullptr && link.connection->number == job.connection_number) {
      fail_link(link, "the peer did not answer", false);
    }
  }
}

/// Give UCX what the window has room for. True when more could go at once.
bool UcxProgress::issue(UcxLink& link) {
  if (link.ready.empty()) return false;
  if (link.connection == nullptr) {
    try {
      open_connection(link);
    } catch (const std::runtime_error& error) {
      fail_link(link, error.what(), false);
      return false;
    }
  }
  UcxConnection& connection = *link.connection;
  wake(*connection.worker);
  std::uint64_t issued = 0;
  std::uint64_t turn = 0;
  while (!link.ready.empty()) {
    if (connection.requests >= options_.window_requests ||
        connection.bytes >= options_.window_bytes) {
      return false;
    }
    if (issued >= kIssueBytes) return true;
    UcxJob& job = *link.ready.front();
    const std::uint64_t bytes = issue_one(connection, job);
    issued += bytes;
    turn += bytes;
    if (job.is_all_given() || job.failure != 0) {
      leave_ready(job);
      if (job.requests == 0) touched_.push_back(job.ticket);
      turn = 0;
    } else if (turn >= kTurnBytes) {
      link.ready.splice(link.ready.end(), link.ready, *job.in_ready);
      turn = 0;
    }
  }
  return false;
}

/// One request of the transfer's next piece; gives its bytes.
std::uint64_t UcxProgress::issue_one(UcxConnection& connection, UcxJob& job) {
  const UcxPrepared& prepared = *job.prepared;
  const std::uint32_t index = static_cast<std::uint32_t>(job.next_piece);
  const UcxPiece& piece = prepared.pieces[index];
  const std::uint64_t bytes = std::min(piece.length - job.next_offset, options_.request_bytes_max);
  const std::uint64_t remote = piece.remote_address + job.next_offset;
  job.connection_number = connection.number;
  void* const local = reinterpret_cast<void*>(piece.local_address + job.next_offset);
  job.next_offset += bytes;
  if (job.next_offset == piece.length) {
    ++job.next_piece;
    job.next_offset = 0;
  }
  const ucp::RemoteKey key = key_of(connection, prepared.remotes[piece.remote]);
  if (key == nullptr) {
    note_part(job, index, bytes, ucp::kUnreachable);
    return bytes;
  }
  UcxPart* const part = connection.take_part();
  *part = {&connection, &job, bytes, index};
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData | ucp::kOpMemory;
  params.send_callback = &on_request_done;
  params.user_data = part;
  params.memory = prepared.memories[piece.memory]->handle();
  const ucp::Request request =
      prepared.op == UcxOp::kRead
          ? library_.get_nbx(connection.endpoint, local, bytes, remote, key, &params)
          : library_.put_nbx(connection.endpoint, local, bytes, remote, key, &params);
  if (request == nullptr || ucp::is_error(request)) {
    connection.give_part(part);
    note_part(job, index, bytes, ucp::status_of(request));
    return bytes;
  }
  ++job.requests;
  ++requests_;
  ++connection.requests;
  connection.bytes += bytes;
  return bytes;
}

/// What was written is at the peer, and not only on its way, once this has ended.
void UcxProgress::flush(UcxConnection& connection, UcxJob& job) {
  UcxPart* const part = connection.take_part();
  *part = {&connection, &job, 0, UcxPart::kFlush};
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
  params.send_callback = &on_request_done;
  params.user_data = part;
  const ucp::Request request = library_.ep_flush_nbx(connection.endpoint, &params);
  wake(*connection.worker);
  if (request == nullptr || ucp::is_error(request)) {
    connection.give_part(part);
    note_part(job, UcxPart::kFlush, 0, ucp::status_of(request));
    return;
  }
  ++job.requests;
  ++requests_;
  ++connection.requests;
}

void UcxProgress::on_request_done(void* request, ucp::Status status, void* user_data) {
  UcxPart* const part = static_cast<UcxPart*>(user_data);
  UcxConnection& connection = *part->connection;
  UcxProgress& self = *connection.progress;
  UcxJob& job = *part->job;
  self.library_.request_free(request);
  --self.requests_;
  --connection.requests;
  connection.bytes -= part->bytes;
  // Of one that is being closed, only that the request has ended matters: the transfer is told.
  if (!connection.is_closing) self.note_part(job, part->piece, part->bytes, status);
  connection.give_part(part);
  if (--job.requests == 0) self.touched_.push_back(job.ticket);
}

void UcxProgress::note_part(UcxJob& job, std::uint32_t piece, std::uint64_t bytes,
                            ucp::Status status) {
  if (job.is_told) return;
  if (status == ucp::kOk) {
    if (piece == UcxPart::kFlush) {
      job.is_flushed = true;
    } else {
      job.ledger.arrived(piece, bytes);
      job.prepared->arrived_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    return;
  }
  if (piece != UcxPart::kFlush) job.ledger.failed(piece, errno_of(status));
  if (job.failure == 0) {
    job.failure = errno_of(status);
    job.failure_status = status;
  }
}

void UcxProgress::settle() {
  while (!touched_.empty()) {
    const std::vector<std::uint64_t> tickets = std::exchange(touched_, {});
    for (const std::uint64_t ticket : tickets) {
      const auto found = jobs_.find(ticket);
      if (found != jobs_.end()) settle(*found->second);
    }
  }
  for (const std::uint64_t number : std::exchange(failed_, {})) {
    const auto found = links_.find(number);
    if (found == links_.end() || found->second->connection == nullptr) continue;
    UcxLink& link = *found->second;
    const ucp::Status failure = link.connection->failure;
    if (failure != ucp::kOk) fail_link(link, context_->words(failure), true);
  }
  sweep_closing();
}

void UcxProgress::settle(UcxJob& job) {
  if (job.requests != 0) return;
  if (job.is_told) {
    const std::uint64_t ticket = job.ticket;
    forget(job);
    completions_->push_quiet(ticket);
    return;
  }
  if (job.failure != 0) {
    leave_ready(job);
    return end(job, job.failure, context_->words(job.failure_status));
  }
  if (!job.is_all_given()) return;
  UcxLink& link = *job.prepared->link;
  if (job.prepared->op == UcxOp::kWrite && !job.is_flushed) {
    flush(*link.connection, job);
    if (job.requests != 0) return;
    if (job.failure != 0) return end(job, job.failure, context_->words(job.failure_status));
  }
  // While it lives, its number is no other's: then the bytes were its own all along.
  if (link.process != nullptr && !link.process->is_alive()) {
    return fail_link(link, "the peer's process has ended", true);
  }
  end(job, EIO, "");
}

/// Tell the end: pieces that are whole, and -`code` for the others.
void UcxProgress::end(UcxJob& job, int code, std::string detail) {
  leave_ready(job);
  deadlines_.remove(job.due, job.ticket);
  const UcxPrepared& prepared = *job.prepared;
  const bool is_sure = prepared.op == UcxOp::kRead || job.is_flushed;
  const std::uint64_t started = job.started();
  const bool is_quiet = job.requests == 0;
  const std::uint64_t ticket = job.ticket;
  std::vector<std::int64_t> results = job.ledger.close(
      code, is_sure, [&prepared](std::size_t i) { return prepared.pieces[i].length; });
  job.is_told = true;
  {
    const std::lock_guard lock(running_mutex_);
    running_.erase(ticket);
  }
  if (is_quiet) {
    forget(job);
  } else {
    job.due = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(options_.drain_s));
    deadlines_.add(job.due, ticket);
  }
  completions_->push({ticket, std::move(results), started, is_quiet, std::move(detail)});
}

void UcxProgress::forget(UcxJob& job) {
  deadlines_.remove(job.due, job.ticket);
  job.prepared->link->jobs.erase(job.in_jobs);
  jobs_.erase(job.ticket);
}

void UcxProgress::leave_ready(UcxJob& job) {
  if (!job.in_ready) return;
  job.prepared->link->ready.erase(*job.in_ready);
  job.in_ready.reset();
}

}  // namespace kvtier
