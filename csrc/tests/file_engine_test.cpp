// Both methods against a file whose bytes are known, and their answers to short and failing files.
#include "kvtier/file_engine.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using kvtier::FileEngine;
using kvtier::FileMethod;
using kvtier::FileTransfer;

constexpr std::uint64_t kSegment = 4096;

void check(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

template <typename F>
void check_refused(F&& call, const char* what) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return;
  }
  check(false, what);
}

/// A file without a name, gone when closed.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::string name = (std::filesystem::temp_directory_path() / "kvtier-XXXXXX").string();
    fd_ = mkstemp(name.data());
    check(fd_ >= 0, "a temporary file can be made");
    unlink(name.c_str());
  }
  ~TemporaryFile() { close(fd_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

std::vector<std::byte> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::int64_t> write(FileEngine& engine, std::vector<FileTransfer> items) {
  std::vector<std::int64_t> results(items.size());
  engine.write(items, results);
  return results;
}

std::vector<std::int64_t> read(FileEngine& engine, std::vector<FileTransfer> items) {
  std::vector<std::int64_t> results(items.size());
  engine.read(items, results);
  return results;
}

void what_was_written_is_read_back(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  TemporaryFile one;
  TemporaryFile two;
  auto bytes = random_bytes(100 * kSegment + 17, 1);
  const std::int64_t size = static_cast<std::int64_t>(bytes.size());
  check(write(engine, {{one.fd(), 0, bytes.data(), bytes.size()},
                       {two.fd(), 5, bytes.data(), bytes.size()},
                       {two.fd(), 0, nullptr, 0}}) == std::vector<std::int64_t>{size, size, 0},
        "all written");
  std::vector<std::byte> first(bytes.size());
  std::vector<std::byte> second(bytes.size() - 1000);
  check(read(engine, {{one.fd(), 0, first.data(), first.size()},
                      {two.fd(), 1005, second.data(), second.size()}}) ==
            std::vector<std::int64_t>{size, size - 1000},
        "all read");
  check(first == bytes, "the first file's bytes");
  check(std::equal(second.begin(), second.end(), bytes.begin() + 1000), "the second file's bytes");
}

void a_read_ends_where_the_file_does(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  TemporaryFile file;
  auto bytes = random_bytes(3 * kSegment + 100, 2);
  write(engine, {{file.fd(), 0, bytes.data(), bytes.size()}});
  std::vector<std::byte> target(20 * kSegment, std::byte{0xaa});
  const auto results = read(engine, {{file.fd(), 0, target.data(), target.size()},
                                     {file.fd(), 3 * kSegment, target.data() + 5 * kSegment, 4096},
                                     {file.fd(), 1 << 20, target.data(), 4096}});
  check(results == std::vector<std::int64_t>{3 * kSegment + 100, 100, 0}, "as much as there was");
  check(std::equal(bytes.begin(), bytes.end(), target.begin()), "the bytes there were");
  check(target.back() == std::byte{0xaa}, "nothing past them");
}

void one_bad_item_spoils_no_other(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  TemporaryFile file;
  auto bytes = random_bytes(9 * kSegment, 3);
  const int full = open("/dev/full", O_RDWR | O_CLOEXEC);
  check(full >= 0, "/dev/full opens");
  const auto size = static_cast<std::int64_t>(bytes.size());
  check(write(engine, {{full, 0, bytes.data(), bytes.size()},
                       {file.fd(), 0, bytes.data(), bytes.size()},
                       {-1, 0, bytes.data(), bytes.size()}}) ==
            std::vector<std::int64_t>{-ENOSPC, size, -EBADF},
        "the good one is written, the others say why not");
  std::vector<std::byte> target(bytes.size());
  check(read(engine, {{-1, 0, target.data(), target.size()},
                      {file.fd(), 0, target.data(), target.size()}}) ==
            std::vector<std::int64_t>{-EBADF, size},
        "the good one is read");
  check(target == bytes, "its bytes");
  const std::vector<int> files = {file.fd(), -1, file.fd()};
  for (const bool data_only : {true, false}) {
    std::vector<std::int64_t> results(3);
    engine.sync(files, data_only, results);
    check(results == std::vector<std::int64_t>{0, -EBADF, 0}, "each sync for itself");
  }
  close(full);
}

void a_write_past_the_size_limit_is_an_error_of_its_item(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, 16 * kSegment, method);
  TemporaryFile large;
  TemporaryFile small;
  auto bytes = random_bytes(16 * kSegment, 4);
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limited = {.rlim_cur = 6 * kSegment, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limited);
  // The kernel writes the 6 pages that fit, which is a short write, and refuses to go on.
  const auto results = write(engine, {{large.fd(), 0, bytes.data(), bytes.size()},
                                      {small.fd(), 0, bytes.data(), 6 * kSegment}});
  const std::vector<int> files = {large.fd(), small.fd()};
  const std::vector<std::uint64_t> lengths = {16 * kSegment, 2 * kSegment};
  std::vector<std::int64_t> allocated(2);
  engine.allocate(files, lengths, allocated);
  setrlimit(RLIMIT_FSIZE, &before);
  check(results == std::vector<std::int64_t>{-EFBIG, 6 * kSegment}, "too large, and written");
  check(allocated == std::vector<std::int64_t>{-EFBIG, 0}, "the same of room asked ahead");
  struct stat status = {};
  fstat(large.fd(), &status);
  check(status.st_size == 6 * kSegment, "the write did stop short");
}

void allocated_files_have_their_size_and_read_as_zeros(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  TemporaryFile file;
  const std::vector<int> files = {file.fd(), file.fd(), -1};
  const std::vector<std::uint64_t> lengths = {10 * kSegment, 0, 4096};
  std::vector<std::int64_t> results(3);
  engine.allocate(files, lengths, results);
  check(results == std::vector<std::int64_t>{0, 0, -EBADF}, "room, nothing to do, and an error");
  std::vector<std::byte> target(11 * kSegment, std::byte{1});
  check(read(engine, {{file.fd(), 0, target.data(), target.size()}})[0] == 10 * kSegment,
        "its size");
  check(target[10 * kSegment - 1] == std::byte{0}, "zeros");
}

void threads_share_an_engine(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 12; ++t) {  // more than kCallsMax
    threads.emplace_back([&engine, t] {
      TemporaryFile file;
      auto bytes = random_bytes(20 * kSegment, t);
      std::vector<std::byte> target(bytes.size());
      for (int round = 0; round < 10; ++round) {
        write(engine, {{file.fd(), 0, bytes.data(), bytes.size()}});
        std::fill(target.begin(), target.end(), std::byte{0});
        read(engine, {{file.fd(), 0, target.data(), target.size()}});
        check(target == bytes, "each thread finds its own bytes");
      }
    });
  }
}

void a_stopped_batch_begins_nothing_more(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  TemporaryFile file;
  auto bytes = random_bytes(200 * kSegment, 5);
  const auto size = static_cast<std::int64_t>(bytes.size());
  const FileTransfer whole = {file.fd(), 0, bytes.data(), bytes.size()};
  std::vector<std::int64_t> results(3);
  kvtier::StopFlag stop;
  engine.write(std::vector{whole, whole, whole}, results, &stop);
  check(results == std::vector<std::int64_t>{size, size, size}, "a flag that is not set");
  stop.set();
  std::vector<std::byte> target(bytes.size(), std::byte{0xaa});
  const FileTransfer into = {file.fd(), 0, target.data(), target.size()};
  engine.read(std::vector{into, into, into}, results, &stop);
  check(results == std::vector<std::int64_t>(3, -ECANCELED), "stopped before it began");
  check(std::ranges::count(target, std::byte{0xaa}) == size, "and nothing touched");
  for (int round = 0; round < 20; ++round) {
    kvtier::StopFlag meanwhile;
    std::jthread stopper([&] { meanwhile.set(); });
    std::ranges::fill(target, std::byte{0xaa});
    engine.read(std::vector{into}, std::span(results).first(1), &meanwhile);
    const bool is_whole = results[0] == size && target == bytes;
    check(is_whole || results[0] == -ECANCELED, "all of it, or not OK");
  }
}

void a_closed_engine_refuses(FileMethod method, std::uint32_t depth) {
  FileEngine engine(depth, kSegment, method);
  engine.close();
  engine.close();
  check_refused([&] { read(engine, {}); }, "a read after close");
}

void mistakes_are_refused() {
  check_refused([] { FileEngine(0, kSegment, FileMethod::kThreads); }, "depth 0");
  check_refused([] { FileEngine(4, 4097, FileMethod::kThreads); }, "a segment of odd size");
  check_refused([] { FileEngine(4, std::uint64_t{2} << 30, FileMethod::kThreads); }, "2 GiB");
  check_refused([] { kvtier::parse_file_method("aio"); }, "an unknown method");
  FileEngine engine(1, kSegment, FileMethod::kThreads);
  check_refused([&] { read(engine, {{0, ~std::uint64_t{0}, nullptr, 1}}); }, "an absurd offset");
  std::vector<std::int64_t> none;
  const std::vector<int> files = {1};
  check_refused([&] { engine.sync(files, true, none); }, "fewer results than files");
}

}  // namespace

int main() {
  std::signal(SIGXFSZ, SIG_IGN);
  std::vector<FileMethod> methods = {FileMethod::kThreads};
  if (FileEngine(1, kSegment, FileMethod::kAuto).method() == FileMethod::kUring) {
    methods.push_back(FileMethod::kUring);
  } else {
    std::fprintf(stderr, "no io_uring here: threads only\n");
  }
  for (const FileMethod method : methods) {
    for (const std::uint32_t depth : {1U, 7U, 64U}) {
      what_was_written_is_read_back(method, depth);
      a_read_ends_where_the_file_does(method, depth);
      one_bad_item_spoils_no_other(method, depth);
      a_write_past_the_size_limit_is_an_error_of_its_item(method, depth);
      allocated_files_have_their_size_and_read_as_zeros(method, depth);
      threads_share_an_engine(method, depth);
      a_stopped_batch_begins_nothing_more(method, depth);
      a_closed_engine_refuses(method, depth);
    }
  }
  mistakes_are_refused();
}
