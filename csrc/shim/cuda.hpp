// The part of the CUDA driver API that kvtier uses, and its loader.
//
// The driver comes with the GPU and is found when the program runs; CUDA is not needed to build.
#pragma once
#include <stdexcept>
#include <string>

namespace kvtier::cuda {

/// There is no driver, it lacks what is needed, or it finds no GPU; the message says which.
class Missing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// 0, or what went wrong: a CUresult.
using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;

/// A stream that does not wait for what others do on the device's default stream.
constexpr unsigned kNonBlocking = 1;

struct Library {
  Result (*init)(unsigned flags) = nullptr;
  Result (*device_get)(Device* device, int ordinal) = nullptr;
  Result (*primary_context_retain)(Context* context, Device device) = nullptr;
  Result (*primary_context_release)(Device device) = nullptr;
  Result (*context_push)(Context context) = nullptr;
  Result (*context_pop)(Context* context) = nullptr;
  Result (*stream_create)(Stream* stream, unsigned flags) = nullptr;
  Result (*stream_destroy)(Stream stream) = nullptr;
  Result (*stream_synchronize)(Stream stream) = nullptr;
  Result (*get_error_name)(Result result, const char** name) = nullptr;
};

/// The library that KVTIER_CUDA_LIBRARY names, else the system's driver; initialised.
///
/// Stays loaded for good, as CUDA cannot be unloaded.
///
/// @throws Missing
Library load();

/// Such as "CUDA 700: CUDA_ERROR_ILLEGAL_ADDRESS".
std::string words_of(const Library& library, Result result);

/// A device's primary context, the one that the CUDA runtime and torch use; given back at the end.
class PrimaryContext {
 public:
  /// On failure it is no context, and `result` says why.
  PrimaryContext(const Library& library, int ordinal);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  Result result() const { return result_; }
  Context get() const { return context_; }

 private:
  const Library& library_;
  Device device_ = 0;
  Context context_ = nullptr;
  Result result_ = 0;
};

/// A context that is current on this thread as long as this lives; with none, nothing changes.
///
/// Pushed and popped, not set: the thread may be the user's, who has a context of his own current.
class CurrentContext {
 public:
  CurrentContext(const Library& library, Context context)
      : library_(library),
        is_pushed_(context != nullptr),
        result_(is_pushed_ ? library.context_push(context) : 0) {}
  ~CurrentContext() {
    Context popped = nullptr;
    if (is_pushed_ && result_ == 0) library_.context_pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  /// Why it is not current; 0 if it is.
  Result result() const { return result_; }

 private:
  const Library& library_;
  bool is_pushed_;
  Result result_;
};

}  // namespace kvtier::cuda
