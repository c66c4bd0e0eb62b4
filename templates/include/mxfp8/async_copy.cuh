// Copies into shared memory that a thread starts and that need no registers on their way (cp.async). Tests put C++ in this
// file's place.
#pragma once

#include "mxfp8/copy_engine.cuh"

namespace mxfp8 {
namespace ptx {

// 16 bytes, past L1; zeros, and nothing is read, if not `present`.
__device__ inline void copy16(u8* shared, const u8* global, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(present ? 16u : 0u)
               : "memory");
}

// Until the thread's own copies are there.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace ptx
}  // namespace mxfp8
