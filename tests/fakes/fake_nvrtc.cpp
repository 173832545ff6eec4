// A stand-in for NVRTC: "compiles" to an image that names the target and all that was given.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>

namespace {

struct Program {
  std::string given;
  std::string image;
  std::string log;
};

constexpr int kCompilation = 6;  // the error of a source's
constexpr std::array kArchitectures = {90, 80, 121};

std::atomic<int> minor_version{9};
std::atomic<int> compile_count{0};
std::atomic<bool> is_failing{false};
std::atomic<bool> is_for_fake_cuda{false};

int copy_text(const std::string& text, char* target) {
  std::memcpy(target, text.c_str(), text.size() + 1);
  return 0;
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------------- for the tests

void fake_nvrtc_reset() {
  minor_version = 9;
  compile_count = 0;
  is_failing = false;
  is_for_fake_cuda = false;
}
/// Make images that the stand-in for libcuda loads.
void fake_nvrtc_serve_fake_cuda() { is_for_fake_cuda = true; }
void fake_nvrtc_set_minor(int minor) { minor_version = minor; }
void fake_nvrtc_fail() { is_failing = true; }
int fake_nvrtc_compiles() { return compile_count; }

// ------------------------------------------------------------------------- NVRTC's

int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = minor_version;
  return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(kArchitectures.size());
  return 0;
}

int nvrtcGetSupportedArchs(int* architectures) {
  std::ranges::copy(kArchitectures, architectures);
  return 0;
}

int nvrtcCreateProgram(Program** program, const char* text, const char* name, int header_count,
                       const char* const* headers, const char* const* names) {
  *program = new Program;
  (*program)->given = std::string(name) + "\n" + text;
  for (int i = 0; i < header_count; ++i) {
    (*program)->given += std::string("\n") + names[i] + "\n" + headers[i];
  }
  return 0;
}

int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  ++compile_count;
  if (is_failing) {
    program->log = "kernels.cu(1): error: planted";
    return kCompilation;
  }
  if (is_for_fake_cuda) program->image = "kvtier-sim\n";
  for (int i = 0; i < count; ++i) program->image += std::string(options[i]) + "\n";
  program->image += program->given;
  return 0;
}

int nvrtcGetProgramLogSize(Program* program, std::size_t* nbytes) {
  *nbytes = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) { return copy_text(program->log, log); }

int nvrtcGetCUBINSize(Program* program, std::size_t* nbytes) {
  *nbytes = program->image.size() + 1;
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* cubin) { return copy_text(program->image, cubin); }

int nvrtcGetPTXSize(Program* program, std::size_t* nbytes) {
  *nbytes = program->image.size() + 5;
  return 0;
}
int nvrtcGetPTX(Program* program, char* ptx) {
  return copy_text(is_for_fake_cuda ? program->image + "PTX\n" : "PTX\n" + program->image, ptx);
}

const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

}  // extern "C"
