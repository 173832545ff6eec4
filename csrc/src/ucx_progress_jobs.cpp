// Transfers on the progress thread: requests out, results in, one end each.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
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

/// Whether memory may change, or be read for a change, while it is under way. What a message asks
/// for is put into memory by our own hand, when the answer is there and the transfer still runs.
bool may_touch(const UcxRequest& request) {
  return request.connection->way == UcxWay::kRdma || request.job->prepared->op == UcxOp::kWrite;
}

}  // namespace

UcxRequest& UcxConnection::take_request() {
  if (free_requests_.empty()) return all_requests_.emplace_back();
  UcxRequest& request = *free_requests_.back();
  free_requests_.pop_back();
  request.remote.clear();
  request.local.clear();
  request.payload.clear();
  return request;
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

/// Ask for what the window has room for. True when more could be asked for at once.
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
  const bool by_messages = connection.way == UcxWay::kMessages;
  if (by_messages && !connection.peers_number) return false;
  std::uint64_t issued = 0;
  std::uint64_t turn = 0;
  while (!link.ready.empty()) {
    if (connection.requests >= options_.window_requests ||
        connection.bytes >= options_.window_bytes) {
      return false;
    }
    if (issued >= kIssueBytes) return true;
    UcxJob& job = *link.ready.front();
    job.connection_number = connection.number;
    const std::uint64_t bytes = by_messages                       ? ask_one(connection, job)
                                : connection.way == UcxWay::kRdma ? issue_one(connection, job)
                                                                  : copy_some(link, job);
    issued += bytes;
    turn += bytes;
    if (job.is_all_asked() || job.failure != 0) {
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

/// One access to a part of the transfer's next piece; gives its bytes.
std::uint64_t UcxProgress::issue_one(UcxConnection& connection, UcxJob& job) {
  const UcxPrepared& prepared = *job.prepared;
  const UcxPiece& piece = prepared.pieces[job.next_piece];
  const std::uint64_t bytes = std::min(piece.length - job.next_offset, options_.request_bytes_max);
  const std::uint64_t remote = piece.remote_address + job.next_offset;
  void* const local = reinterpret_cast<void*>(piece.local_address + job.next_offset);
  const UcxMemory& memory = *prepared.memories[piece.memory];
  UcxRequest& request = connection.take_request();
  request.connection = &connection;
  request.job = &job;
  request.bytes = bytes;
  request.piece = static_cast<std::uint32_t>(job.next_piece);
  request.is_flush = request.is_awaited = false;
  request.is_sending = true;
  job.next_offset += bytes;
  if (job.next_offset == piece.length) {
    ++job.next_piece;
    job.next_offset = 0;
  }
  const ucp::RemoteKey key = key_of(connection, prepared.remotes[piece.remote]);
  if (key == nullptr) {
    fail(job, ECONNRESET, "UCX does not take the key of the peer's memory");
    connection.give_request(request);
    return bytes;
  }
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData | ucp::kOpMemory;
  params.send_callback = &on_request_done;
  params.user_data = &request;
  params.memory = memory.handle();
  take_up(request);
  const ucp::Request sent =
      prepared.op == UcxOp::kRead
          ? library_.get_nbx(connection.handle(), local, bytes, remote, key, &params)
          : library_.put_nbx(connection.handle(), local, bytes, remote, key, &params);
  if (sent == nullptr || ucp::is_error(sent)) {
    note(request, ucp::status_of(sent));
    finish(request);
  }
  return bytes;
}

/// Have the kernel copy some of the transfer's next bytes; gives their number.
std::uint64_t UcxProgress::copy_some(UcxLink& link, UcxJob& job) {
  const UcxPrepared& prepared = *job.prepared;
  copy_.begin(job.next_piece);
  while (!job.is_all_asked() && !copy_.is_full()) {
    const UcxPiece& piece = prepared.pieces[job.next_piece];
    job.next_offset += copy_.add(reinterpret_cast<void*>(piece.local_address + job.next_offset),
                                 reinterpret_cast<void*>(piece.remote_address + job.next_offset),
                                 piece.length - job.next_offset);
    if (job.next_offset != piece.length) continue;
    copy_.end_piece();
    ++job.next_piece;
    job.next_offset = 0;
  }
  if (copy_pool_ == nullptr) copy_pool_ = std::make_unique<ThreadPool>(options_.copy_threads);
  copy_.run(*copy_pool_, *link.process, prepared.op == UcxOp::kRead);
  copy_.for_each([&](std::size_t piece, std::uint64_t bytes, int code) {
    if (code == 0) {
      job.ledger.arrived(piece, bytes);
      job.prepared->arrived_bytes.fetch_add(bytes, std::memory_order_relaxed);
      return;
    }
    if (code == ESRCH) code = ECONNRESET;
    job.ledger.failed(piece, code);
    fail(job, code, "the kernel does not copy: " + std::string(std::strerror(code)));
  });
  return copy_.bytes();
}

/// What was written is at the peer, and not only on its way, once this has ended.
void UcxProgress::flush(UcxConnection& connection, UcxJob& job) {
  UcxRequest& request = connection.take_request();
  request.connection = &connection;
  request.job = &job;
  request.bytes = 0;
  request.is_awaited = false;
  request.is_flush = request.is_sending = true;
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
  params.send_callback = &on_request_done;
  params.user_data = &request;
  take_up(request);
  const ucp::Request sent = library_.ep_flush_nbx(connection.handle(), &params);
  if (sent == nullptr || ucp::is_error(sent)) {
    note(request, ucp::status_of(sent));
    finish(request);
  }
}

void UcxProgress::on_request_done(void* sent, ucp::Status status, void* user_data) {
  UcxRequest& request = *static_cast<UcxRequest*>(user_data);
  UcxProgress& self = *request.connection->progress;
  self.library_.request_free(sent);
  self.note(request, status);
  self.finish(request);
}

/// Count it as under way.
void UcxProgress::take_up(UcxRequest& request) {
  ++requests_;
  ++request.connection->requests;
  request.connection->bytes += request.bytes;
  if (request.job == nullptr) return;
  ++request.job->requests;
  if (may_touch(request)) ++request.job->touching;
}

/// UCX has done with it: hold down what that means for its piece.
void UcxProgress::note(UcxRequest& request, ucp::Status status) {
  request.is_sending = false;
  UcxJob* const job = request.job;
  if (job == nullptr) return;
  const bool by_messages = request.connection->way == UcxWay::kMessages;
  // Of one that is being closed only that it has ended matters: the transfer is told.
  if (job->is_told || request.connection->is_closing) return;
  if (status != ucp::kOk) {
    if (!request.is_flush && !by_messages) job->ledger.failed(request.piece, errno_of(status));
    fail(*job, errno_of(status), context_->words(status));
  } else if (request.is_flush) {
    job->is_flushed = true;
  } else if (!by_messages) {  // else the peer's answer counts
    job->ledger.arrived(request.piece, request.bytes);
    job->prepared->arrived_bytes.fetch_add(request.bytes, std::memory_order_relaxed);
  }
}

void UcxProgress::fail(UcxJob& job, int code, const std::string& words) {
  if (job.failure != 0 || job.is_told) return;
  job.failure = code;
  job.failure_words = words;
  touched_.push_back(job.ticket);
}

/// Give the request back, unless UCX or the peer still has it.
void UcxProgress::finish(UcxRequest& request) {
  if (request.is_sending || request.is_awaited) return;
  UcxConnection& connection = *request.connection;
  --requests_;
  --connection.requests;
  connection.bytes -= request.bytes;
  if (connection.is_closing) has_news_ = true;
  UcxJob* const job = request.job;
  const bool touches = job != nullptr && may_touch(request);
  connection.give_request(request);
  if (job == nullptr) return;
  if (touches) --job->touching;
  if (--job->requests == 0) touched_.push_back(job->ticket);
}

void UcxProgress::settle() {
  do {
    while (!touched_.empty()) {
      const std::vector<std::uint64_t> tickets = std::exchange(touched_, {});
      for (const std::uint64_t ticket : tickets) {
        const auto found = jobs_.find(ticket);
        if (found != jobs_.end()) settle(*found->second);
      }
    }
    if (std::exchange(has_news_, false)) look_at_endpoints();
    look_at_closing();
  } while (!touched_.empty());
}

void UcxProgress::settle(UcxJob& job) {
  if (job.is_told) {
    if (!job.is_quiet_told && job.touching == 0 && !job.is_unsettled) {
      job.is_quiet_told = true;
      completions_->push_quiet(job.ticket);
    }
    if (job.requests == 0 && job.is_quiet_told) forget(job);
    return;
  }
  if (job.failure != 0) leave_ready(job);
  if (job.requests != 0) return;
  if (job.failure != 0) return end(job, job.failure, job.failure_words);
  if (!job.is_all_asked()) return;
  UcxLink& link = *job.prepared->link;
  UcxConnection& connection = *link.connection;
  if (connection.way == UcxWay::kRdma && job.prepared->op == UcxOp::kWrite && !job.is_flushed) {
    flush(connection, job);
    if (job.requests != 0) return;
    if (job.failure != 0) return end(job, job.failure, job.failure_words);
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
  const UcxConnection* const connection = prepared.link->connection.get();
  const bool is_rdma = connection != nullptr && connection->way == UcxWay::kRdma;
  const bool is_sure = !is_rdma || prepared.op == UcxOp::kRead || job.is_flushed;
  const std::uint64_t started = job.started();
  const bool is_quiet = job.touching == 0;
  const std::uint64_t ticket = job.ticket;
  std::vector<std::int64_t> results = job.ledger.close(
      code, is_sure, [&prepared](std::size_t i) { return prepared.pieces[i].length; });
  job.is_told = true;
  job.is_quiet_told = is_quiet;
  {
    const std::lock_guard lock(running_mutex_);
    running_.erase(ticket);
  }
  if (job.requests == 0) {
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
