// The PTX instructions that the elementwise kernels use, and nothing else: no CUDA header has to be read, which keeps a
// compile at a tenth of a second, and tests put C++ in this file's place to run the kernels on a CPU.
#pragma once

namespace mxfp8 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

namespace ptx {

// Conversions to FP8 round to nearest even and saturate; `low` goes to bits 0-7. Inf saturates too.
__device__ inline u16 e4m3x2_from_floats(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline u16 e5m2x2_from_floats(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline u16 e4m3x2_from_halves(u32 halves) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(out) : "r"(halves));
  return out;
}

__device__ inline u16 e5m2x2_from_halves(u32 halves) {
  u16 out;
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(out) : "r"(halves));
  return out;
}

// Exact.
__device__ inline u32 halves_from_e4m3x2(u16 bytes) {
  u32 out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(bytes));
  return out;
}

__device__ inline u32 halves_from_e5m2x2(u16 bytes) {
  u32 out;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(out) : "h"(bytes));
  return out;
}

__device__ inline float float_from_half(u16 half) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(half));
  return out;
}

__device__ inline u32 bf16x2_from_floats(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline u32 f16x2_from_floats(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The larger magnitude, with some sign; NaN if one is NaN.
__device__ inline u32 max_magnitude_f16x2(u32 a, u32 b) {
  u32 out;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// A thread has all of its loads in flight at once: that is what hides their latency here. ptxas moves loads of read-only
// memory (ld.global.nc, __ldg) down to their first use, one after the other, so these are plain ones, and after_loads()
// follows the last. The data is read once and by nobody else: no room in L1.
__device__ inline uint4 load16(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ inline uint2 load8(const void* address) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address)
               : "memory");
  return v;
}

__device__ inline u32 load4(const void* address) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// Scale bytes have neighbours in the same sector that other lanes read: L1 keeps them.
__device__ inline int load1(const u8* address) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return static_cast<int>(v);
}

__device__ inline void after_loads() { __syncwarp(); }

}  // namespace ptx
}  // namespace mxfp8
