#include <algorithm>
#include <exception>
#include <string_view>

#include "../shim/nvrtc.hpp"
#include "device_cache.hpp"
#include "embedded_images.hpp"
#include "kvtier/device_images.hpp"

namespace kvtier {
namespace {

constexpr std::string_view kMain = "kernels.cu";  // what includes the others

/// A program of NVRTC's of the built-in sources.
class Program {
 public:
  explicit Program(const nvrtc::Library& library) : library_(library) {
    const char* main_text = nullptr;
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (const EmbeddedSource& source : embedded_sources()) {
      const char* const text = reinterpret_cast<const char*>(source.text.data());
      if (source.name == kMain) {
        main_text = text;
      } else {
        texts.push_back(text);
        names.push_back(source.name.data());
      }
    }
    if (main_text == nullptr) throw nvrtc::Failure("this build has no sources of the kernels");
    nvrtc::check(
        library_,
        library_.create_program(&program_, main_text, kMain.data(), static_cast<int>(texts.size()),
                                texts.data(), names.data()),
        "nvrtcCreateProgram");
  }
  ~Program() { library_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Compile for `target`; warnings do not count here, the build has seen them.
  void compile(const std::string& target) {
    const std::string architecture = "--gpu-architecture=" + target;
    std::vector<const char*> options = {architecture.c_str()};
    for (const char* const option : nvrtc_options()) options.push_back(option);
    const nvrtc::Result result =
        library_.compile_program(program_, static_cast<int>(options.size()), options.data());
    if (result == 0) return;
    throw nvrtc::Failure("NVRTC " + library_.version_words + " for " + target + ": " +
                         library_.get_error_string(result) + "\n" + log());
  }

  std::vector<std::byte> image(bool is_ptx) const {
    const auto get_size = is_ptx ? library_.get_ptx_size : library_.get_cubin_size;
    const auto get = is_ptx ? library_.get_ptx : library_.get_cubin;
    std::size_t nbytes = 0;
    nvrtc::check(library_, get_size(program_, &nbytes), "nvrtcGetCUBINSize");
    std::vector<std::byte> image(nbytes);
    nvrtc::check(library_, get(program_, reinterpret_cast<char*>(image.data())), "nvrtcGetCUBIN");
    return image;
  }

 private:
  std::string log() const {
    std::size_t nbytes = 0;
    if (library_.get_log_size(program_, &nbytes) != 0) return "";
    std::string words(nbytes, '\0');
    if (library_.get_log(program_, words.data()) != 0) return "";
    return words.substr(0, words.find('\0'));
  }

  const nvrtc::Library& library_;
  nvrtc::Program program_ = nullptr;
};

/// What to compile for: the device itself, else the newest before it that NVRTC knows.
int architecture_for(const nvrtc::Library& library, int device) {
  const auto& known = library.architectures;
  const auto after = std::ranges::upper_bound(known, device);
  if (after == known.begin()) {
    throw nvrtc::Failure("NVRTC " + library.version_words + " compiles for no sm_" +
                         std::to_string(device) + " nor any before it");
  }
  return *(after - 1);
}

/// Of all that the image depends on.
Sha256Digest key_of(const nvrtc::Library& library, const std::string& target) {
  Sha256 hash;
  const auto add = [&hash](std::span<const std::byte> bytes) {
    const std::uint64_t nbytes = bytes.size();  // so that no two lists of parts read the same
    hash.update({reinterpret_cast<const std::uint8_t*>(&nbytes), sizeof(nbytes)});
    hash.update({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
  };
  const auto add_words = [&add](std::string_view words) { add(std::as_bytes(std::span(words))); };
  add_words(library.version_words);
  add_words(target);
  for (const char* const option : nvrtc_options()) add_words(option);
  for (const EmbeddedSource& source : embedded_sources()) {
    add_words(source.name);
    add(source.text);
  }
  return hash.finish();
}

void compile_into(JitResult& result, int device) {
  const nvrtc::Library library = nvrtc::load();
  result.compiler = "NVRTC " + library.version_words;
  const int architecture = architecture_for(library, device);
  const bool is_ptx = architecture != device;  // the driver makes the rest of it
  result.target = (is_ptx ? "compute_" : "sm_") + std::to_string(architecture);
  const Sha256Digest key = key_of(library, result.target);
  const DeviceCache cache;
  if (auto kept = cache.read(result.target, key)) {
    result.image = std::move(*kept);
    result.is_cached = true;
    return;
  }
  Program program(library);
  program.compile(result.target);
  result.image = program.image(is_ptx);
  result.no_cache = cache.write(result.target, key, result.image);
}

}  // namespace

JitResult compile_kernels(int major, int minor) noexcept {
  JitResult result;
  try {
    compile_into(result, 10 * major + minor);
  } catch (const std::exception& error) {
    result.image.clear();
    result.failure = error.what();
  }
  return result;
}

}  // namespace kvtier
