// A source that includes this compiles with the patched headers of mxfp8_cutlass/cutlass_patches.py first on its path.
#pragma once

#ifdef __CUDACC_RTC__
#include "mxfp8/nvrtc_compat.cuh"
#endif

#include <cutlass/kernel_hardware_info.h>

#ifndef MXFP8_CUTLASS_IS_PATCHED
#error "CUTLASS's headers are not the patched ones"
#endif

#ifdef __CUDACC_RTC__
#include <cute/container/tuple.hpp>

// Structured bindings of a const tuple; a standard library would have these for any type.
namespace std {
template <class... T>
struct tuple_size<const cute::tuple<T...>> : tuple_size<cute::tuple<T...>> {};

template <size_t I, class... T>
struct tuple_element<I, const cute::tuple<T...>> {
  using type = const typename tuple_element<I, cute::tuple<T...>>::type;
};
}  // namespace std
#endif
