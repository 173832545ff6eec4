#include "ucx_context.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "packing.hpp"

namespace kvtier {
namespace {

constexpr std::array<std::string_view, 5> kRdma = {"rc_", "dc_", "ud_", "srd", "gga_"};

/// `transport/device` of each resource, from what UCX prints of a context: no call of its API lists
/// them. A line is like `#     resource 3  :  md 1  dev 2  flags -- tcp/eth0`.
std::vector<std::string> list_transports(const ucp::Library& library, ucp::Context context) {
  char* text = nullptr;
  std::size_t size = 0;
  std::FILE* const stream = open_memstream(&text, &size);
  if (stream == nullptr) return {};
  library.context_print_info(context, stream);
  std::fclose(stream);
  std::istringstream lines(std::string(text, size));
  std::free(text);  // NOLINT: open_memstream's contract
  std::vector<std::string> found;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string mark, what, last;
    words >> mark >> what;
    while (words >> last) {
    }
    if (what == "resource" && last.find('/') != std::string::npos) found.push_back(last);
  }
  return found;
}

}  // namespace

bool is_rdma(const std::string& transport) {
  return std::ranges::any_of(
      kRdma, [&](std::string_view prefix) { return transport.starts_with(prefix); });
}

UcxContext::UcxContext(const UcxOptions& options) : library(ucp::load(options.wheel_path)) {
  version = std::to_string(library.major) + "." + std::to_string(library.minor) + "." +
            std::to_string(library.release);
  ucp::Config config = nullptr;
  check(library.config_read(nullptr, nullptr, &config), "UCX cannot read its settings");
  for (const auto& [name, value] : options.settings) {
    if (std::getenv(("UCX_" + name).c_str()) != nullptr) continue;
    // One that this version does not know is one that it can do without.
    static_cast<void>(library.config_modify(config, name.c_str(), value.c_str()));
  }
  ucp::ContextParams params{};
  params.field_mask = ucp::kParamFeatures | ucp::kParamMtWorkersShared;
  params.features = ucp::kFeatureRma | ucp::kFeatureAm | ucp::kFeatureWakeup;
  params.mt_workers_shared = 1;  // memory is mapped by other threads than the one with the workers
  const ucp::Status status =
      library.init_version(library.major, library.minor, &params, config, &handle);
  library.config_release(config);
  check(status, "UCX does not start");
  transports = list_transports(library, handle);
}

UcxContext::~UcxContext() {
  if (handle != nullptr) library.cleanup(handle);
}

void UcxContext::check(ucp::Status status, const std::string& what) const {
  if (status != ucp::kOk) throw std::runtime_error(what + ": " + words(status));
}

UcxMemory::UcxMemory(std::shared_ptr<const UcxContext> context, std::uint64_t its_number,
                     std::uint64_t its_address, std::uint64_t its_length, bool may_be_written)
    : number(its_number),
      address(its_address),
      length(its_length),
      is_writable(may_be_written),
      context_(std::move(context)) {
  ucp::MemoryParams params{};
  params.field_mask = ucp::kMemoryParamAddress | ucp::kMemoryParamLength;
  params.address = reinterpret_cast<void*>(address);
  params.length = length;
  context_->check(context_->library.mem_map(context_->handle, &params, &handle_),
                  "UCX cannot register " + std::to_string(length) + " bytes");
}

void UcxMemory::unmap() {
  if (handle_ == nullptr) return;
  static_cast<void>(context_->library.mem_unmap(context_->handle, std::exchange(handle_, nullptr)));
}

std::string UcxMemory::pack() const {
  if (handle_ == nullptr) throw std::runtime_error("the memory is not registered any more");
  void* packed = nullptr;
  std::size_t length = 0;
  context_->check(context_->library.rkey_pack(context_->handle, handle_, &packed, &length),
                  "UCX gives no key to the memory");
  std::string bytes =
      Packer().number(number).part({static_cast<const char*>(packed), length}).take();
  context_->library.rkey_buffer_release(packed);
  return bytes;
}

}  // namespace kvtier
