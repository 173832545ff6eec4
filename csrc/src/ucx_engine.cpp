// The engine as others see it: checks, then hands on to the thread.
#include "kvtier/ucx_engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ucx_context.hpp"
#include "ucx_link.hpp"
#include "ucx_progress.hpp"

namespace kvtier {

class UcxEngine::Impl {
 public:
  Impl(const UcxOptions& options, std::shared_ptr<Completions> completions)
      : context(std::make_shared<const UcxContext>(options)),
        progress(context, options, std::move(completions)) {}

  const std::shared_ptr<const UcxContext> context;
  UcxProgress progress;
};

UcxEngine::UcxEngine(const UcxOptions& options, std::shared_ptr<Completions> completions) {
  if (options.window_bytes == 0 || options.window_requests == 0 || options.request_bytes_max == 0) {
    throw std::invalid_argument("a window of nothing lets nothing through");
  }
  if (options.copy_threads == 0 || options.copy_threads > ThreadPool::kThreadCountMax) {
    throw std::invalid_argument(std::to_string(options.copy_threads) + " threads for copies");
  }
  if (options.message_bytes_max == 0 || options.message_bytes_max > kUcxMessageMax) {
    throw std::invalid_argument("messages of " + std::to_string(options.message_bytes_max) +
                                " bytes, at most " + std::to_string(kUcxMessageMax));
  }
  impl_ = std::make_unique<Impl>(options, std::move(completions));
}

UcxEngine::~UcxEngine() = default;

const std::string& UcxEngine::version() const { return impl_->context->version; }
const std::string& UcxEngine::library_path() const { return impl_->context->library.path; }
const std::vector<std::string>& UcxEngine::transports() const { return impl_->context->transports; }
bool UcxEngine::has_rdma() const { return std::ranges::any_of(transports(), is_rdma); }
const std::string& UcxEngine::address() const { return impl_->progress.address(); }

std::shared_ptr<UcxMemory> UcxEngine::map(std::uint64_t address, std::uint64_t length,
                                          bool is_writable) {
  auto memory = std::make_shared<UcxMemory>(impl_->context, impl_->progress.new_memory_number(),
                                            address, length, is_writable);
  impl_->progress.offer(memory);
  return memory;
}

void UcxEngine::unmap(const std::shared_ptr<UcxMemory>& memory) {
  impl_->progress.withdraw(*memory);
  memory->unmap();
}

std::string UcxEngine::pack(const UcxMemory& memory) { return memory.pack(); }

std::shared_ptr<UcxLink> UcxEngine::connect(const std::string& address, std::int64_t host_pid) {
  return impl_->progress.connect(address, host_pid);
}

std::shared_ptr<UcxRemote> UcxEngine::import_remote(const std::shared_ptr<UcxLink>& link,
                                                    const std::string& packed) {
  return impl_->progress.import_remote(link, packed);
}

void UcxEngine::forget_remote(const std::shared_ptr<UcxRemote>& remote) {
  impl_->progress.forget_remote(remote);
}

void UcxEngine::disconnect(const std::shared_ptr<UcxLink>& link) {
  impl_->progress.disconnect(link);
}

std::shared_ptr<UcxPrepared> UcxEngine::prepare(UcxOp op, std::shared_ptr<UcxLink> link,
                                                std::vector<std::shared_ptr<UcxMemory>> memories,
                                                std::vector<std::shared_ptr<UcxRemote>> remotes,
                                                std::vector<UcxPiece> pieces) {
  for (const std::shared_ptr<UcxRemote>& remote : remotes) {
    if (remote->link != link) throw std::invalid_argument("a region of another peer");
  }
  for (const UcxPiece& piece : pieces) {
    if (piece.memory >= memories.size() || piece.remote >= remotes.size() || piece.length == 0) {
      throw std::invalid_argument("a piece of no region, or of no bytes");
    }
  }
  auto prepared = std::make_shared<UcxPrepared>();
  prepared->op = op;
  prepared->link = std::move(link);
  prepared->memories = std::move(memories);
  prepared->remotes = std::move(remotes);
  prepared->pieces = std::move(pieces);
  return prepared;
}

void UcxEngine::start(const std::shared_ptr<UcxPrepared>& prepared, std::uint64_t ticket,
                      double deadline_s) {
  impl_->progress.start(prepared, ticket, deadline_s);
}

void UcxEngine::cancel(std::uint64_t ticket) { impl_->progress.cancel(ticket); }

std::uint64_t UcxEngine::progress(std::uint64_t ticket) const {
  return impl_->progress.progress(ticket);
}

void UcxEngine::close() { impl_->progress.close(); }

}  // namespace kvtier
