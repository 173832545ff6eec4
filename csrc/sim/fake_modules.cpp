// Modules and launches of the stand-in for libcuda: it has no kernels yet, so no image has code for
// it.
#include "fake_state.hpp"

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
