// The thread that owns UCX's workers: gives them requests, hears how those end, and sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "command_queue.hpp"
#include "deadlines.hpp"
#include "kvtier/completions.hpp"
#include "ucx_link.hpp"

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
  std::shared_ptr<UcxLink> connect(const std::string& address,
                                   std::unique_ptr<ProcessWatch> process);
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
  bool progress_workers();
  bool arm_workers();
  void look_at_fds(int timeout_ms);
  int sleep_ms() const;
  void watch(int fd, std::uint64_t key);
  void wake(UcxWorker& worker);

  // Transfers: ucx_progress_jobs.cpp
  void begin(std::shared_ptr<UcxPrepared> prepared, std::uint64_t ticket, Clock::time_point due);
  void expire();
  bool issue(UcxLink& link);
  std::uint64_t issue_one(UcxConnection& connection, UcxJob& job);
  void flush(UcxConnection& connection, UcxJob& job);
  void settle();
  void settle(UcxJob& job);
  void end(UcxJob& job, int code, std::string detail);
  void forget(UcxJob& job);
  void leave_ready(UcxJob& job);
  void note_part(UcxJob& job, std::uint32_t piece, std::uint64_t bytes, ucp::Status status);
  static void on_request_done(void* request, ucp::Status status, void* user_data);

  // Links: ucx_progress_links.cpp
  void open_connection(UcxLink& link);
  void close_connection(UcxLink& link);
  void fail_link(UcxLink& link, const std::string& why, bool for_good);
  void release_keys(UcxConnection& connection);
  ucp::RemoteKey key_of(UcxConnection& connection, const std::shared_ptr<UcxRemote>& remote);
  void sweep_closing();
  static void on_connection_failed(void* connection, ucp::Endpoint endpoint, ucp::Status status);
  static void on_closed(void* request, ucp::Status status, void* connection);

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

  mutable std::mutex running_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<UcxPrepared>> running_;  // by ticket

  std::shared_ptr<UcxWorker> main_worker_;
  std::vector<UcxWorker*> awake_;                                      // those with `is_awake`
  std::unordered_map<std::uint64_t, std::shared_ptr<UcxLink>> links_;  // by number
  std::vector<UcxLink*> busy_;  // links with transfers that are ready; may hold some without
  std::unordered_map<std::uint64_t, std::unique_ptr<UcxJob>> jobs_;  // by ticket
  std::vector<std::uint64_t> touched_;  // tickets of which no request is in flight any more
  std::vector<std::uint64_t> failed_;   // numbers of links whose transport failed
  std::vector<std::unique_ptr<UcxConnection>> closing_;
  Deadlines deadlines_;
  std::uint64_t link_count_ = 0;
  std::uint64_t connection_count_ = 0;
  std::uint32_t requests_ = 0;  // that UCX has, of all links
  std::uint32_t rounds_ = 0;
  bool is_shut_ = false;
  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace kvtier
