// The ring of shared-memory stages between producers and consumers, and its barriers.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cuda/std/cstdint>

namespace mxfp8 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// A warp arrives once, by one lane, behind a __syncwarp() that orders the other lanes' accesses before it. racecheck does not
// follow that and reports them: a build with MXFP8_RACECHECK has each lane arrive for itself (docs/development.md).
#ifdef MXFP8_RACECHECK
inline constexpr unsigned kWarpArrivals = 32;
#else
inline constexpr unsigned kWarpArrivals = 1;
#endif

template <class Barrier>
__device__ inline void arrive_for_warp(const Barrier& barrier) {
  __syncwarp();
  if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) barrier.arrive();
}

// The same, at that barrier of each CTA of a cluster.
template <int Ctas, class Barrier>
__device__ inline void arrive_for_warp_at_all(const Barrier& barrier, int lane) {
  __syncwarp();
  if constexpr (kWarpArrivals == 1) {
    if (lane < Ctas) barrier.arrive(lane);
  } else {
    for (int cta = 0; cta < Ctas; ++cta) barrier.arrive(cta);
  }
}

// Position in the ring; the phase bit flips with each turn.
template <int Stages>
struct RingPosition {
  int stage = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

template <int Stages>
struct RingBarriers {
  uint64_t full_[Stages], empty_[Stages];

  __device__ FullBarrier& full(int stage) { return reinterpret_cast<FullBarrier&>(full_[stage]); }
  __device__ EmptyBarrier& empty(int stage) { return reinterpret_cast<EmptyBarrier&>(empty_[stage]); }

  // By one thread, which then fences: cutlass::arch::fence_barrier_init().
  __device__ void init(unsigned full_arrivals, unsigned empty_arrivals) {
    for (int s = 0; s < Stages; ++s) {
      full(s).init(full_arrivals);
      empty(s).init(empty_arrivals);
    }
  }
};

}  // namespace mxfp8
