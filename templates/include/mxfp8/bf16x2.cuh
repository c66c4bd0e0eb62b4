// Two values a register: the packed instructions that the exact kernel converts with. Tests put C++ in this file's place.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8::ptx {

// Keeps subnormals, operands and results alike.
__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

}  // namespace mxfp8::ptx
