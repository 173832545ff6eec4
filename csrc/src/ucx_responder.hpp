// What peers ask of this engine's memory: checked, then sent or stored. The progress thread's
// alone.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ucx_endpoint.hpp"
#include "ucx_messages.hpp"

namespace kvtier {

class UcxResponder {
 public:
  /// `has_news` is set whenever `settle` has something to do.
  UcxResponder(std::shared_ptr<UcxWorker> worker, std::uint64_t first_number, bool* has_news);
  ~UcxResponder();
  UcxResponder(const UcxResponder&) = delete;
  UcxResponder& operator=(const UcxResponder&) = delete;

  void add(std::shared_ptr<UcxMemory> memory) { memories_[memory->number] = std::move(memory); }
  /// Refuse it from now on. False while parts of it are still on their way: ask again.
  bool remove(std::uint64_t number);

  /// Messages from those who read and write here.
  void on_hello(const UcxHead& head, std::span<const std::byte> payload);
  void on_get(const UcxHead& head, std::span<const std::byte> payload);
  void on_put(const UcxHead& head, std::span<const std::byte> payload);
  void on_bye(const UcxHead& head);

  /// Take down what has failed.
  void settle();
  void close_all();
  /// The worker goes, and with it all that is under way.
  void forget_worker();
  bool is_idle() const { return inbounds_.empty(); }
  bool is_answering() const { return answers_ != 0; }

 private:
  struct Answer;
  struct Inbound;

  /// Whether all ranges lie in registered memory; else the errno that says what is wrong.
  int check(std::span<const UcxRange> ranges, bool for_writing) const;
  Inbound* find(std::uint64_t number);
  void answer(Inbound& inbound, UcxMessage message, int code, std::uint64_t request,
              std::span<const UcxRange> ranges);
  void close(Inbound& inbound);
  static void on_answered(void* request, ucp::Status status, void* answer);

  const ucp::Library& library_;
  std::shared_ptr<UcxWorker> worker_;
  bool* has_news_;
  std::unordered_map<std::uint64_t, std::shared_ptr<UcxMemory>> memories_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Inbound>> inbounds_;
  std::uint64_t next_number_;
  std::uint32_t answers_ = 0;  // under way
};

}  // namespace kvtier
