// Byte strings of several parts, for peers; read back with every length checked.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvtier {

class Packer {
 public:
  template <typename T>
  Packer& number(T value) {
    static_assert(std::is_integral_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Packer& part(std::string_view bytes) {
    number(static_cast<std::uint32_t>(bytes.size()));
    bytes_.append(bytes);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// @throws std::runtime_error there is less than what is asked for
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : left_(bytes) {}

  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    const std::string_view bytes = take(sizeof(T));
    T value{};
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view part() { return take(number<std::uint32_t>()); }

  void end() const {
    if (!left_.empty()) throw std::runtime_error("a peer's bytes are longer than they say");
  }

 private:
  std::string_view take(std::size_t count) {
    if (count > left_.size()) throw std::runtime_error("a peer's bytes are shorter than they say");
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }

  std::string_view left_;
};

}  // namespace kvtier
