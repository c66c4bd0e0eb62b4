// Stands in for templates/include/mxfp8/bf16x2.cuh on a CPU.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8::ptx {

inline float float_from_bf16(u32 pattern) { return emulator::bits<float>(pattern << 16); }

inline u32 mul_bf16x2(u32 a, u32 b) {  // exact in float but for the rounding to BF16, which is one of the product itself
  const float low = float_from_bf16(a & 0xFFFF) * float_from_bf16(b & 0xFFFF);
  const float high = float_from_bf16(a >> 16) * float_from_bf16(b >> 16);
  return bf16x2_from_floats(low, high);
}

}  // namespace mxfp8::ptx
