#include "ucp.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace kvtier::ucp {
namespace {

constexpr unsigned kMajor = 1;
constexpr unsigned kMinorMin = 12;  // the first with all that is used here

/// Settings that UCX reads while its library is loaded, and never again.
constexpr std::array<std::pair<const char*, const char*>, 4> kLoadSettings = {{
    {"UCX_DEBUG_SIGNO", "0"},          // its handler of SIGHUP prints all threads' stacks
    {"UCX_HANDLE_ERRORS", "none"},     // its handlers of SIGSEGV and the like are not ours to bring
    {"UCX_LOG_LEVEL", "fatal"},        // a peer that dies is an outcome, which we report ourselves
    {"UCX_WARN_UNUSED_ENV_VARS", "n"}  // it would complain of settings of newer versions
}};

/// The settings above, in the environment as long as it lives.
class LoadSettings {
 public:
  LoadSettings() {
    for (const auto& [name, value] : kLoadSettings) {
      if (std::getenv(name) != nullptr) continue;
      setenv(name, value, 0);
      ours_.push_back(name);
    }
  }
  ~LoadSettings() {
    for (const char* name : ours_) unsetenv(name);
  }
  LoadSettings(const LoadSettings&) = delete;
  LoadSettings& operator=(const LoadSettings&) = delete;

 private:
  std::vector<const char*> ours_;
};

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) throw Missing(std::string("it has no ") + name);
  function = reinterpret_cast<Function>(symbol);
}

/// @throws Missing it cannot be loaded, or is too old
std::unique_ptr<const Library> load_one(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    throw Missing(why != nullptr ? why : "cannot be loaded");
  }
  auto library = std::make_unique<Library>();
  void (*get_version)(unsigned*, unsigned*, unsigned*) = nullptr;
  find(handle, "ucp_get_version", get_version);
  get_version(&library->major, &library->minor, &library->release);
  if (library->major != kMajor || library->minor < kMinorMin) {
    throw Missing("it is version " + std::to_string(library->major) + "." +
                  std::to_string(library->minor) + ", needed is 1.12 or later");
  }
  find(handle, "ucp_config_read", library->config_read);
  find(handle, "ucp_config_modify", library->config_modify);
  find(handle, "ucp_config_release", library->config_release);
  find(handle, "ucp_init_version", library->init_version);
  find(handle, "ucp_cleanup", library->cleanup);
  find(handle, "ucp_context_print_info", library->context_print_info);
  find(handle, "ucp_worker_create", library->worker_create);
  find(handle, "ucp_worker_destroy", library->worker_destroy);
  find(handle, "ucp_worker_get_address", library->worker_get_address);
  find(handle, "ucp_worker_release_address", library->worker_release_address);
  find(handle, "ucp_worker_progress", library->worker_progress);
  find(handle, "ucp_worker_get_efd", library->worker_get_efd);
  find(handle, "ucp_worker_arm", library->worker_arm);
  find(handle, "ucp_ep_create", library->ep_create);
  find(handle, "ucp_ep_close_nbx", library->ep_close_nbx);
  find(handle, "ucp_ep_flush_nbx", library->ep_flush_nbx);
  find(handle, "ucp_ep_rkey_unpack", library->ep_rkey_unpack);
  find(handle, "ucp_rkey_destroy", library->rkey_destroy);
  find(handle, "ucp_rkey_pack", library->rkey_pack);
  find(handle, "ucp_rkey_buffer_release", library->rkey_buffer_release);
  find(handle, "ucp_mem_map", library->mem_map);
  find(handle, "ucp_mem_unmap", library->mem_unmap);
  find(handle, "ucp_put_nbx", library->put_nbx);
  find(handle, "ucp_get_nbx", library->get_nbx);
  find(handle, "ucp_worker_set_am_recv_handler", library->worker_set_am_recv_handler);
  find(handle, "ucp_am_send_nbx", library->am_send_nbx);
  find(handle, "ucp_ep_query", library->ep_query);
  find(handle, "ucp_request_free", library->request_free);
  find(handle, "ucs_status_string", library->status_string);  // of libucs, which it brings

  Dl_info where{};
  const bool known = dladdr(reinterpret_cast<void*>(get_version), &where) != 0;
  library->path = known && where.dli_fname != nullptr ? where.dli_fname : name;
  return library;
}

std::unique_ptr<const Library> load_first(const std::string& wheel_path) {
  std::vector<std::string> names;
  if (const char* const chosen = std::getenv("KVTIER_UCX_LIBRARY"); chosen != nullptr && *chosen) {
    names.emplace_back(chosen);  // and no other: who names one does not want another
  } else {
    names.emplace_back("libucp.so.0");
    if (!wheel_path.empty()) names.push_back(wheel_path);
  }
  const LoadSettings settings;
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
  throw Missing("no usable UCX library: " + tried);
}

}  // namespace

const Library& load(const std::string& wheel_path) {
  static std::mutex mutex;
  static std::unique_ptr<const Library> library;
  const std::lock_guard lock(mutex);
  if (library == nullptr) library = load_first(wheel_path);
  return *library;
}

}  // namespace kvtier::ucp
