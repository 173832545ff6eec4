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

/// Not with dlsym: what a name exports is not one signature in all drivers.
void find_batch_copy(void* handle, Library& library) {
  Result (*get_proc_address)(const char* name, void** function, int version, std::uint64_t flags,
                             int* status) = nullptr;
  get_proc_address =
      reinterpret_cast<decltype(get_proc_address)>(dlsym(handle, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) return;  // a driver before 12.0
  void* function = nullptr;
  int status = 0;
  if (get_proc_address("cuMemcpyBatchAsync", &function, kBatchCopyVersion, 0, &status) == kOk) {
    library.memcpy_batch_async = reinterpret_cast<decltype(library.memcpy_batch_async)>(function);
  }
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
  find(handle, "cuDriverGetVersion", library.driver_get_version);
  find(handle, "cuGetErrorName", library.get_error_name);
  find(handle, "cuGetErrorString", library.get_error_string);
  find(handle, "cuDeviceGet", library.device_get);
  find(handle, "cuDeviceGetCount", library.device_get_count);
  find(handle, "cuDeviceGetName", library.device_get_name);
  find(handle, "cuDeviceGetAttribute", library.device_get_attribute);
  find(handle, "cuDevicePrimaryCtxRetain", library.primary_context_retain);
  find(handle, "cuDevicePrimaryCtxRelease_v2", library.primary_context_release);
  find(handle, "cuCtxPushCurrent_v2", library.context_push);
  find(handle, "cuCtxPopCurrent_v2", library.context_pop);
  find(handle, "cuCtxGetCurrent", library.context_get_current);
  find(handle, "cuStreamCreate", library.stream_create);
  find(handle, "cuStreamCreateWithPriority", library.stream_create_with_priority);
  find(handle, "cuStreamDestroy_v2", library.stream_destroy);
  find(handle, "cuStreamSynchronize", library.stream_synchronize);
  find(handle, "cuStreamQuery", library.stream_query);
  find(handle, "cuStreamWaitEvent", library.stream_wait_event);
  find(handle, "cuStreamGetCtx", library.stream_get_context);
  find(handle, "cuEventCreate", library.event_create);
  find(handle, "cuEventDestroy_v2", library.event_destroy);
  find(handle, "cuEventRecord", library.event_record);
  find(handle, "cuEventQuery", library.event_query);
  find(handle, "cuEventSynchronize", library.event_synchronize);
  // Not its _v2, which drivers before 12.8 lack; the two have the same signature.
  find(handle, "cuEventElapsedTime", library.event_elapsed_time);
  find(handle, "cuMemAlloc_v2", library.memory_allocate);
  find(handle, "cuMemFree_v2", library.memory_free);
  find(handle, "cuMemGetInfo_v2", library.memory_get_info);
  find(handle, "cuMemGetAddressRange_v2", library.memory_get_address_range);
  find(handle, "cuMemHostAlloc", library.host_allocate);
  find(handle, "cuMemFreeHost", library.host_free);
  find(handle, "cuMemHostRegister_v2", library.host_register);
  find(handle, "cuMemHostUnregister", library.host_unregister);
  find(handle, "cuMemHostGetDevicePointer_v2", library.host_get_device_pointer);
  find(handle, "cuPointerGetAttribute", library.pointer_get_attribute);
  find(handle, "cuMemcpyAsync", library.memcpy_async);
  find(handle, "cuMemsetD8Async", library.memset_d8_async);
  find(handle, "cuModuleLoadData", library.module_load_data);
  find(handle, "cuModuleUnload", library.module_unload);
  find(handle, "cuModuleGetFunction", library.module_get_function);
  find(handle, "cuFuncSetAttribute", library.function_set_attribute);
  find(handle, "cuLaunchKernel", library.launch_kernel);
  find_batch_copy(handle, library);
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

void check(const Library& library, Result result, const char* call) {
  if (result != kOk) throw CudaError(result, std::string(call) + ": " + words_of(library, result));
}

bool is_sticky(Result result) {
  switch (result) {
    case 4:    // CUDA_ERROR_DEINITIALIZED: the process ends
    case 709:  // CUDA_ERROR_CONTEXT_IS_DESTROYED
    // Bytes are lost, and which ones is not known.
    case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
    case 220:  // CUDA_ERROR_NVLINK_UNCORRECTABLE
    // By the documentation, all further CUDA work of the process gives the same error.
    case 226:  // CUDA_ERROR_CONTAINED
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 710:  // CUDA_ERROR_ASSERT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
    case 721:  // CUDA_ERROR_TENSOR_MEMORY_LEAK
    case 810:  // CUDA_ERROR_MPS_CLIENT_TERMINATED
    case 911:  // CUDA_ERROR_EXTERNAL_DEVICE
      return true;
    default:
      return false;
  }
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
