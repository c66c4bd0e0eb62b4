// What CUTLASS expects of the standard library and NVRTC does not give. Include this before any CUTLASS header.
#pragma once

#include <cuda/std/type_traits>
#include <cuda/std/utility>

namespace std {
using cuda::std::is_pointer_v;
using cuda::std::void_t;
}  // namespace std
