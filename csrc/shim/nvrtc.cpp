#include "nvrtc.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace kvtier::nvrtc {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Failure(std::string("it has no ") + name);
}

Library load_one(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    throw Failure(why != nullptr ? why : "cannot be loaded");
  }
  Library library;
  find(handle, "nvrtcVersion", library.version);
  find(handle, "nvrtcGetNumSupportedArchs", library.get_num_supported_archs);
  find(handle, "nvrtcGetSupportedArchs", library.get_supported_archs);
  find(handle, "nvrtcCreateProgram", library.create_program);
  find(handle, "nvrtcDestroyProgram", library.destroy_program);
  find(handle, "nvrtcCompileProgram", library.compile_program);
  find(handle, "nvrtcGetProgramLogSize", library.get_log_size);
  find(handle, "nvrtcGetProgramLog", library.get_log);
  find(handle, "nvrtcGetCUBINSize", library.get_cubin_size);
  find(handle, "nvrtcGetCUBIN", library.get_cubin);
  find(handle, "nvrtcGetPTXSize", library.get_ptx_size);
  find(handle, "nvrtcGetPTX", library.get_ptx);
  find(handle, "nvrtcGetErrorString", library.get_error_string);
  int major = 0;
  int minor = 0;
  check(library, library.version(&major, &minor), "nvrtcVersion");
  library.version_words = std::to_string(major) + "." + std::to_string(minor);
  int count = 0;
  check(library, library.get_num_supported_archs(&count), "nvrtcGetNumSupportedArchs");
  library.architectures.resize(static_cast<std::size_t>(std::max(count, 0)));
  check(library, library.get_supported_archs(library.architectures.data()),
        "nvrtcGetSupportedArchs");
  std::ranges::sort(library.architectures);
  return library;
}

/// Where Python packages lie beside the one that holds this code; empty if that is not known.
std::filesystem::path packages_folder() {
  Dl_info own{};
  if (dladdr(reinterpret_cast<void*>(&load), &own) == 0 || own.dli_fname == nullptr) return {};
  return std::filesystem::path(own.dli_fname).parent_path().parent_path();
}

std::vector<std::string> candidates() {
  if (const char* const chosen = std::getenv("KVTIER_NVRTC_LIBRARY");
      chosen != nullptr && *chosen != '\0') {
    return {chosen};
  }
  // 12 before 13: what it makes loads on drivers of both.
  std::vector<std::string> names = {"libnvrtc.so.12", "libnvrtc.so.13"};
  const std::filesystem::path folder = packages_folder();
  for (const char* const file :
       {"nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cu13/lib/libnvrtc.so.13"}) {
    std::error_code none;
    if (std::filesystem::exists(folder / file, none)) names.push_back(folder / file);
  }
  return names;
}

}  // namespace

Library load() {
  std::string tried;
  for (const std::string& name : candidates()) {
    try {
      return load_one(name);
    } catch (const Failure& failure) {
      // The loader's own words begin with the name already.
      const std::string_view why = failure.what();
      tried += (tried.empty() ? "" : "; ") + (why.starts_with(name) ? "" : name + ": ");
      tried += why;
    }
  }
  throw Failure("no usable NVRTC: " + tried);
}

void check(const Library& library, Result result, const char* call) {
  if (result == 0) return;
  throw Failure(std::string(call) + ": " + library.get_error_string(result));
}

}  // namespace kvtier::nvrtc
