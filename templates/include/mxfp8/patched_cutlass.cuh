// A source that includes this compiles with the patched headers of mxfp8_cutlass/cutlass_patches.py first on its path.
#pragma once

#ifdef __CUDACC_RTC__
#include "mxfp8/nvrtc_compat.cuh"
#endif

#include <cutlass/kernel_hardware_info.h>

#ifndef MXFP8_CUTLASS_IS_PATCHED
#error "CUTLASS's headers are not the patched ones"
#endif
