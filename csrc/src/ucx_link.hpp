// What the progress thread keeps of links and transfers. All of it is that thread's alone, except
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
#include <unordered_map>
#include <utility>
#include <vector>

#include "deadlines.hpp"
#include "kvtier/ucx_engine.hpp"
#include "piece_ledger.hpp"
#include "process_watch.hpp"
#include "ucx_endpoint.hpp"
#include "ucx_messages.hpp"

namespace kvtier {

class UcxProgress;
struct UcxConnection;
struct UcxJob;

/// How a connection reaches the peer's memory; see `UcxEngine`.
enum class UcxWay { kHost, kRdma, kMessages };

/// What UCX or the peer has to do for one transfer, found again through its `user_data`.
struct UcxRequest {
  UcxConnection* connection;
  UcxJob* job;          ///< null: a greeting
  std::uint64_t bytes;  ///< of all its ranges
  std::uint32_t piece;  ///< of the first; a message's other ranges belong to those that follow
  bool is_flush;        ///< moves nothing: what was written before is in place when it has ended
  bool is_sending;      ///< UCX has it
  bool is_awaited;      ///< the peer has not answered
  UcxHead head;
  std::vector<UcxRange> remote;
  std::vector<ucp::Iov> local;
  std::vector<ucp::Iov> payload;  ///< what is sent: `remote`, and in a write `local`
};

/// An endpoint and all that hangs on it; a link has a new one after each reset.
struct UcxConnection {
  std::uint64_t number;  ///< of no other connection
  UcxProgress* progress;
  UcxLink* link;  ///< as long as it is the link's
  UcxWay way;
  std::unique_ptr<UcxEndpoint> endpoint;  ///< none with kHost
  /// On its way down: requests still end, but what they say counts for nothing.
  bool is_closing = false;
  std::shared_ptr<UcxLink> closing_link;      ///< then it is kept, until `link` is not needed
  Deadlines::Clock::time_point good_bye_due;  ///< then, if the peer has not answered, by force
  bool is_bye_said = false;
  /// kMessages: what the peer calls us; until then nothing can be asked for.
  std::optional<std::uint64_t> peers_number;
  std::uint32_t requests = 0;
  std::uint64_t bytes = 0;
  /// kMessages: what the peer has not answered, by its number.
  std::unordered_map<std::uint64_t, UcxRequest*> awaited;
  /// Keys that were made for this endpoint, and whose memory they open.
  std::vector<std::pair<std::shared_ptr<UcxRemote>, ucp::RemoteKey>> imported;

  ucp::Endpoint handle() const { return endpoint->handle(); }
  UcxRequest& take_request();
  void give_request(UcxRequest& request) { free_requests_.push_back(&request); }

 private:
  std::deque<UcxRequest> all_requests_;  // as many as were ever in flight: the window bounds it
  std::vector<UcxRequest*> free_requests_;
};

class UcxLink : public std::enable_shared_from_this<UcxLink> {
 public:
  UcxLink(std::uint64_t number, std::uint64_t line, std::string address,
          std::unique_ptr<ProcessWatch> process)
      : number(number), line(line), address(std::move(address)), process(std::move(process)) {}

  const std::uint64_t number;                   // any thread; from 1 on
  const std::uint64_t line;                     // any thread; of no other link of any engine
  const std::string address;                    // any thread
  const std::unique_ptr<ProcessWatch> process;  // any thread; null: not reached as a process
  std::unique_ptr<UcxConnection> connection;
  /// Transfers with pieces not yet asked for, in turn.
  std::list<UcxJob*> ready;
  /// All transfers of which requests may be under way.
  std::list<UcxJob*> jobs;
  /// Why nothing goes over it any more; empty while it can be used.
  std::string closed_because;
};

class UcxRemote {
 public:
  /// @throws std::runtime_error `packed` is not what `UcxMemory::pack` gives
  UcxRemote(std::shared_ptr<UcxLink> link, const std::string& packed);

  const std::shared_ptr<UcxLink> link;  // any thread
  std::uint64_t number;                 // any thread, as the rest down to `key`
  std::string packed_key;
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

/// A started transfer, until no request of it is under way.
struct UcxJob {
  UcxJob(std::shared_ptr<UcxPrepared> its_prepared, std::uint64_t ticket,
         Deadlines::Clock::time_point due)
      : prepared(std::move(its_prepared)),
        ticket(ticket),
        due(due),
        ledger(prepared->pieces.size()) {}

  std::shared_ptr<UcxPrepared> prepared;
  std::uint64_t ticket;
  /// When it must end; after that, when its requests must have ended.
  Deadlines::Clock::time_point due;
  PieceLedger ledger;
  std::size_t next_piece = 0;
  std::uint64_t next_offset = 0;
  std::uint32_t requests = 0;  ///< under way
  std::uint32_t touching = 0;  ///< those of them that may touch memory, here or there
  /// Bytes of a write may still lie with the peer, on a connection that is no more. A new one's
  /// greeting settles it: the peer drops what is left of the old.
  bool is_unsettled = false;
  std::uint64_t connection_number = 0;  ///< the only one its requests went over; 0 before
  int failure = 0;                      ///< errno of the first request that failed
  std::string failure_words;
  bool is_flushed = false;
  bool is_told = false;
  bool is_quiet_told = false;
  std::list<UcxJob*>::iterator in_jobs{};
  std::optional<std::list<UcxJob*>::iterator> in_ready{};

  std::uint64_t started() const { return next_piece + (next_offset != 0 ? 1 : 0); }
  bool is_all_asked() const { return next_piece == prepared->pieces.size(); }
};

}  // namespace kvtier
