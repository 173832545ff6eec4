// The loop of the progress thread, and what other threads ask of it.
#include "ucx_progress.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace kvtier {
namespace {

constexpr std::size_t kCommandsMax = 4096;  // starts that wait; beyond it they end with EAGAIN
constexpr int kProgressMax = 32;            // calls in a row before commands are looked at again
constexpr std::uint32_t kLookRounds = 16;   // busy rounds between two looks at what is asleep
constexpr int kSleepBusyMs =
    100;  // with requests in flight: a wakeup that UCX missed costs no more
constexpr double kDeadlineMaxS = 1e8;
constexpr double kShutDownS = 1.0;

// What an fd of the epoll set belongs to; links are numbered from 1.
constexpr std::uint64_t kCommandsKey = 0;
constexpr std::uint64_t kMainWorkerKey = 1;
std::uint64_t worker_key(const UcxLink& link) { return link.number * 2; }
std::uint64_t process_key(const UcxLink& link) { return link.number * 2 + 1; }

}  // namespace

UcxWorker::UcxWorker(std::shared_ptr<const UcxContext> its_context)
    : context(std::move(its_context)) {
  ucp::WorkerParams params{};
  params.field_mask = ucp::kWorkerParamThreadMode | ucp::kWorkerParamFlags;
  params.thread_mode = ucp::ThreadMode::kSerialized;
  params.flags = ucp::kWorkerIgnoreRequestLeak;  // those of a dead peer go down with the worker
  context->check(context->library.worker_create(context->handle, &params, &handle),
                 "UCX gives no worker");
  const ucp::Status status = context->library.worker_get_efd(handle, &efd);
  if (status != ucp::kOk) {
    context->library.worker_destroy(handle);
    throw std::runtime_error("UCX cannot sleep here: " + context->words(status));
  }
}

UcxWorker::~UcxWorker() { context->library.worker_destroy(handle); }

UcxProgress::UcxProgress(std::shared_ptr<const UcxContext> context, const UcxOptions& options,
                         std::shared_ptr<Completions> completions)
    : context_(std::move(context)),
      library_(context_->library),
      options_(options),
      completions_(std::move(completions)),
      commands_(kCommandsMax),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_fd_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  try {
    watch(commands_.fd(), kCommandsKey);
    main_worker_ = std::make_shared<UcxWorker>(context_);
    awake_.push_back(main_worker_.get());
    watch(main_worker_->efd, kMainWorkerKey);
    ucp::Address address = nullptr;
    std::size_t length = 0;
    context_->check(library_.worker_get_address(main_worker_->handle, &address, &length),
                    "UCX gives no address");
    address_.assign(reinterpret_cast<const char*>(address), length);
    library_.worker_release_address(main_worker_->handle, address);
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    ::close(epoll_fd_);
    throw;
  }
}

UcxProgress::~UcxProgress() {
  close();
  ::close(epoll_fd_);
}

// Any thread ------------------------------------------------------------------------------------

template <typename Function>
auto UcxProgress::call(Function function) -> decltype(function()) {
  auto task = std::make_shared<std::packaged_task<decltype(function())()>>(std::move(function));
  auto result = task->get_future();
  // Its caller waits for it, so there are no more of these than threads.
  if (commands_.push([task] { (*task)(); }, true) == CommandQueue::Pushed::kClosed) {
    throw std::runtime_error("the UCX engine is closed");
  }
  return result.get();
}

std::shared_ptr<UcxLink> UcxProgress::connect(const std::string& address,
                                              std::unique_ptr<ProcessWatch> process) {
  return call([&] {
    auto link = std::make_shared<UcxLink>(++link_count_, address, std::move(process));
    open_connection(*link);
    links_.emplace(link->number, link);
    if (link->process != nullptr) watch(link->process->fd(), process_key(*link));
    return link;
  });
}

std::shared_ptr<UcxRemote> UcxProgress::import_remote(const std::shared_ptr<UcxLink>& link,
                                                      const std::string& packed) {
  return call([&] {
    if (!link->closed_because.empty()) throw std::runtime_error(link->closed_because);
    if (link->connection == nullptr) open_connection(*link);
    auto remote = std::make_shared<UcxRemote>(link, packed);
    if (key_of(*link->connection, remote) == nullptr) {
      throw std::runtime_error("UCX does not take the key of the peer's memory");
    }
    return remote;
  });
}

void UcxProgress::forget_remote(const std::shared_ptr<UcxRemote>& remote) {
  commands_.push(
      [this, remote] {
        UcxConnection* const connection = remote->link->connection.get();
        if (connection == nullptr || connection->number != remote->connection_number) return;
        library_.rkey_destroy(remote->key);
        remote->connection_number = 0;
        std::erase_if(connection->imported,
                      [&remote](const auto& each) { return each.first == remote; });
      },
      true);
}

void UcxProgress::disconnect(const std::shared_ptr<UcxLink>& link) {
  commands_.push(
      [this, link] {
        fail_link(*link, "disconnected", true);
        if (link->process != nullptr && links_.contains(link->number)) {
          epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link->process->fd(), nullptr);
        }
        links_.erase(link->number);
      },
      true);
}

void UcxProgress::start(const std::shared_ptr<UcxPrepared>& prepared, std::uint64_t ticket,
                        double deadline_s) {
  const double left_s = std::isnan(deadline_s) ? 0.0 : std::clamp(deadline_s, 0.0, kDeadlineMaxS);
  const Clock::time_point due = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(left_s));
  {
    const std::lock_guard lock(running_mutex_);
    if (!running_.emplace(ticket, prepared).second) {
      throw std::invalid_argument("ticket " + std::to_string(ticket) + " is in flight");
    }
  }
  prepared->arrived_bytes = 0;
  const CommandQueue::Pushed pushed =
      commands_.push([this, prepared, ticket, due] { begin(prepared, ticket, due); });
  if (pushed == CommandQueue::Pushed::kYes) return;
  {
    const std::lock_guard lock(running_mutex_);
    running_.erase(ticket);
  }
  const bool is_closed = pushed == CommandQueue::Pushed::kClosed;
  completions_->push(
      {ticket, std::vector<std::int64_t>(prepared->pieces.size(), is_closed ? -ECANCELED : -EAGAIN),
       0, true, is_closed ? "closed" : std::to_string(kCommandsMax) + " commands are waiting"});
}

void UcxProgress::cancel(std::uint64_t ticket) {
  {
    const std::lock_guard lock(running_mutex_);
    if (!running_.contains(ticket)) return;
  }
  commands_.push(
      [this, ticket] {
        const auto found = jobs_.find(ticket);
        if (found == jobs_.end() || found->second->is_told) return;
        end(*found->second, ECANCELED, "cancelled");
      },
      true);
}

std::uint64_t UcxProgress::progress(std::uint64_t ticket) const {
  const std::lock_guard lock(running_mutex_);
  const auto found = running_.find(ticket);
  return found == running_.end() ? 0 : found->second->arrived_bytes.load();
}

void UcxProgress::close() {
  commands_.close([this] { shut_down(); });
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

// The thread ------------------------------------------------------------------------------------

void UcxProgress::run() {
  pthread_setname_np(pthread_self(), "kvtier-ucx");
  while (!is_shut_) run_once();
}

void UcxProgress::run_once() {
  for (CommandQueue::Command& command : commands_.take()) command();
  if (is_shut_) return;
  expire();
  bool is_more = false;
  for (std::size_t i = 0; i < busy_.size();) {
    UcxLink& link = *busy_[i];
    is_more |= issue(link);
    // `issue` may have failed a link, which takes it out of the list.
    if (i < busy_.size() && busy_[i] == &link) {
      if (link.ready.empty()) {
        busy_.erase(busy_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }
  const bool moved = progress_workers();
  settle();
  if (is_more || moved) {
    if (++rounds_ % kLookRounds == 0) look_at_fds(0);
    return;
  }
  if (arm_workers()) look_at_fds(sleep_ms());
}

bool UcxProgress::progress_workers() {
  bool moved = false;
  for (UcxWorker* const worker : awake_) {
    for (int i = 0; i < kProgressMax && library_.worker_progress(worker->handle) != 0; ++i) {
      moved = true;
    }
  }
  return moved;
}

/// False when something happened meanwhile: then nobody may sleep.
bool UcxProgress::arm_workers() {
  std::erase_if(awake_, [this](UcxWorker* worker) {
    worker->is_awake = library_.worker_arm(worker->handle) != ucp::kOk;
    return !worker->is_awake;
  });
  return awake_.empty();
}

void UcxProgress::look_at_fds(int timeout_ms) {
  std::array<epoll_event, 32> events{};
  const int count =
      epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t key = events[static_cast<std::size_t>(i)].data.u64;
    if (key == kCommandsKey) {
      commands_.clear_fd();
    } else if (key == kMainWorkerKey) {
      wake(*main_worker_);
    } else if (const auto found = links_.find(key / 2); found != links_.end()) {
      UcxLink& link = *found->second;
      if (key == worker_key(link)) {
        if (link.connection != nullptr) wake(*link.connection->worker);
      } else {
        epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link.process->fd(), nullptr);
        fail_link(link, "the peer's process has ended", true);
      }
    }
  }
  if (count == 0 && timeout_ms != 0) {
    wake(*main_worker_);
    for (const auto& [number, link] : links_) {
      if (link->connection != nullptr && link->connection->requests != 0) {
        wake(*link->connection->worker);
      }
    }
  }
}

int UcxProgress::sleep_ms() const {
  const int most = requests_ != 0 || !closing_.empty() ? kSleepBusyMs : -1;
  const auto next = deadlines_.next();
  if (!next) return most;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count();
  const int until = static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
  return most < 0 ? until : std::min(most, until);
}

void UcxProgress::watch(int fd, std::uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

void UcxProgress::wake(UcxWorker& worker) {
  if (worker.is_awake) return;
  worker.is_awake = true;
  awake_.push_back(&worker);
}

void UcxProgress::shut_down() {
  std::vector<UcxJob*> running;
  for (const auto& [ticket, job] : jobs_) {
    if (!job->is_told) running.push_back(job.get());
  }
  for (UcxJob* const job : running) end(*job, ECANCELED, "closed");
  for (const auto& [number, link] : links_) fail_link(*link, "closed", true);
  links_.clear();
  const Clock::time_point give_up = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                       std::chrono::duration<double>(kShutDownS));
  wake(*main_worker_);
  while (!closing_.empty() && Clock::now() < give_up) {
    progress_workers();
    settle();
    if (!closing_.empty() && arm_workers()) {
      look_at_fds(10);
      wake(*main_worker_);
    }
  }
  for (const auto& connection : closing_) release_keys(*connection);
  awake_.clear();
  for (const auto& connection : closing_) connection->worker.reset();
  main_worker_.reset();  // whatever UCX still had is over with this
  for (const auto& [ticket, job] : jobs_) {
    job->requests = 0;
    touched_.push_back(ticket);
  }
  closing_.clear();
  settle();
  is_shut_ = true;
}

}  // namespace kvtier
