#include "ucx_responder.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvtier {
namespace {

constexpr std::uint32_t kAnswersMax = 4096;  // of one peer: far beyond what its window lets it ask
constexpr std::size_t kInboundsMax = 16384;  // peers that read and write here
constexpr std::size_t kAddressMax = 64 << 10;  // bytes

/// What the first `count` ranges of a message are; empty if it is no such message.
std::vector<UcxRange> ranges_of(std::uint32_t count, std::span<const std::byte> payload) {
  if (count == 0 || count > kUcxRangesMax || payload.size() < count * sizeof(UcxRange)) return {};
  std::vector<UcxRange> ranges(count);
  std::memcpy(ranges.data(), payload.data(), count * sizeof(UcxRange));
  std::uint64_t total = 0;
  for (const UcxRange& range : ranges) {
    if (range.length == 0 || range.length > kUcxMessageMax) return {};
    total += range.length;
  }
  if (total > kUcxMessageMax) return {};
  return ranges;
}

}  // namespace

/// One message to a peer, until UCX has sent it.
struct UcxResponder::Answer {
  Inbound* inbound;
  UcxHead head;
  std::vector<ucp::Iov> payload;
  std::vector<std::uint64_t> memories;  ///< what it is sent from
  std::list<Answer>::iterator self{};
};

/// A peer that reads and writes here.
struct UcxResponder::Inbound {
  UcxResponder* responder;
  std::uint64_t number;
  std::uint64_t connection;  ///< as the peer calls it
  std::uint64_t line;
  std::unique_ptr<UcxEndpoint> endpoint;
  bool is_leaving = false;  ///< to be closed once all is answered
  bool is_unfit = false;    ///< to be closed
  bool is_closing = false;
  std::list<Answer> answers;  // under way
};

UcxResponder::UcxResponder(std::shared_ptr<UcxWorker> worker, std::uint64_t first_number,
                           bool* has_news)
    : library_(worker->context->library),
      worker_(std::move(worker)),
      has_news_(has_news),
      next_number_(first_number) {}

UcxResponder::~UcxResponder() = default;

bool UcxResponder::remove(std::uint64_t number) {
  memories_.erase(number);
  bool is_free = true;
  for (const auto& [key, inbound] : inbounds_) {
    const bool uses = std::ranges::any_of(inbound->answers, [number](const Answer& answer) {
      return std::ranges::find(answer.memories, number) != answer.memories.end();
    });
    if (!uses) continue;
    is_free = false;
    close(*inbound);
  }
  return is_free;
}

void UcxResponder::on_hello(const UcxHead& head, std::span<const std::byte> payload) {
  if (payload.empty() || payload.size() > kAddressMax || inbounds_.size() >= kInboundsMax) return;
  auto inbound = std::make_unique<Inbound>();
  inbound->responder = this;
  inbound->number = next_number_++;
  inbound->connection = head.link;
  inbound->line = head.request;
  for (const auto& [number, before] : inbounds_) {
    if (before->line == head.request) before->is_unfit = true;
  }
  *has_news_ = true;
  try {
    inbound->endpoint = std::make_unique<UcxEndpoint>(
        worker_, std::string(reinterpret_cast<const char*>(payload.data()), payload.size()),
        has_news_);
  } catch (const std::runtime_error&) {
    return;  // who asked hears nothing, and gives up by its own deadline
  }
  Inbound& added = *inbound;
  inbounds_.emplace(added.number, std::move(inbound));
  answer(added, UcxMessage::kWelcome, 0, added.number, {});
}

void UcxResponder::on_get(const UcxHead& head, std::span<const std::byte> payload) {
  Inbound* const inbound = find(head.link);
  if (inbound == nullptr) return;
  const std::vector<UcxRange> ranges = ranges_of(head.count, payload);
  const int code = check(ranges, false);
  answer(*inbound, UcxMessage::kData, code, head.request,
         code == 0 ? std::span<const UcxRange>(ranges) : std::span<const UcxRange>());
}

void UcxResponder::on_put(const UcxHead& head, std::span<const std::byte> payload) {
  Inbound* const inbound = find(head.link);
  if (inbound == nullptr) return;
  const std::vector<UcxRange> ranges = ranges_of(head.count, payload);
  int code = check(ranges, true);
  if (code == 0) {
    payload = payload.subspan(ranges.size() * sizeof(UcxRange));
    std::uint64_t total = 0;
    for (const UcxRange& range : ranges) total += range.length;
    if (total != payload.size()) code = EPROTO;
  }
  if (code == 0) {
    for (const UcxRange& range : ranges) {
      std::memcpy(reinterpret_cast<void*>(range.address), payload.data(), range.length);
      payload = payload.subspan(range.length);
    }
  }
  answer(*inbound, UcxMessage::kPutDone, code, head.request, {});
}

void UcxResponder::on_bye(const UcxHead& head) {
  Inbound* const inbound = find(head.link);
  if (inbound == nullptr) return;
  answer(*inbound, UcxMessage::kGone, 0, head.request, {});
  inbound->is_leaving = true;
  *has_news_ = true;
}

int UcxResponder::check(std::span<const UcxRange> ranges, bool for_writing) const {
  if (ranges.empty()) return EPROTO;
  for (const UcxRange& range : ranges) {
    const auto found = memories_.find(range.memory);
    if (found == memories_.end()) return EREMOTEIO;  // it was registered once, or never
    const UcxMemory& memory = *found->second;
    if (range.length > memory.length || range.address < memory.address ||
        range.address - memory.address > memory.length - range.length) {
      return ERANGE;
    }
    if (for_writing && !memory.is_writable) return EACCES;
  }
  return 0;
}

UcxResponder::Inbound* UcxResponder::find(std::uint64_t number) {
  const auto found = inbounds_.find(number);
  if (found == inbounds_.end()) return nullptr;
  Inbound& inbound = *found->second;
  const bool is_over = inbound.is_leaving || inbound.is_unfit || inbound.is_closing;
  return is_over ? nullptr : &inbound;
}

void UcxResponder::answer(Inbound& inbound, UcxMessage message, int code, std::uint64_t request,
                          std::span<const UcxRange> ranges) {
  if (inbound.answers.size() >= kAnswersMax) {
    inbound.is_unfit = true;
    *has_news_ = true;
    return;
  }
  Answer& answer = inbound.answers.emplace_back();
  answer.self = std::prev(inbound.answers.end());
  answer.inbound = &inbound;
  answer.head = {message, static_cast<std::uint32_t>(code), inbound.connection, request};
  for (const UcxRange& range : ranges) {
    answer.payload.push_back({reinterpret_cast<void*>(range.address), range.length});
    answer.memories.push_back(range.memory);
  }
  ++answers_;
  const ucp::Request sent = send_message(library_, inbound.endpoint->handle(), answer.head,
                                         answer.payload, &on_answered, &answer);
  if (sent != nullptr && !ucp::is_error(sent)) return;
  inbound.answers.pop_back();
  --answers_;
  if (sent == nullptr) return;
  inbound.is_unfit = true;  // the peer waits for this one, so it must hear that something failed
  *has_news_ = true;
}

void UcxResponder::on_answered(void* request, ucp::Status status, void* user_data) {
  Answer& answer = *static_cast<Answer*>(user_data);
  Inbound& inbound = *answer.inbound;
  inbound.responder->library_.request_free(request);
  --inbound.responder->answers_;
  if (status != ucp::kOk) inbound.is_unfit = true;
  if (inbound.is_leaving || inbound.is_unfit || inbound.is_closing) {
    *inbound.responder->has_news_ = true;
  }
  inbound.answers.erase(answer.self);
}

void UcxResponder::close(Inbound& inbound) {
  if (inbound.is_closing) return;
  inbound.is_closing = true;
  inbound.endpoint->close_by_force();
}

void UcxResponder::settle() {
  for (auto each = inbounds_.begin(); each != inbounds_.end();) {
    Inbound& inbound = *each->second;
    const bool has_left = inbound.is_leaving && inbound.answers.empty();
    if (has_left || inbound.is_unfit || inbound.endpoint->failure() != ucp::kOk) close(inbound);
    const bool is_gone =
        inbound.is_closing && inbound.endpoint->is_closed() && inbound.answers.empty();
    each = is_gone ? inbounds_.erase(each) : std::next(each);
  }
}

void UcxResponder::forget_worker() {
  for (const auto& [number, inbound] : inbounds_) inbound->endpoint->forget_worker();
  worker_.reset();
}

void UcxResponder::close_all() {
  memories_.clear();
  for (const auto& [number, inbound] : inbounds_) close(*inbound);
}

}  // namespace kvtier
