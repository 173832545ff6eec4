// Images that NVRTC made, kept on disk for the next process.
//
// Below $XDG_CACHE_HOME/kvtier, else ~/.cache/kvtier. A file is written aside and renamed, and
// holds a digest of its content and of what it was made from: whatever is damaged, foreign or of
// other sources reads as missing.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvtier/sha256.hpp"

namespace kvtier {

/// At most so many images are kept; those written longest ago go first.
constexpr std::size_t kCachedImagesMax = 32;

/// An open folder of images. Several processes and threads may use it at once.
class DeviceCache {
 public:
  /// Opens the folder, and makes it with mode 0700 where there is none.
  DeviceCache();
  ~DeviceCache();
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  /// The image kept under `target` and `key`; nothing if there is none or it is damaged.
  std::optional<std::vector<std::byte>> read(const std::string& target,
                                             const Sha256Digest& key) const;

  /// Keep `image`. Gives why it was not kept, in words; "" if it was.
  std::string write(const std::string& target, const Sha256Digest& key,
                    std::span<const std::byte> image) const;

 private:
  void drop_oldest() const;

  std::string path_;
  std::string unusable_;  // why there is no folder, in words; else ""
  int folder_ = -1;
};

}  // namespace kvtier
