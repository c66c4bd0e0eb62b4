// Boxes of a tensor between global and shared memory by the copy engine (TMA), for kernels without CUTLASS: its PTX
// instructions and the barriers that go with them. Tests put C++ in this file's place.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8 {

// A CUtensorMap, opaque: the host encodes it, the copy engine reads it.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

namespace ptx {

// Aligned as the 128-byte swizzle's pattern repeats.
__device__ inline u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 dynamic_shared_bytes[];
  return dynamic_shared_bytes;
}

__device__ inline u32 shared_address(const void* address) {
  return static_cast<u32>(__cvta_generic_to_shared(address));
}

__device__ inline void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers known to the copy engine.
__device__ inline void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and adds bytes that copies are to bring before the phase ends.
__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_wait(u64* barrier, u32 phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// What a thread has written to shared memory becomes visible to copies.
__device__ inline void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Places outside the tensor are filled with zeros, and count as bytes of the barrier.
__device__ inline void load_box(u8* to, const TensorMap& map, u64* barrier, u32 k, u32 row, u32 matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(k), "r"(row), "r"(matrix)
      : "memory");
}

// Places outside the tensor are left out.
__device__ inline void store_box(const TensorMap& map, const u8* from, u32 k, u32 row, u32 matrix) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(k), "r"(row), "r"(matrix)
               : "memory");
}

// The thread's stores since the last call become a group.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all of the thread's groups but the newest `Pending` have been read from shared memory.
template <int Pending>
__device__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

}  // namespace ptx
}  // namespace mxfp8
