// Token ids as callers hold them (arrays of several integer types, lists, tuples) read as uint32.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtier::bindings {

/// A view of one `tokens` argument that converts only the piece asked for, so a lookup that misses
/// early pays for the tokens it hashed and no others. Lives no longer than the argument.
class Tokens {
 public:
  /// @throws nanobind::type_error unless it is a list, a tuple or a one-dimensional contiguous
  ///         array of uint32, int32, int64 or uint64
  explicit Tokens(nanobind::handle tokens);

  std::size_t size() const { return size_; }

  /// Whether `read` touches Python objects; if not, it may be called without the GIL.
  bool needs_gil() const { return !array_.has_value(); }

  /// The tokens [first, first + count): either the array itself or `scratch`, which is overwritten.
  ///
  /// @throws std::invalid_argument naming the position of a token outside uint32
  /// @throws nanobind::type_error (lists and tuples) naming the position of something not an int
  /// @throws std::out_of_range if the tokens end before (a list may shrink between two reads)
  std::span<const std::uint32_t> read(std::size_t first, std::size_t count,
                                      std::vector<std::uint32_t>& scratch) const;

  std::span<const std::uint32_t> read_all(std::vector<std::uint32_t>& scratch) const {
    return read(0, size_, scratch);
  }

 private:
  using Array =
      nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

  [[noreturn]] static void refuse_range(std::size_t position, const std::string& value) {
    throw std::invalid_argument("token " + value + " at position " + std::to_string(position) +
                                ", must be 0 to 4294967295");
  }

  template <typename Integer>
  std::span<const std::uint32_t> convert_array(std::size_t first, std::size_t count,
                                               std::vector<std::uint32_t>& scratch) const;
  std::span<const std::uint32_t> convert_objects(std::size_t first, std::size_t count,
                                                 std::vector<std::uint32_t>& scratch) const;
  static std::int64_t to_integer(PyObject* object, std::size_t position);

  nanobind::handle source_;
  std::optional<Array> array_;
  std::size_t size_ = 0;
};

inline Tokens::Tokens(nanobind::handle tokens) : source_(tokens) {
  if (PyList_Check(tokens.ptr()) || PyTuple_Check(tokens.ptr())) {
    size_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(tokens.ptr()));
    return;
  }
  Array array;
  if (nanobind::try_cast<Array>(tokens, array, false)) {
    const nanobind::dlpack::dtype type = array.dtype();
    if (type == nanobind::dtype<std::uint32_t>() || type == nanobind::dtype<std::int32_t>() ||
        type == nanobind::dtype<std::int64_t>() || type == nanobind::dtype<std::uint64_t>()) {
      size_ = array.shape(0);
      array_ = std::move(array);
      return;
    }
  }
  throw nanobind::type_error(
      "tokens must be a list or tuple of ints, or a one-dimensional contiguous array of uint32, "
      "int32, int64 or uint64");
}

inline std::span<const std::uint32_t> Tokens::read(std::size_t first, std::size_t count,
                                                   std::vector<std::uint32_t>& scratch) const {
  if (first > size_ || count > size_ - first) {
    throw std::out_of_range("tokens " + std::to_string(first) + " to " +
                            std::to_string(first + count) + " of " + std::to_string(size_));
  }
  if (!array_) return convert_objects(first, count, scratch);
  const nanobind::dlpack::dtype type = array_->dtype();
  if (type == nanobind::dtype<std::uint32_t>()) {
    return {static_cast<const std::uint32_t*>(array_->data()) + first, count};
  }
  if (type == nanobind::dtype<std::int32_t>()) {
    return convert_array<std::int32_t>(first, count, scratch);
  }
  if (type == nanobind::dtype<std::int64_t>()) {
    return convert_array<std::int64_t>(first, count, scratch);
  }
  return convert_array<std::uint64_t>(first, count, scratch);
}

template <typename Integer>
std::span<const std::uint32_t> Tokens::convert_array(std::size_t first, std::size_t count,
                                                     std::vector<std::uint32_t>& scratch) const {
  const Integer* const tokens = static_cast<const Integer*>(array_->data()) + first;
  scratch.resize(count);
  // No branch in the loop, so that it vectorises: any bit outside the low 32 (or a sign) shows
  // here.
  using Unsigned = std::make_unsigned_t<Integer>;
  constexpr Unsigned kAllowed = std::is_same_v<Integer, std::int32_t>
                                    ? Unsigned{0x7fffffffU}
                                    : static_cast<Unsigned>(0xffffffffU);
  Unsigned seen = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Unsigned token = static_cast<Unsigned>(tokens[i]);
    seen |= token;
    scratch[i] = static_cast<std::uint32_t>(token);
  }
  if ((seen & static_cast<Unsigned>(~kAllowed)) != 0) {
    for (std::size_t i = 0; i < count; ++i) {
      if ((static_cast<Unsigned>(tokens[i]) & static_cast<Unsigned>(~kAllowed)) != 0) {
        refuse_range(first + i, std::to_string(tokens[i]));
      }
    }
  }
  return scratch;
}

inline std::span<const std::uint32_t> Tokens::convert_objects(
    std::size_t first, std::size_t count, std::vector<std::uint32_t>& scratch) const {
  // Reading an exact int runs no Python code, so the list cannot change within this call.
  if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(source_.ptr())) < first + count) {
    throw std::out_of_range("the list of tokens shrank while it was read");
  }
  PyObject** const objects = PySequence_Fast_ITEMS(source_.ptr()) + first;
  scratch.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t token = to_integer(objects[i], first + i);
    if (token < 0 || token > std::numeric_limits<std::uint32_t>::max()) {
      refuse_range(first + i, nanobind::str(objects[i]).c_str());
    }
    scratch[i] = static_cast<std::uint32_t>(token);
  }
  return scratch;
}

inline std::int64_t Tokens::to_integer(PyObject* object, std::size_t position) {
  if (!PyLong_Check(object)) {
    throw nanobind::type_error(("token at position " + std::to_string(position) + " is " +
                                Py_TYPE(object)->tp_name + ", not int")
                                   .c_str());
  }
  // Token ids are small ints: their one digit is read in place, several times faster than the call.
#if PY_VERSION_HEX >= 0x030c0000
  auto* const number = reinterpret_cast<PyLongObject*>(object);
  if (PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#else
  if (Py_SIZE(object) == 1) return reinterpret_cast<PyLongObject*>(object)->ob_digit[0];
#endif
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? value : -1;  // -1 stands for "out of range", the caller prints the object
}

}  // namespace kvtier::bindings
