// Python face of the core: checks types, releases the GIL, translates nothing else.
#include "bindings.hpp"

NB_MODULE(_core, m) {
  m.doc() = "kvtier's compiled core.";
  kvtier::bindings::bind_copy(m);
  kvtier::bindings::bind_cuda(m);
  kvtier::bindings::bind_device_images(m);
  kvtier::bindings::bind_hash(m);
  kvtier::bindings::bind_file_io(m);
  kvtier::bindings::bind_gds(m);
  kvtier::bindings::bind_slab(m);
  kvtier::bindings::bind_index(m);
  kvtier::bindings::bind_transfer(m);
  kvtier::bindings::bind_ucx(m);
}
