"""Our own declarations of CUDA's driver API are those of its headers, where these are to be found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include <type_traits>
#include "cuda.hpp"
namespace ours = kvtier::cuda;

#define SAME(a, b) static_assert(static_cast<long long>(a) == static_cast<long long>(b), #b)
#define FIELD(ours_t, ours_f, theirs_t, theirs_f)                                          \\
  SAME(offsetof(ours::ours_t, ours_f), offsetof(theirs_t, theirs_f));                      \\
  SAME(sizeof(ours::ours_t::ours_f), sizeof(theirs_t::theirs_f))

SAME(sizeof(ours::Result), sizeof(CUresult));
SAME(ours::kOk, CUDA_SUCCESS);
SAME(ours::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME(ours::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(ours::kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME(ours::kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(ours::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME(ours::kNotReady, CUDA_ERROR_NOT_READY);
SAME(ours::kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(ours::kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);

SAME(ours::kNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(ours::kEventBlockingSync, CU_EVENT_BLOCKING_SYNC);
SAME(ours::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(ours::kHostPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME(ours::kHostPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(ours::kHostDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(ours::kHostDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);

SAME(ours::kDeviceMaxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(ours::kDeviceMaxBlockDimX, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
SAME(ours::kDeviceMaxGridDimX, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
SAME(ours::kDeviceMaxSharedBytesPerBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
SAME(ours::kDeviceMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(ours::kDeviceCanMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
SAME(ours::kDeviceAsyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
SAME(ours::kDeviceComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(ours::kDeviceComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(ours::kDeviceCanUseHostPointerForRegistered,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(ours::kDeviceMaxSharedBytesPerBlockOptIn,
     CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(ours::kDeviceHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);

SAME(ours::kPointerContext, CU_POINTER_ATTRIBUTE_CONTEXT);
SAME(ours::kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(ours::kPointerDevicePointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(ours::kPointerHostPointer, CU_POINTER_ATTRIBUTE_HOST_POINTER);
SAME(ours::kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(ours::kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(ours::kPointerRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(ours::kPointerRangeBytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(ours::kMemoryTypeHost, CU_MEMORYTYPE_HOST);
SAME(ours::kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE);
SAME(ours::kFunctionMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

SAME(sizeof(ours::SourceOrder), sizeof(CUmemcpySrcAccessOrder));
SAME(ours::SourceOrder::kStream, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(ours::SourceOrder::kDuringApiCall, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
SAME(ours::SourceOrder::kAny, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
SAME(ours::kCopyPreferOverlapWithCompute, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
SAME(sizeof(ours::MemoryLocation), sizeof(CUmemLocation));
FIELD(MemoryLocation, type, CUmemLocation, type);
FIELD(MemoryLocation, id, CUmemLocation, id);
SAME(ours::MemoryLocation().type, CU_MEM_LOCATION_TYPE_INVALID);
SAME(sizeof(ours::CopyAttributes), sizeof(CUmemcpyAttributes));
FIELD(CopyAttributes, source_order, CUmemcpyAttributes, srcAccessOrder);
FIELD(CopyAttributes, source_hint, CUmemcpyAttributes, srcLocHint);
FIELD(CopyAttributes, target_hint, CUmemcpyAttributes, dstLocHint);
FIELD(CopyAttributes, flags, CUmemcpyAttributes, flags);

// What is said of sticky errors hangs on numbers: these are the names.
SAME(4, CUDA_ERROR_DEINITIALIZED);
SAME(214, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(220, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME(700, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(702, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(709, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(710, CUDA_ERROR_ASSERT);
SAME(714, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(715, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME(716, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(717, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME(718, CUDA_ERROR_INVALID_PC);
SAME(719, CUDA_ERROR_LAUNCH_FAILED);
SAME(810, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME(911, CUDA_ERROR_EXTERNAL_DEVICE);

// Two functions are called alike: as many arguments, each of one size and passed as the other is;
// what a pointer points to may be named otherwise, but is as large.
template <typename T> using Pointed = std::remove_pointer_t<T>;
template <typename A, typename B> constexpr bool same_width() {
  if constexpr (std::is_void_v<A> || std::is_void_v<B> || !requires { sizeof(A); sizeof(B); }) {
    return true;  // a handle: theirs points to what is not told
  } else {
    return sizeof(A) == sizeof(B);
  }
}
template <typename A, typename B> constexpr bool alike() {
  if (sizeof(A) != sizeof(B)) return false;
  if (std::is_pointer_v<A> != std::is_pointer_v<B>) return false;
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    return same_width<Pointed<A>, Pointed<B>>() &&
           std::is_pointer_v<Pointed<A>> == std::is_pointer_v<Pointed<B>>;
  }
  return std::is_floating_point_v<A> == std::is_floating_point_v<B>;
}
template <typename F, typename G> struct Functions : std::false_type {};
template <typename... A, typename... B>
struct Functions<int (*)(A...), CUresult (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) return (alike<A, B>() && ...);
    return false;
  }();
};
#define FUNCTION(name, theirs) \\
  static_assert(Functions<decltype(ours::Library::name), decltype(&theirs)>::value, #theirs)
FUNCTION(init, cuInit);
FUNCTION(driver_get_version, cuDriverGetVersion);
FUNCTION(get_error_name, cuGetErrorName);
FUNCTION(get_error_string, cuGetErrorString);
FUNCTION(device_get, cuDeviceGet);
FUNCTION(device_get_count, cuDeviceGetCount);
FUNCTION(device_get_name, cuDeviceGetName);
FUNCTION(device_get_attribute, cuDeviceGetAttribute);
FUNCTION(primary_context_retain, cuDevicePrimaryCtxRetain);
FUNCTION(primary_context_release, cuDevicePrimaryCtxRelease_v2);
FUNCTION(context_push, cuCtxPushCurrent_v2);
FUNCTION(context_pop, cuCtxPopCurrent_v2);
FUNCTION(context_get_current, cuCtxGetCurrent);
FUNCTION(stream_create, cuStreamCreate);
FUNCTION(stream_create_with_priority, cuStreamCreateWithPriority);
FUNCTION(stream_destroy, cuStreamDestroy_v2);
FUNCTION(stream_synchronize, cuStreamSynchronize);
FUNCTION(stream_query, cuStreamQuery);
FUNCTION(stream_wait_event, cuStreamWaitEvent);
FUNCTION(stream_get_context, cuStreamGetCtx);
FUNCTION(event_create, cuEventCreate);
FUNCTION(event_destroy, cuEventDestroy_v2);
FUNCTION(event_record, cuEventRecord);
FUNCTION(event_query, cuEventQuery);
FUNCTION(event_synchronize, cuEventSynchronize);
FUNCTION(event_elapsed_time, cuEventElapsedTime);
FUNCTION(memory_allocate, cuMemAlloc_v2);
FUNCTION(memory_free, cuMemFree_v2);
FUNCTION(memory_get_info, cuMemGetInfo_v2);
FUNCTION(memory_get_address_range, cuMemGetAddressRange_v2);
FUNCTION(host_allocate, cuMemHostAlloc);
FUNCTION(host_free, cuMemFreeHost);
FUNCTION(host_register, cuMemHostRegister_v2);
FUNCTION(host_unregister, cuMemHostUnregister);
FUNCTION(host_get_device_pointer, cuMemHostGetDevicePointer_v2);
FUNCTION(pointer_get_attribute, cuPointerGetAttribute);
FUNCTION(memcpy_async, cuMemcpyAsync);
FUNCTION(memset_d8_async, cuMemsetD8Async);
FUNCTION(module_load_data, cuModuleLoadData);
FUNCTION(module_unload, cuModuleUnload);
FUNCTION(module_get_function, cuModuleGetFunction);
FUNCTION(function_set_attribute, cuFuncSetAttribute);
FUNCTION(launch_kernel, cuLaunchKernel);
static_assert(Functions<decltype(ours::Library::memcpy_batch_async),
                        PFN_cuMemcpyBatchAsync_v12080>::value,
              "cuMemcpyBatchAsync of 12.8");
SAME(ours::kBatchCopyVersion, 12080);
"""


def _include_folder() -> Path:
    """Where cuda.h is, with the signatures of 12.8 beside it."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    compiler = shutil.which("nvcc")
    if compiler is not None:
        homes.append(Path(compiler).resolve().parents[1])
    homes.append(Path("/usr/local/cuda"))
    for home in homes:
        typedefs = home / "include" / "cudaTypedefs.h"
        if typedefs.exists() and "cuMemcpyBatchAsync_v12080" in typedefs.read_text():
            return typedefs.parent
    pytest.skip("there is no cuda.h of CUDA 12.8 or newer")


def _compile(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "declarations.cpp"
    source.write_text(program)
    return subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-fsyntax-only",
            f"-isystem{_include_folder()}",
            f"-I{ROOT / 'csrc' / 'shim'}",
            source,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_our_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    compiled = _compile(PROGRAM, tmp_path)
    assert compiled.returncode == 0, compiled.stderr


def test_wrong_ones_would_be_seen(tmp_path: Path) -> None:
    wrong = {
        "SAME(ours::kEventDisableTiming, CU_EVENT_INTERPROCESS);": "CU_EVENT_INTERPROCESS",
        "FIELD(CopyAttributes, flags, CUmemcpyAttributes, dstLocHint);": "dstLocHint",
        "FUNCTION(memcpy_async, cuMemcpyDtoD_v2);": "cuMemcpyDtoD_v2",
        "FUNCTION(memcpy_batch_async, cuMemcpyBatchAsync);": "cuMemcpyBatchAsync",
        "FUNCTION(event_elapsed_time, cuEventRecord);": "cuEventRecord",
        "FUNCTION(memset_d8_async, cuMemsetD16Async);": "cuMemsetD16Async",
    }
    errors = _compile(PROGRAM + "\n".join(wrong), tmp_path).stderr
    for words in wrong.values():
        assert re.search(rf"static assertion failed.*{words}", errors), words


def test_every_function_of_the_library_is_compared() -> None:
    header = (ROOT / "csrc" / "shim" / "cuda.hpp").read_text()
    library = header.partition("struct Library {")[2].partition("\n};")[0]
    names = [line.split("(*")[1].split(")")[0] for line in library.splitlines() if "(*" in line]
    assert len(names) == 44
    missing = [
        name
        for name in names
        if f"FUNCTION({name}, " not in PROGRAM and f"Library::{name})" not in PROGRAM
    ]
    assert missing == []
