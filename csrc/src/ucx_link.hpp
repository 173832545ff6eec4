// What the progress thread keeps of peers and transfers. All of it is that thread's alone, except
// what a comment says of.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deadlines.hpp"
#include "kvtier/ucx_engine.hpp"
#include "piece_ledger.hpp"
#include "process_watch.hpp"
#include "ucx_context.hpp"

namespace kvtier {

class UcxProgress;
struct UcxConnection;
struct UcxJob;

/// A UCX worker and whether its fd is what we sleep on.
struct UcxWorker {
  /// @throws std::runtime_error UCX gives none
  explicit UcxWorker(std::shared_ptr<const UcxContext> context);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  std::shared_ptr<const UcxContext> context;
  ucp::Worker handle = nullptr;
  int efd = -1;
  /// To be progressed; else it is armed and its fd becomes readable when it should be.
  bool is_awake = true;
};

/// One request that UCX has, found again through its `user_data`.
struct UcxPart {
  static constexpr std::uint32_t kFlush = UINT32_MAX;

  UcxConnection* connection;
  UcxJob* job;
  std::uint64_t bytes;
  std::uint32_t piece;  ///< or kFlush
};

/// An endpoint and all that hangs on it; a link has a new one after each reset.
struct UcxConnection {
  std::uint64_t number;  ///< no other of this engine has it
  UcxProgress* progress;
  UcxLink* link;  ///< as long as it is the link's; its callbacks are not asked later
  std::shared_ptr<UcxWorker> worker;
  ucp::Endpoint endpoint = nullptr;
  /// What the transport reported; the link is failed once its callback has returned.
  ucp::Status failure = ucp::kOk;
  /// On its way down: requests still end, but what they say counts for nothing.
  bool is_closing = false;
  bool is_closed = false;
  std::uint32_t requests = 0;
  std::uint64_t bytes = 0;
  /// Keys that were made for this endpoint, and whose memory they open.
  std::vector<std::pair<std::shared_ptr<UcxRemote>, ucp::RemoteKey>> imported;

  UcxPart* take_part();
  void give_part(UcxPart* part) { free_parts_.push_back(part); }

 private:
  std::deque<UcxPart> parts_;  // as many as were ever in flight at a time: the window bounds it
  std::vector<UcxPart*> free_parts_;
};

class UcxLink {
 public:
  UcxLink(std::uint64_t number, std::string address, std::unique_ptr<ProcessWatch> process)
      : number(number), address(std::move(address)), process(std::move(process)) {}

  const std::uint64_t number;                   // any thread; from 1 on
  const std::string address;                    // any thread
  const std::unique_ptr<ProcessWatch> process;  // any thread; none across a network
  std::unique_ptr<UcxConnection> connection;
  /// Transfers with pieces not yet given to UCX, in turn.
  std::list<UcxJob*> ready;
  /// All transfers whose requests UCX may have.
  std::list<UcxJob*> jobs;
  /// Why nothing goes over it any more; empty while it can be used.
  std::string closed_because;
};

class UcxRemote {
 public:
  UcxRemote(std::shared_ptr<UcxLink> link, std::string packed)
      : link(std::move(link)), packed(std::move(packed)) {}

  const std::shared_ptr<UcxLink> link;  // any thread
  const std::string packed;             // any thread
  ucp::RemoteKey key = nullptr;
  std::uint64_t connection_number = 0;  ///< which `key` was made for; 0 for none
};

class UcxPrepared {
 public:
  UcxOp op;
  std::shared_ptr<UcxLink> link;
  std::vector<std::shared_ptr<UcxMemory>> memories;
  std::vector<std::shared_ptr<UcxRemote>> remotes;
  std::vector<UcxPiece> pieces;
  std::atomic<std::uint64_t> arrived_bytes = 0;  // any thread
};

/// A started transfer, until its memory is quiet.
struct UcxJob {
  UcxJob(std::shared_ptr<UcxPrepared> prepared, std::uint64_t ticket,
         Deadlines::Clock::time_point due)
      : prepared(std::move(prepared)),
        ticket(ticket),
        due(due),
        ledger(this->prepared->pieces.size()) {}

  std::shared_ptr<UcxPrepared> prepared;
  std::uint64_t ticket;
  /// When it must end; after that, when its requests must have drained.
  Deadlines::Clock::time_point due;
  PieceLedger ledger;
  std::size_t next_piece = 0;
  std::uint64_t next_offset = 0;
  std::uint32_t requests = 0;
  std::uint64_t connection_number = 0;  ///< the only one its requests went over; 0 before
  int failure = 0;                      ///< errno of the first request that failed
  ucp::Status failure_status = ucp::kOk;
  bool is_flushed = false;
  bool is_told = false;
  std::list<UcxJob*>::iterator in_jobs{};
  std::optional<std::list<UcxJob*>::iterator> in_ready{};

  std::uint64_t started() const { return next_piece + (next_offset != 0 ? 1 : 0); }
  bool is_all_given() const { return next_piece == prepared->pieces.size(); }
};

}  // namespace kvtier
