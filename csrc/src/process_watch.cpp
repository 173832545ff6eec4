#include "process_watch.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvtier {

std::uint64_t process_start(std::int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  // proc(5): the name, in brackets, may hold brackets and blanks; what follows the last is plain.
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  std::uint64_t start = 0;
  fields >> start;
  return fields ? start : 0;
}

ProcessWatch::ProcessWatch(std::int64_t pid, std::uint64_t start) : fd_(-1) {
  if (pid <= 0 || pid > std::numeric_limits<pid_t>::max()) {
    throw std::runtime_error(std::to_string(pid) + " is no process id");
  }
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0U));
  if (fd_ < 0) {
    if (errno == ESRCH) throw std::runtime_error("no process " + std::to_string(pid));
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  // Looked at only now: whoever the pidfd holds is the one that has this start time.
  const std::uint64_t found = process_start(pid);
  if (!is_alive() || (start != 0 && found != start)) {
    ::close(fd_);
    throw std::runtime_error("process " + std::to_string(pid) + " is no longer the one meant");
  }
}

ProcessWatch::~ProcessWatch() { ::close(fd_); }

bool ProcessWatch::is_alive() const {
  pollfd look{fd_, POLLIN, 0};
  return poll(&look, 1, 0) == 0;
}

}  // namespace kvtier
