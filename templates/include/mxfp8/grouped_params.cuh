// The one argument of a grouped GEMM kernel. mxfp8_cutlass/launch.py mirrors these structs byte for byte.
#pragma once

#include <cuda/std/cstdint>

namespace mxfp8 {

using cuda::std::int64_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

// A CUtensorMap, opaque: the host encodes it, the copy engine reads it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One matrix product, or a stack of them that share shapes: operands row-major, contraction along the last axis.
struct Problem {
  TensorMap map_a;           // (batch, M, K), box (1, TileM / ClusterN, 128), 128-byte swizzle
  TensorMap map_b;           // (batch, N, K), box (1, TileN / ClusterM, 128), 128-byte swizzle
  TensorMap map_out;         // (batch, M, N), box (1, 16, 64), 128-byte swizzle; kernels that stage their output only
  const uint8_t* sfa;        // (batch, ceil(K / 128), M rounded up to 16) E8M0, so that a stage's scales lie together
  const uint8_t* sfb;        // (batch, ceil(K / 128), N); exact kernels take compact scales, (batch, M or N, K / 32)
  const uint8_t* sfb_tiles;  // (batch, ceil(N / 128), ceil(K / 128)), 255 = "no single scale: see the rows' in sfb"
  void* out;                 // (batch, M, N)
  const void* bias;          // (batch, N) in the output's type, or null
  int m, n, k;
  int padding[19];  // to 512 bytes: in an array in global memory every map is aligned to 128, as CUDA 13's own type is
};

struct GroupedGemmParams {
  Problem problem;          // all groups, where they share N and K
  const Problem* problems;  // (groups,), a problem each; null: `problem` serves all
  const void* offs;         // (groups,) end row of each group in A and out; null: group g is entry g of a batch,
  const void* counts;       // (groups,) of which the first counts[g] rows are used; null: all problem.m
  int groups;
  int index_is_int64;  // the type of offs or counts, else int
  int accumulate;  // out += product
  int tokens;      // kernels whose groups cut K alone, of operands (1, M or N, K) and out (groups, M, N): offs ends there
};

}  // namespace mxfp8
