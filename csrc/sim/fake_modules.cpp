// Modules and launches of the stand-in for libcuda: it has no kernels yet, so no image has code for
// it.
#include "fake_state.hpp"

namespace fake {

int max_shared_bytes(int capability) {
  switch (capability) {
    case 80:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
      return 99 << 10;
    default:
      return 227 << 10;
  }
}

}  // namespace fake

using namespace fake;

extern "C" {

int cuModuleLoadData(void** module, const void* image) {
  if (const int code = fault_of(kModuleLoad)) return code;
  if (module == nullptr || image == nullptr) return api::kInvalidValue;
  return begin().code != 0 ? begin().code : api::kNoBinaryForGpu;
}

int cuModuleUnload(void* /*module*/) { return kInvalidHandle; }

int cuModuleGetFunction(void** /*function*/, void* /*module*/, const char* /*name*/) {
  if (const int code = fault_of(kModuleGetFunction)) return code;
  return api::kNotFound;
}

int cuFuncSetAttribute(void* /*function*/, int /*attribute*/, int /*value*/) {
  if (const int code = fault_of(kFunctionSetAttribute)) return code;
  return kInvalidHandle;
}

int cuLaunchKernel(void* /*function*/, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned, void* /*stream*/, void** /*arguments*/, void** /*extra*/) {
  if (const int code = fault_of(kLaunch)) return code;
  return kInvalidHandle;
}
}
