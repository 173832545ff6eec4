// The loop of the progress thread, and what other threads ask of it.
#include "ucx_progress.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "packing.hpp"

namespace kvtier {
namespace {

constexpr std::size_t kCommandsMax = 4096;  // starts that wait; beyond it they end with EAGAIN
constexpr int kProgressMax = 32;            // calls in a row before commands are looked at again
constexpr std::uint32_t kLookRounds = 16;   // busy rounds between two looks at what is asleep
constexpr std::uint32_t kIdleRounds = 256;  // without progress before naps
constexpr int kNapMs = 1;
constexpr int kSleepBusyMs = 100;  // with requests under way: a wakeup UCX missed costs no more
constexpr double kDeadlineMaxS = 1e8;
constexpr double kShutDownS = 2.0;  // beyond the time that peers are given to say good-bye
constexpr double kWithdrawS = 5.0;

// What an fd of the epoll set belongs to; else to the process of the link with that number.
constexpr std::uint64_t kCommandsKey = 0;
constexpr std::uint64_t kWorkerKey = ~std::uint64_t{0};

/// Where numbers begin that must not fit an earlier process's.
std::uint64_t random_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | 1;
}

}  // namespace

UcxProgress::UcxProgress(std::shared_ptr<const UcxContext> context, const UcxOptions& options,
                         std::shared_ptr<Completions> completions)
    : context_(std::move(context)),
      library_(context_->library),
      options_(options),
      completions_(std::move(completions)),
      commands_(kCommandsMax),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      token_(random_token()),
      next_memory_(random_number()),
      next_connection_(random_number()) {
  if (epoll_fd_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  try {
    watch(commands_.fd(), kCommandsKey);
    worker_ = std::make_shared<UcxWorker>(context_);
    watch(worker_->efd, kWorkerKey);
    responder_ = std::make_unique<UcxResponder>(worker_, random_number(), &has_news_);
    ucp::AmHandlerParams params{};
    params.field_mask =
        ucp::kAmParamId | ucp::kAmParamFlags | ucp::kAmParamCallback | ucp::kAmParamArgument;
    params.id = kUcxMessageId;
    params.flags = ucp::kAmWholeMessage;
    params.callback = &on_message;
    params.argument = this;
    context_->check(library_.worker_set_am_recv_handler(worker_->handle, &params),
                    "UCX takes no messages");
    worker_address_ = worker_->address();
    address_ = Packer()
                   .number(static_cast<std::uint64_t>(getpid()))
                   .number(reinterpret_cast<std::uint64_t>(token_.data()))
                   .part({reinterpret_cast<const char*>(token_.data()), token_.size()})
                   .part(worker_address_)
                   .take();
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

void UcxProgress::offer(const std::shared_ptr<UcxMemory>& memory) {
  call([&] { responder_->add(memory); });
}

void UcxProgress::withdraw(const UcxMemory& memory) {
  const Clock::time_point give_up = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                       std::chrono::duration<double>(kWithdrawS));
  try {
    // UCX ends what is under way to a peer that is cut off, whatever that peer does.
    while (!call([&] { return responder_->remove(memory.number); }) && Clock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::runtime_error&) {
    // It is closed, so nothing is sent any more.
  }
}

std::shared_ptr<UcxLink> UcxProgress::connect(const std::string& address, std::int64_t host_pid) {
  Unpacker unpacker(address);
  ProcessMark mark{};
  mark.pid = unpacker.number<std::uint64_t>();
  mark.address = unpacker.number<std::uint64_t>();
  const std::string_view token = unpacker.part();
  std::string worker_address(unpacker.part());
  unpacker.end();
  if (token.size() != mark.token.size() || worker_address.empty()) {
    throw std::runtime_error("not an address");
  }
  std::memcpy(mark.token.data(), token.data(), token.size());
  std::unique_ptr<ProcessWatch> process;
  if (host_pid >= 0) {
    if (static_cast<std::uint64_t>(host_pid) != mark.pid) {
      throw std::runtime_error("the address is of process " + std::to_string(mark.pid) +
                               ", not of " + std::to_string(host_pid));
    }
    try {
      if (options_.may_copy_on_host) process = std::make_unique<ProcessWatch>(mark);
    } catch (const std::system_error&) {
      // The kernel does not let us at it; it is reached as one elsewhere is.
    }
  }
  return call([&] {
    auto link = std::make_shared<UcxLink>(++link_count_, random_number(), std::move(worker_address),
                                          std::move(process));
    open_connection(*link);
    links_.emplace(link->number, link);
    if (link->process != nullptr) watch(link->process->fd(), link->number);
    return link;
  });
}

std::shared_ptr<UcxRemote> UcxProgress::import_remote(const std::shared_ptr<UcxLink>& link,
                                                      const std::string& packed) {
  auto remote = std::make_shared<UcxRemote>(link, packed);
  return call([&] {
    if (!link->closed_because.empty()) throw std::runtime_error(link->closed_because);
    if (link->connection == nullptr) open_connection(*link);
    if (link->connection->way == UcxWay::kRdma && key_of(*link->connection, remote) == nullptr) {
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
       0, true, is_closed ? "closed" : std::to_string(kCommandsMax) + " commands wait"});
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
    // `issue` may have failed the link, which takes it out of the list.
    if (i >= busy_.size() || busy_[i] != &link) continue;
    if (link.ready.empty()) {
      busy_.erase(busy_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  const bool moved = progress_worker();
  settle();
  if (moved) idle_rounds_ = 0;
  if (!is_more && !moved) {
    if (arm_worker()) return look_at_fds(sleep_ms());
    // It cannot be armed while a peer takes nothing from a full queue in shared memory.
    if (++idle_rounds_ > kIdleRounds) return look_at_fds(kNapMs);
  }
  if (++rounds_ % kLookRounds == 0) look_at_fds(0);
}

bool UcxProgress::progress_worker() {
  bool moved = false;
  for (int i = 0; i < kProgressMax && library_.worker_progress(worker_->handle) != 0; ++i) {
    moved = true;
  }
  return moved;
}

/// False when something happened meanwhile: then nobody may sleep.
bool UcxProgress::arm_worker() { return library_.worker_arm(worker_->handle) == ucp::kOk; }

void UcxProgress::look_at_fds(int timeout_ms) {
  std::array<epoll_event, 32> events{};
  const int count =
      epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t key = events[static_cast<std::size_t>(i)].data.u64;
    if (key == kCommandsKey) {
      commands_.clear_fd();
    } else if (const auto found = links_.find(key); found != links_.end()) {
      UcxLink& link = *found->second;
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link.process->fd(), nullptr);
      fail_link(link, "the peer's process has ended", true);
    }
  }
}

int UcxProgress::sleep_ms() const {
  const bool is_busy = requests_ != 0 || !closing_.empty() || responder_->is_answering();
  const int most = is_busy ? kSleepBusyMs : -1;
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

void UcxProgress::shut_down() {
  std::vector<UcxJob*> running;
  for (const auto& [ticket, job] : jobs_) {
    if (!job->is_told) running.push_back(job.get());
  }
  for (UcxJob* const job : running) end(*job, ECANCELED, "closed");
  for (const auto& [number, link] : links_) fail_link(*link, "closed", true);
  links_.clear();
  responder_->close_all();
  const Clock::time_point give_up = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                       std::chrono::duration<double>(kShutDownS));
  while (Clock::now() < give_up) {
    progress_worker();
    settle();
    if (closing_.empty() && responder_->is_idle()) break;
    if (arm_worker()) look_at_fds(10);
  }
  for (const auto& connection : closing_) {
    release_keys(*connection);
    settle_all(*connection->closing_link);
    connection->endpoint->forget_worker();
  }
  responder_->forget_worker();
  worker_.reset();  // whatever UCX still had is over with this
  for (const auto& [ticket, job] : jobs_) {
    job->requests = job->touching = 0;
    job->is_unsettled = false;
    touched_.push_back(ticket);
  }
  closing_.clear();
  responder_.reset();
  while (!touched_.empty()) {
    const auto found = jobs_.find(touched_.back());
    touched_.pop_back();
    if (found != jobs_.end()) settle(*found->second);
  }
  is_shut_ = true;
}

}  // namespace kvtier
