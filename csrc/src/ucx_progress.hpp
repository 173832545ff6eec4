// The thread that owns UCX's workers: asks for what transfers want, hears how that ends, and
// sleeps.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "command_queue.hpp"
#include "deadlines.hpp"
#include "kvtier/completions.hpp"
#include "kvtier/thread_pool.hpp"
#include "process_copy.hpp"
#include "ucx_link.hpp"
#include "ucx_responder.hpp"

namespace kvtier {

class UcxProgress {
 public:
  /// Starts the thread. @throws std::runtime_error UCX gives no worker
  UcxProgress(std::shared_ptr<const UcxContext> context, const UcxOptions& options,
              std::shared_ptr<Completions> completions);
  ~UcxProgress();
  UcxProgress(const UcxProgress&) = delete;
  UcxProgress& operator=(const UcxProgress&) = delete;

  // Any thread -----------------------------------------------------------------------------------

  const std::string& address() const { return address_; }
  std::uint64_t new_memory_number() { return next_memory_.fetch_add(1); }
  void offer(const std::shared_ptr<UcxMemory>& memory);
  void withdraw(const UcxMemory& memory);
  std::shared_ptr<UcxLink> connect(const std::string& address, std::int64_t host_pid);
  std::shared_ptr<UcxRemote> import_remote(const std::shared_ptr<UcxLink>& link,
                                           const std::string& packed);
  void forget_remote(const std::shared_ptr<UcxRemote>& remote);
  void disconnect(const std::shared_ptr<UcxLink>& link);
  void start(const std::shared_ptr<UcxPrepared>& prepared, std::uint64_t ticket, double deadline_s);
  void cancel(std::uint64_t ticket);
  std::uint64_t progress(std::uint64_t ticket) const;
  void close();

 private:
  using Clock = Deadlines::Clock;

  // The thread -----------------------------------------------------------------------------------

  void run();
  void run_once();
  void shut_down();
  bool progress_worker();
  bool arm_worker();
  void look_at_fds(int timeout_ms);
  int sleep_ms() const;
  void watch(int fd, std::uint64_t key);

  // Transfers: ucx_progress_jobs.cpp
  void begin(std::shared_ptr<UcxPrepared> prepared, std::uint64_t ticket, Clock::time_point due);
  void expire();
  bool issue(UcxLink& link);
  std::uint64_t issue_one(UcxConnection& connection, UcxJob& job);
  std::uint64_t copy_some(UcxLink& link, UcxJob& job);
  void flush(UcxConnection& connection, UcxJob& job);
  void take_up(UcxRequest& request);
  void note(UcxRequest& request, ucp::Status status);
  void fail(UcxJob& job, int code, const std::string& words);
  void finish(UcxRequest& request);
  void settle();
  void settle(UcxJob& job);
  void end(UcxJob& job, int code, std::string detail);
  void forget(UcxJob& job);
  void leave_ready(UcxJob& job);
  static void on_request_done(void* request, ucp::Status status, void* user_data);

  // Messages to and from peers whose memory is asked for: ucx_progress_messages.cpp
  void greet(UcxConnection& connection);
  void say_bye(UcxConnection& connection);
  std::uint64_t ask_one(UcxConnection& connection, UcxJob& job);
  void send(UcxRequest& request);
  void on_welcome(const UcxHead& head);
  void settle_before(const UcxConnection& connection);
  void on_answer(const UcxHead& head, std::span<const std::byte> payload);
  void give_up_awaited(UcxConnection& connection);
  static ucp::Status on_message(void* self, const void* header, std::size_t header_length,
                                void* payload, std::size_t length, const ucp::AmReceived* received);

  // Links: ucx_progress_links.cpp
  void open_connection(UcxLink& link);
  UcxWay way_of(const UcxEndpoint& endpoint) const;
  void close_connection(UcxLink& link, bool gently);
  void settle_all(UcxLink& link);
  void look_at_closing();
  void fail_link(UcxLink& link, const std::string& why, bool for_good);
  void release_keys(UcxConnection& connection);
  ucp::RemoteKey key_of(UcxConnection& connection, const std::shared_ptr<UcxRemote>& remote);
  void look_at_endpoints();

  /// Run `function` on the thread and give what it gives. @throws also what it throws
  template <typename Function>
  auto call(Function function) -> decltype(function());

  const std::shared_ptr<const UcxContext> context_;
  const ucp::Library& library_;
  const UcxOptions options_;
  const std::shared_ptr<Completions> completions_;
  CommandQueue commands_;
  int epoll_fd_;
  std::string address_;
  std::string worker_address_;
  const std::array<std::uint8_t, 16> token_;  // in our memory, for `ProcessMark`
  std::atomic<std::uint64_t> next_memory_;

  mutable std::mutex running_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<UcxPrepared>> running_;  // by ticket

  bool has_news_ = false;  // of endpoints: some failed or closed
  std::shared_ptr<UcxWorker> worker_;
  std::unique_ptr<UcxResponder> responder_;
  std::unordered_map<std::uint64_t, std::shared_ptr<UcxLink>> links_;  // by number
  std::vector<UcxLink*> busy_;  // links with transfers that are ready; may hold some without
  std::unordered_map<std::uint64_t, UcxConnection*> connections_;  // of messages, by number
  std::vector<std::unique_ptr<UcxConnection>> closing_;
  std::unordered_map<std::uint64_t, std::unique_ptr<UcxJob>> jobs_;  // by ticket
  std::vector<std::uint64_t> touched_;  // tickets that `settle` should look at
  Deadlines deadlines_;
  std::uint64_t link_count_ = 0;
  std::uint64_t next_connection_;
  std::uint64_t next_request_ = 0;
  std::uint32_t requests_ = 0;  // under way, of all links
  std::uint32_t rounds_ = 0;
  std::uint32_t idle_rounds_ = 0;  // since something moved, with a worker that does not sleep
  ProcessCopy copy_;               // the one at hand
  std::unique_ptr<ThreadPool> copy_pool_;
  bool is_shut_ = false;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace kvtier
