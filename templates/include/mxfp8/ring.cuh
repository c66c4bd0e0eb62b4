// The ring of shared-memory stages between producers and consumers, and its barriers.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cuda/std/cstdint>

namespace mxfp8 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

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

  __device__ void init(unsigned full_arrivals, unsigned empty_arrivals) {
    for (int s = 0; s < Stages; ++s) {
      full(s).init(full_arrivals);
      empty(s).init(empty_arrivals);
    }
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace mxfp8
