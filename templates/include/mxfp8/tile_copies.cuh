// The copy engine's copies of tiles, alone or for all CTAs of a cluster that need them.
#pragma once

#include "nvrtc_compat.cuh"

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "grouped_params.cuh"

namespace mxfp8 {

__device__ inline const cute::TmaDescriptor* as_descriptor(const TensorMap& map) {
  return reinterpret_cast<const cute::TmaDescriptor*>(&map);
}

// A mask of `count` CTAs of a cluster, `stride` ranks apart.
constexpr unsigned every_nth_rank(int count, int stride) {
  unsigned mask = 0;
  for (int i = 0; i < count; ++i) mask |= 1u << (i * stride);
  return mask;
}

// One box of a tensor map; where Sharers CTAs need it, into the shared memory of all of `mask`.
template <int Sharers>
__device__ inline void copy_box(const TensorMap& map, uint64_t* barrier, void* destination, int k, int row, int batch,
                                unsigned mask) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (Sharers == 1) {
    cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kHint, destination, k, row, batch);
  } else {
    cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, barrier, static_cast<uint16_t>(mask), kHint, destination, k, row, batch);
  }
}

}  // namespace mxfp8
