// One number for every way in which a request by cuFile can fail: errnos up to 5000, then cuFile's
// own codes, then CUDA's, shifted.
#pragma once
#include <cerrno>

#include "../shim/cufile.hpp"

namespace kvtier::gds {

constexpr int kCudaBase = 10000;

/// 0, or why the call failed.
inline int code_of(cufile::Status status) {
  if (status.code == cufile::kCudaFailed && status.cuda != 0) return kCudaBase + status.cuda;
  return status.code;
}

inline int code_of_cuda(int result) { return result == 0 ? 0 : kCudaBase + result; }

inline int errno_of(int code) {
  if (code <= kCudaBase) return cufile::errno_of(code);
  switch (code - kCudaBase) {
    case 2:  // out of memory
      return ENOMEM;
    case 100:  // no device
    case 101:  // no such device
      return ENODEV;
    default:
      return EIO;
  }
}

}  // namespace kvtier::gds
