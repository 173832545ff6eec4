#include "cufile.hpp"

#include <dlfcn.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <vector>

namespace kvtier::cufile {
namespace {

struct Meaning {
  int code;
  int error_number;
  std::string_view words;
};

constexpr std::array kMeanings = {
    Meaning{5001, ENODEV, "the nvidia-fs driver is not loaded and compatible mode is off"},
    Meaning{5002, EINVAL, "the driver has no such property"},
    Meaning{5003, ERANGE, "a property of the driver is out of range"},
    Meaning{5004, ENODEV, "the nvidia-fs driver has another version"},
    Meaning{5005, ENODEV, "the nvidia-fs driver does not tell its version"},
    Meaning{5006, ESHUTDOWN, "the driver is shutting down"},
    Meaning{5007, EOPNOTSUPP, "no GPUDirect Storage on this platform"},
    Meaning{5008, EOPNOTSUPP, "no GPUDirect Storage for this file"},
    Meaning{5009, EOPNOTSUPP, "no GPUDirect Storage for this GPU"},
    Meaning{5010, EIO, "the nvidia-fs driver failed"},
    Meaning{5011, EIO, "the CUDA driver failed"},
    Meaning{5012, EFAULT, "no device memory at this address"},
    Meaning{5013, EFAULT, "memory of the wrong type"},
    Meaning{5014, EFAULT, "the range exceeds its allocation"},
    Meaning{5015, EINVAL, "another CUDA context is current"},
    Meaning{5016, EFAULT, "beyond the most that may be pinned"},
    Meaning{5017, EFAULT, "beyond what is mapped"},
    Meaning{5018, EOPNOTSUPP, "no file of a supported type"},
    Meaning{5019, EINVAL, "the file is open with flags that are not supported"},
    Meaning{5020, EINVAL, "the file is not open for direct I/O"},
    Meaning{5022, EINVAL, "invalid arguments"},
    Meaning{5023, EEXIST, "the memory is registered already"},
    Meaning{5024, EFAULT, "the memory is not registered"},
    Meaning{5025, EACCES, "access to the driver or the file is denied"},
    Meaning{5026, EBUSY, "the driver is open already"},
    Meaning{5027, EBADF, "the file is not registered"},
    Meaning{5028, EEXIST, "the file is registered already"},
    Meaning{5029, ENODEV, "no such GPU"},
    Meaning{5030, EIO, "an internal error"},
    Meaning{5031, EMFILE, "no further file descriptor"},
    Meaning{5033, ENODEV, "the driver cannot be initialised"},
    Meaning{5034, EOPNOTSUPP, "turned off for this file by the configuration"},
    Meaning{5035, EIO, "a batch was not taken"},
    Meaning{5036, ENOMEM, "no GPU memory could be pinned"},
    Meaning{5037, EAGAIN, "the batch is full"},
    Meaning{5038, EOPNOTSUPP, "no operations on streams"},
};

const Meaning* find_meaning(int code) {
  for (const Meaning& meaning : kMeanings) {
    if (meaning.code == code) return &meaning;
  }
  return nullptr;
}

std::string loader_words() {
  const char* const words = dlerror();
  return words != nullptr ? words : "cannot be loaded";
}

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

template <typename Function>
void need(void* library, const char* name, Function& function) {
  if (!find(library, name, function)) throw Missing(std::string("it has no ") + name);
}

Library load_one(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Missing(loader_words());
  Library library;
  need(handle, "cuFileDriverOpen", library.driver_open);
  if (!find(handle, "cuFileDriverClose_v2", library.driver_close)) {
    need(handle, "cuFileDriverClose", library.driver_close);
  }
  need(handle, "cuFileHandleRegister", library.handle_register);
  need(handle, "cuFileHandleDeregister", library.handle_deregister);
  need(handle, "cuFileBufRegister", library.buffer_register);
  need(handle, "cuFileBufDeregister", library.buffer_deregister);
  need(handle, "cuFileRead", library.read);
  need(handle, "cuFileWrite", library.write);
  const auto want = [&](const char* name, auto& function) {
    if (!find(handle, name, function)) library.missing_for_streams = name;
  };
  want("cuFileStreamRegister", library.stream_register);
  want("cuFileStreamDeregister", library.stream_deregister);
  want("cuFileWriteAsync", library.write_async);
  want("cuFileReadAsync", library.read_async);
  Dl_info where{};
  const bool is_known = dladdr(reinterpret_cast<void*>(library.read), &where) != 0;
  library.path = is_known && where.dli_fname != nullptr ? where.dli_fname : name;
  return library;
}

}  // namespace

Library load(const std::string& wheel_path, const std::string& no_cuda) {
  std::vector<std::string> names;
  if (const char* const chosen = std::getenv("KVTIER_CUFILE_LIBRARY");
      chosen != nullptr && *chosen != '\0') {
    names.emplace_back(chosen);  // and no other: who names one does not want another
  } else {
    // Without CUDA's driver the real library loads, leaves a log file in the working directory and
    // fails: better not to touch it.
    if (!no_cuda.empty()) throw Missing(no_cuda);
    names.emplace_back("libcufile.so.0");
    if (!wheel_path.empty()) names.push_back(wheel_path);
  }
  std::string tried;
  for (const std::string& name : names) {
    try {
      return load_one(name);
    } catch (const Missing& error) {
      // The loader's own words begin with the name already.
      const std::string_view why = error.what();
      tried += (tried.empty() ? "" : "; ") + (why.starts_with(name) ? "" : name + ": ");
      tried += why;
    }
  }
  throw Missing("no usable cuFile library: " + tried);
}

int errno_of(int code) {
  if (code < kErrorBase) return code;
  const Meaning* const meaning = find_meaning(code);
  return meaning != nullptr ? meaning->error_number : EIO;
}

std::string words_of(int code) {
  if (code < kErrorBase) return std::generic_category().message(code);
  const Meaning* const meaning = find_meaning(code);
  return "cuFile " + std::to_string(code) + ": " +
         std::string(meaning != nullptr ? meaning->words : "an unknown error");
}

}  // namespace kvtier::cufile
