// One function per subject, each in the file of its name; core.cpp calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace kvtier::bindings {

void bind_copy(nanobind::module_& m);           // copy.cpp: CopyPool, CopyPlan
void bind_cuda(nanobind::module_& m);           // cuda.cpp: CudaDevice, DevicePlan, DeviceJob
void bind_device_images(nanobind::module_& m);  // device_images.cpp: cubins, the JIT
void bind_hash(nanobind::module_& m);           // hash.cpp: xxh3_128, chain_keys
void bind_file_io(nanobind::module_& m);        // file_io.cpp: FileEngine
void bind_gds(nanobind::module_& m);            // gds.cpp: GdsEngine
void bind_slab(nanobind::module_& m);           // slab.cpp: Slab
void bind_index(nanobind::module_& m);          // index.cpp: Index, LruOrder
void bind_transfer(nanobind::module_& m);       // transfer.cpp: Completions
void bind_ucx(nanobind::module_& m);            // ucx.cpp: UcxEngine

}  // namespace kvtier::bindings
