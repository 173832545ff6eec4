// The part of NVRTC, CUDA's compiler as a library, that kvtier uses, and its loader.
//
// Found when the program runs, and only where the built-in kernels do not fit the device.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtier::nvrtc {

/// There is no NVRTC or it lacks what is needed, or a call failed; the message says which.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// 0, or what went wrong: an nvrtcResult.
using Result = int;
using Program = void*;

struct Library {
  Result (*version)(int* major, int* minor) = nullptr;
  Result (*get_num_supported_archs)(int* count) = nullptr;
  Result (*get_supported_archs)(int* architectures) = nullptr;
  Result (*create_program)(Program* program, const char* text, const char* name, int header_count,
                           const char* const* headers, const char* const* names) = nullptr;
  Result (*destroy_program)(Program* program) = nullptr;
  Result (*compile_program)(Program program, int count, const char* const* options) = nullptr;
  Result (*get_log_size)(Program program, std::size_t* nbytes) = nullptr;
  Result (*get_log)(Program program, char* log) = nullptr;
  Result (*get_cubin_size)(Program program, std::size_t* nbytes) = nullptr;
  Result (*get_cubin)(Program program, char* cubin) = nullptr;
  Result (*get_ptx_size)(Program program, std::size_t* nbytes) = nullptr;
  Result (*get_ptx)(Program program, char* ptx) = nullptr;
  const char* (*get_error_string)(Result result) = nullptr;
  std::string version_words;       // "12.9"
  std::vector<int> architectures;  // that it compiles for, ascending: 90 is sm_90
};

/// The library that KVTIER_NVRTC_LIBRARY names and no other, else the system's, else that of the
/// Python packages in the folder that holds kvtier's. Stays loaded.
///
/// @throws Failure
Library load();

/// @throws Failure  `result` is not 0; says "`call`: " and NVRTC's words
void check(const Library& library, Result result, const char* call);

}  // namespace kvtier::nvrtc
