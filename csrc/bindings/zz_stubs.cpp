#include "bindings.hpp"
namespace kvtier::bindings {

void bind_file_io(nanobind::module_&) {}
void bind_slab(nanobind::module_&) {}
void bind_index(nanobind::module_&) {}
}  // namespace kvtier::bindings
