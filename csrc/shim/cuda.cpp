#include "cuda.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace kvtier::cuda {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Missing(std::string("CUDA's driver has no ") + name);
}

}  // namespace

Library load() {
  const char* const chosen = std::getenv("KVTIER_CUDA_LIBRARY");
  const bool is_chosen = chosen != nullptr && *chosen != '\0';
  void* const handle = dlopen(is_chosen ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    throw Missing(std::string("no CUDA driver: ") + (why != nullptr ? why : "cannot be loaded"));
  }
  Library library;
  find(handle, "cuInit", library.init);
  find(handle, "cuDeviceGet", library.device_get);
  find(handle, "cuDevicePrimaryCtxRetain", library.primary_context_retain);
  find(handle, "cuDevicePrimaryCtxRelease_v2", library.primary_context_release);
  find(handle, "cuCtxPushCurrent_v2", library.context_push);
  find(handle, "cuCtxPopCurrent_v2", library.context_pop);
  find(handle, "cuStreamCreate", library.stream_create);
  find(handle, "cuStreamDestroy_v2", library.stream_destroy);
  find(handle, "cuStreamSynchronize", library.stream_synchronize);
  find(handle, "cuGetErrorName", library.get_error_name);
  if (const Result result = library.init(0); result != 0) {
    throw Missing("CUDA does not start: " + words_of(library, result));
  }
  return library;
}

std::string words_of(const Library& library, Result result) {
  const char* name = nullptr;
  const bool is_known = library.get_error_name(result, &name) == 0 && name != nullptr;
  return "CUDA " + std::to_string(result) + ": " + (is_known ? name : "an unknown error");
}

PrimaryContext::PrimaryContext(const Library& library, int ordinal) : library_(library) {
  result_ = library_.device_get(&device_, ordinal);
  if (result_ == 0) result_ = library_.primary_context_retain(&context_, device_);
  if (result_ != 0) context_ = nullptr;
}

PrimaryContext::~PrimaryContext() {
  if (result_ == 0) library_.primary_context_release(device_);
}

}  // namespace kvtier::cuda
