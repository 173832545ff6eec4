// Every kernel: the one translation unit that nvcc and NVRTC compile.
#include "boosted.cu"
#include "bulk.cu"
#include "copy.cu"
#include "hot.cu"
#include "quantise.cu"
#include "rope.cu"
