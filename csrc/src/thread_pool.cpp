#include "kvtier/thread_pool.hpp"

#include <stdexcept>
#include <string>

namespace kvtier {

ThreadPool::ThreadPool(std::size_t thread_count) {
  if (thread_count < 1 || thread_count > kThreadCountMax) {
    throw std::invalid_argument("thread_count is " + std::to_string(thread_count) +
                                ", must be 1 to " + std::to_string(kThreadCountMax));
  }
  threads_.reserve(thread_count - 1);
  for (std::size_t i = 1; i < thread_count; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) { serve(stop); });
  }
}

void ThreadPool::run_job(Job& job, std::size_t unit_count) {
  const std::lock_guard turn(queue_);
  {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    ++job_number_;
  }
  const std::size_t wanted = unit_count - 1;
  if (wanted >= threads_.size()) {
    job_posted_.notify_all();
  } else {
    for (std::size_t i = 0; i < wanted; ++i) job_posted_.notify_one();
  }
  job.body(job.context, job.units);

  std::unique_lock lock(mutex_);
  job_ = nullptr;  // `job` dies with this call: whoever comes now must not find it
  job_left_.wait(lock, [this] { return busy_count_ == 0; });
}

void ThreadPool::serve(const std::stop_token& stop) {
  std::uint64_t seen_job_number = 0;
  std::unique_lock lock(mutex_);
  while (job_posted_.wait(lock, stop, [this, &seen_job_number] {
    return job_ != nullptr && job_number_ != seen_job_number;
  })) {
    seen_job_number = job_number_;
    Job& job = *job_;
    ++busy_count_;
    lock.unlock();
    job.body(job.context, job.units);
    lock.lock();
    if (--busy_count_ == 0) job_left_.notify_one();
  }
}

}  // namespace kvtier
