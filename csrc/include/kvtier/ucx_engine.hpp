// Transfers to peers through UCX: RDMA, copies between processes of a host, messages over TCP.
//
// One thread of the engine owns everything of UCX that is not thread-safe. Other threads hand it
// commands and never wait for bytes or for a peer; it sleeps when nothing moves.
//
// There are three ways to a peer, all with the same words around them:
// - host: the kernel copies between the two processes, without UCX. Its own way to do so (cma)
// needs
//   endpoints that do not handle errors, and there is no safe way to be rid of one of those when
//   the peer stops or dies: what is queued on it ends in an assertion.
// - RDMA: the network reads and writes the peer's memory.
// - messages: the peer's engine sends what is asked for, and stores what it is sent. UCX would
//   imitate one-sided access here, but a process whose memory is read so ends with abort() when its
//   reader goes away. Both engines check every address against what is registered.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvtier/completions.hpp"

namespace kvtier {

struct UcxOptions {
  /// Where to find UCX if the system has none; empty: nowhere else.
  std::string wheel_path;
  /// Settings of UCX, name without `UCX_` and value; those of the user's environment win.
  std::vector<std::pair<std::string, std::string>> settings;
  /// Whether the kernel is asked to copy from and to processes of this host.
  bool may_copy_on_host = true;
  /// Threads for that, the engine's own included.
  std::uint32_t copy_threads = 2;
  /// Per link: what is in flight at a time.
  std::uint64_t window_bytes = std::uint64_t{8} << 20;
  std::uint32_t window_requests = 128;
  /// Most bytes of one request to a network that reaches into memory by itself.
  std::uint64_t request_bytes_max = std::uint64_t{1} << 20;
  /// Most bytes of one message; what UCX's buffers hold in one piece is quickest.
  std::uint64_t message_bytes_max = std::uint64_t{1} << 20;
  /// How long an ended transfer's requests may take to drain before its link is reset.
  double drain_s = 1.0;
};

/// Registered memory of this process; stays so until `unmap`, or until the engine is closed.
class UcxMemory;
/// A peer's memory, as seen through one link.
class UcxRemote;
/// The way to one peer.
class UcxLink;
/// What a transfer moves, checked and copied once.
class UcxPrepared;

enum class UcxOp { kRead, kWrite };

/// One piece of a transfer; indices into the lists given beside.
struct UcxPiece {
  std::uint64_t local_address;
  std::uint64_t remote_address;
  std::uint64_t length;
  std::uint32_t memory;
  std::uint32_t remote;
};

/// Any thread, except that the destructor runs last.
class UcxEngine {
 public:
  /// @throws ucp::Missing (a std::runtime_error) UCX is not to be had
  /// @throws std::runtime_error it cannot work here
  UcxEngine(const UcxOptions& options, std::shared_ptr<Completions> completions);
  ~UcxEngine();
  UcxEngine(const UcxEngine&) = delete;
  UcxEngine& operator=(const UcxEngine&) = delete;

  const std::string& version() const;
  const std::string& library_path() const;
  /// What UCX can use here, as `transport/device`.
  const std::vector<std::string>& transports() const;
  bool has_rdma() const;

  /// How `connect` elsewhere reaches this engine.
  const std::string& address() const;

  /// @throws std::runtime_error the network does not take this memory
  std::shared_ptr<UcxMemory> map(std::uint64_t address, std::uint64_t length, bool is_writable);
  /// No transfer of this engine may use it any more. If peers are being sent parts of it, they are
  /// cut off first.
  void unmap(const std::shared_ptr<UcxMemory>& memory);
  /// What a peer needs to reach the memory.
  static std::string pack(const UcxMemory& memory);

  /// `host_pid` is the peer's process on this host, or -1: then it is across a network. One on this
  /// host is watched, and what is in flight ends when it does.
  ///
  /// @throws std::runtime_error UCX finds no way to `address`, or the process is another or gone
  std::shared_ptr<UcxLink> connect(const std::string& address, std::int64_t host_pid);
  /// @throws std::runtime_error not what `pack` gives, or the link is closed
  std::shared_ptr<UcxRemote> import_remote(const std::shared_ptr<UcxLink>& link,
                                           const std::string& packed);
  void forget_remote(const std::shared_ptr<UcxRemote>& remote);
  /// What is in flight ends with -ECONNRESET, and so does what is started later.
  void disconnect(const std::shared_ptr<UcxLink>& link);

  /// @throws std::invalid_argument an index is out of range, or a remote is of another link
  static std::shared_ptr<UcxPrepared> prepare(UcxOp op, std::shared_ptr<UcxLink> link,
                                              std::vector<std::shared_ptr<UcxMemory>> memories,
                                              std::vector<std::shared_ptr<UcxRemote>> remotes,
                                              std::vector<UcxPiece> pieces);
  /// Begin; the end comes through the completions, by `deadline_s` from now.
  ///
  /// When requests have not ended `drain_s` after that, the connection is reset: other transfers on
  /// it end with -ECONNRESET, and the next one connects anew. A link whose connection failed by
  /// itself, or whose process has ended, stays failed.
  /// @throws std::invalid_argument the ticket is in flight
  void start(const std::shared_ptr<UcxPrepared>& prepared, std::uint64_t ticket, double deadline_s);
  void cancel(std::uint64_t ticket);
  /// Bytes of a running transfer that have arrived.
  std::uint64_t progress(std::uint64_t ticket) const;

  /// End everything with -ECANCELED and release all but what `UcxMemory`s hold. Again, it does
  /// nothing.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvtier
