#include "device_cache.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvtier {
namespace {

constexpr std::string_view kPrefix = "kernels-";  // the folder may hold other things of kvtier's
constexpr std::string_view kMagic = "kvtkern1";   // begins each file; the digest follows
constexpr std::size_t kHeaderBytes = kMagic.size() + sizeof(Sha256Digest);
constexpr std::size_t kFileBytesMax = std::size_t{64} << 20;  // images have a hundred KiB

/// Closes at the end.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return number_; }
  bool is_open() const { return number_ >= 0; }

 private:
  int number_;
};

std::string hexadecimal(std::span<const std::uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string digits;
  for (const std::uint8_t byte : bytes) {
    digits += kDigits[byte >> 4];
    digits += kDigits[byte & 15];
  }
  return digits;
}

std::string file_name(const std::string& target, const Sha256Digest& key) {
  return std::string(kPrefix) + target + "-" + hexadecimal(std::span(key).first(16));
}

/// What a file begins with: the digest is of the key and of the image that follows.
std::vector<std::byte> header_of(const Sha256Digest& key, std::span<const std::byte> image) {
  Sha256 hash;
  hash.update(key);
  hash.update({reinterpret_cast<const std::uint8_t*>(image.data()), image.size()});
  const Sha256Digest digest = hash.finish();
  std::vector<std::byte> header(kHeaderBytes);
  std::memcpy(header.data(), kMagic.data(), kMagic.size());
  std::memcpy(&header[kMagic.size()], digest.data(), digest.size());
  return header;
}

/// Empty where neither variable is set: a relative XDG_CACHE_HOME does not count.
std::string cache_home() {
  const char* const chosen = std::getenv("XDG_CACHE_HOME");
  if (chosen != nullptr && *chosen == '/') return chosen;
  const char* const home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache" : "";
}

/// As mkdir -p, each folder for the user alone. Failures show when the last one is opened.
void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    ::mkdir(path.substr(0, end).c_str(), 0700);
    if (end == std::string::npos) return;
  }
}

std::string words_of(const std::string& path, int error_number) {
  return path + ": " + std::generic_category().message(error_number);
}

/// Moves `nbytes` by `call`, which is read or write; false on an error or an early end.
template <typename Call, typename Byte>
bool move_all(Call call, int descriptor, Byte* bytes, std::size_t nbytes) {
  while (nbytes > 0) {
    const ssize_t moved = call(descriptor, bytes, nbytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    bytes += moved;
    nbytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

}  // namespace

DeviceCache::DeviceCache() {
  const std::string home = cache_home();
  if (home.empty()) {
    unusable_ = "neither XDG_CACHE_HOME nor HOME is set";
    return;
  }
  path_ = home + "/kvtier";
  make_folders(path_);
  folder_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat status{};
  if (folder_ < 0 || ::fstat(folder_, &status) != 0) {
    unusable_ = words_of(path_, errno);
  } else if (status.st_uid != ::geteuid() || (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    // The device would run what another user put there.
    unusable_ = path_ + ": other users may write there";
  }
}

DeviceCache::~DeviceCache() {
  if (folder_ >= 0) ::close(folder_);
}

std::optional<std::vector<std::byte>> DeviceCache::read(const std::string& target,
                                                        const Sha256Digest& key) const {
  if (!unusable_.empty()) return std::nullopt;
  // Not to wait should it be a pipe.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  const Descriptor file(::openat(folder_, file_name(target, key).c_str(), kFlags));
  struct stat status{};
  if (!file.is_open() || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return std::nullopt;
  }
  const auto file_bytes = static_cast<std::size_t>(status.st_size);
  if (file_bytes <= kHeaderBytes || file_bytes > kFileBytesMax) return std::nullopt;
  std::vector<std::byte> content(file_bytes);
  if (!move_all(::read, file.get(), content.data(), content.size())) return std::nullopt;
  const auto image = std::span<const std::byte>(content).subspan(kHeaderBytes);
  if (!std::ranges::equal(std::span(content).first(kHeaderBytes), header_of(key, image))) {
    return std::nullopt;
  }
  return std::vector(image.begin(), image.end());
}

std::string DeviceCache::write(const std::string& target, const Sha256Digest& key,
                               std::span<const std::byte> image) const {
  if (!unusable_.empty()) return unusable_;
  std::array<std::uint8_t, 8> salt;
  if (::getrandom(salt.data(), salt.size(), 0) != static_cast<ssize_t>(salt.size())) {
    return words_of(path_, errno);
  }
  const std::string name = file_name(target, key);
  const std::string partial = name + "." + hexadecimal(salt) + ".partial";
  const int number =
      ::openat(folder_, partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (number < 0) return words_of(path_, errno);
  const std::vector<std::byte> header = header_of(key, image);
  const bool is_written = move_all(::write, number, header.data(), header.size()) &&
                          move_all(::write, number, image.data(), image.size());
  // Some file systems tell only at the close that there is no space.
  const bool is_closed = ::close(number) == 0;
  if (!is_written || !is_closed ||
      ::renameat(folder_, partial.c_str(), folder_, name.c_str()) != 0) {
    const int error_number = errno;
    ::unlinkat(folder_, partial.c_str(), 0);
    return words_of(path_, error_number);
  }
  drop_oldest();
  return "";
}

void DeviceCache::drop_oldest() const {
  const int again = ::openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const listing = again >= 0 ? ::fdopendir(again) : nullptr;
  if (listing == nullptr) {
    if (again >= 0) ::close(again);
    return;
  }
  std::vector<std::pair<std::int64_t, std::string>> images;  // when written, in ns; name
  while (const dirent* const entry = ::readdir(listing)) {
    const std::string name = entry->d_name;
    struct stat status{};
    if (name.starts_with(kPrefix) &&
        ::fstatat(folder_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
      const timespec& when = status.st_mtim;
      images.emplace_back(std::int64_t{when.tv_sec} * 1'000'000'000 + when.tv_nsec, name);
    }
  }
  ::closedir(listing);
  if (images.size() <= kCachedImagesMax) return;
  std::ranges::sort(images);
  images.resize(images.size() - kCachedImagesMax);
  for (const auto& [when, name] : images) ::unlinkat(folder_, name.c_str(), 0);
}

}  // namespace kvtier
