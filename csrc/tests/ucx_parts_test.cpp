// What of the UCX engine works without UCX: commands, deadlines, ledgers, packing, copies.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../src/command_queue.hpp"
#include "../src/deadlines.hpp"
#include "../src/packing.hpp"
#include "../src/piece_ledger.hpp"
#include "../src/process_copy.hpp"
#include "../src/process_watch.hpp"

namespace {

using namespace kvtier;
using Clock = Deadlines::Clock;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

template <typename Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

void test_commands_come_out_in_order_and_each_once() {
  CommandQueue queue(100'000);
  std::vector<int> seen(4, 0);
  std::vector<std::thread> threads;
  constexpr int kEach = 2000;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&queue, &seen, thread] {
      for (int i = 0; i < kEach; ++i) {
        queue.push([&seen, thread, i] {
          require(seen[static_cast<std::size_t>(thread)] == i, "a thread's commands in its order");
          ++seen[static_cast<std::size_t>(thread)];
        });
      }
    });
  }
  for (int done = 0; done < 4 * kEach;) {
    for (CommandQueue::Command& command : queue.take()) {
      command();
      ++done;
    }
  }
  for (std::thread& thread : threads) thread.join();
  require(queue.take().empty(), "nothing is left");
}

void test_a_full_queue_refuses_what_may_be_refused() {
  CommandQueue queue(2);
  require(queue.push([] {}) == CommandQueue::Pushed::kYes, "first");
  require(queue.push([] {}) == CommandQueue::Pushed::kYes, "second");
  require(queue.push([] {}) == CommandQueue::Pushed::kFull, "third");
  require(queue.push([] {}, true) == CommandQueue::Pushed::kYes, "one that must");
  bool is_last = false;
  require(queue.close([&is_last] { is_last = true; }), "the last");
  require(!queue.close([] {}), "no other last");
  require(queue.push([] {}, true) == CommandQueue::Pushed::kClosed, "nothing after the last");
  std::vector<CommandQueue::Command> commands = queue.take();
  require(commands.size() == 4, "all that were taken");
  commands.back()();
  require(is_last, "the last comes last");
}

void test_deadlines_come_in_order_and_leave_when_told() {
  Deadlines deadlines;
  const Clock::time_point start = Clock::now();
  const auto at = [start](int ms) { return start + std::chrono::milliseconds(ms); };
  for (const int ms : {5, 1, 3, 3, 9}) {
    deadlines.add(at(ms), static_cast<std::uint64_t>(10 * ms));
  }
  deadlines.remove(at(9), 90);
  deadlines.remove(at(9), 90);
  require(*deadlines.next() == at(1), "the next is the first");
  require(!deadlines.take_due(at(0)), "none is due before");
  require(*deadlines.take_due(at(4)) == 10 && *deadlines.take_due(at(4)) == 30, "two are due");
  require(!deadlines.take_due(at(4)) && !deadlines.is_empty(), "not the third");
  require(*deadlines.take_due(at(5)) == 50 && deadlines.is_empty(), "which is due then");
  require(!deadlines.next(), "none is left");
}

void test_a_piece_is_whole_only_with_all_its_bytes() {
  const std::vector<std::uint64_t> lengths = {10, 10, 10, 10};
  const auto length_of = [&lengths](std::size_t i) { return lengths[i]; };
  PieceLedger ledger(4);
  ledger.arrived(0, 4);
  ledger.arrived(0, 6);
  ledger.arrived(1, 9);
  ledger.failed(2, EFAULT);
  ledger.failed(2, EIO);
  ledger.arrived(2, 10);
  const std::vector<std::int64_t> expected = {10, -ETIMEDOUT, -EFAULT, -ETIMEDOUT};
  require(ledger.close(ETIMEDOUT, true, length_of) == expected, "bytes, or the first reason");
  PieceLedger unsure(1);
  unsure.arrived(0, 10);
  require(unsure.close(ETIMEDOUT, false, length_of)[0] == -ETIMEDOUT, "not before it is sure");
}

void test_parts_come_back_or_throw() {
  const std::string bytes =
      Packer().number(std::uint64_t{7}).part("abc").part("").number(std::uint8_t{1}).take();
  Unpacker unpacker(bytes);
  require(unpacker.number<std::uint64_t>() == 7 && unpacker.part() == "abc", "first parts");
  require(unpacker.part().empty() && unpacker.number<std::uint8_t>() == 1, "and the others");
  unpacker.end();
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    require(throws([&] {
              Unpacker short_of(std::string_view(bytes).substr(0, cut));
              short_of.number<std::uint64_t>();
              short_of.part();
              short_of.part();
              short_of.number<std::uint8_t>();
            }),
            "a cut one throws");
  }
  require(throws([&] {
            Unpacker longer(bytes);
            longer.end();
          }),
          "a longer one throws");
  const std::string lying = Packer().number(UINT32_MAX).take();
  require(throws([&] { Unpacker(lying).part(); }), "a length beyond the end throws");
}

void test_copies_cross_processes_and_say_where_they_fail() {
  std::vector<std::uint8_t> memory(3 << 20, 1);
  const std::array<std::uint8_t, 16> token = random_token();
  std::array<int, 2> ready{};
  require(pipe(ready.data()) == 0, "pipe");
  const pid_t child = fork();
  if (child == 0) {
    std::fill(memory.begin(), memory.end(), std::uint8_t{2});
    require(write(ready[1], "!", 1) == 1, "tell that it is filled");
    for (;;) pause();
  }
  char told = 0;
  require(read(ready[0], &told, 1) == 1, "hear that it is filled");
  const ProcessMark mark{static_cast<std::uint64_t>(child),
                         reinterpret_cast<std::uint64_t>(token.data()), token};
  ProcessMark other = mark;
  other.token[3] ^= 1;
  require(throws([&] { const ProcessWatch stranger(other); }), "another's mark is refused");
  {
    const ProcessWatch process(mark);
    require(process.is_alive(), "it lives");
    ThreadPool pool(2);
    ProcessCopy copy;
    copy.begin(0);
    std::uint64_t at = 0;
    while (at < memory.size()) {
      at += copy.add(memory.data() + at, memory.data() + at, memory.size() - at);
      require(!copy.is_full() || at == memory.size(), "three megabytes fit");
    }
    copy.end_piece();
    copy.add(memory.data(), nullptr, 100);
    copy.run(pool, process, true);
    std::uint64_t whole = 0;
    int code_of_last = 0;
    copy.for_each([&](std::size_t piece, std::uint64_t bytes, int code) {
      if (piece == 0 && code == 0) whole += bytes;
      if (piece == 1) code_of_last = code;
    });
    require(whole == memory.size() && code_of_last == EFAULT, "all of one, none of the other");
    for (const std::uint8_t byte : memory) require(byte == 2, "the other's bytes");
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    require(!process.is_alive(), "it has ended");
    copy.begin(0);
    copy.add(memory.data(), memory.data(), 100);
    copy.run(pool, process, false);
    copy.for_each([](std::size_t, std::uint64_t, int code) { require(code == ESRCH, "gone"); });
  }
  require(throws([&] { const ProcessWatch late(mark); }), "one that is gone is not found");
  close(ready[0]);
  close(ready[1]);
}

}  // namespace

int main() {
  test_commands_come_out_in_order_and_each_once();
  test_a_full_queue_refuses_what_may_be_refused();
  test_deadlines_come_in_order_and_leave_when_told();
  test_a_piece_is_whole_only_with_all_its_bytes();
  test_parts_come_back_or_throw();
  test_copies_cross_processes_and_say_where_they_fail();
  std::puts("ok");
}
