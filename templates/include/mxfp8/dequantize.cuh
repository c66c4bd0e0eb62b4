// MXFP8 to bf16, fp16 or fp32: value * 2^(scale - 127), exact in float unless too large for it, then rounded once.
#pragma once

#include "mxfp8/fp8.cuh"

namespace mxfp8 {

struct DequantizeParams {
  const u8* data;   // contiguous, 8-byte aligned
  const u8* scale;
  void* output;     // 16-byte aligned
  u64 elements;
};

struct ToBf16 {
  static constexpr int kElements = 8;  // in 16 bytes
  static __device__ u32 pack2(float low, float high) { return ptx::bf16x2_from_floats(low, high); }
};

struct ToFp16 {
  static constexpr int kElements = 8;
  static __device__ u32 pack2(float low, float high) { return ptx::f16x2_from_floats(low, high); }
};

struct ToFp32 {
  static constexpr int kElements = 4;
};

template <class Format, class Output>
struct Dequantize {
  static constexpr int kElements = Output::kElements;
  static constexpr int kLoads = kBlock / kElements;

  static __device__ void run(const DequantizeParams& params) {
    const u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const u64 first = (warp * 32 * kLoads + threadIdx.x % 32) * kElements;

    u32 bytes[kLoads][kElements / 4];
    int scale[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      u64 element = first + i * 32 * kElements;
      if (element >= params.elements) element = 0;  // whatever it is, it is not stored
      load(params.data + element, bytes[i]);
      scale[i] = ptx::load1(params.scale + element / kBlock);
    }
    ptx::after_loads();

#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const u64 element = first + i * 32 * kElements;
      if (element >= params.elements) break;
      const float factor = scale[i] == kScaleNan ? __uint_as_float(0x7FFFFFFFu) : power_of_two(scale[i] - kBias);
      static_cast<uint4*>(params.output)[element / kElements] = convert(bytes[i], factor);
    }
  }

 private:
  static __device__ void load(const u8* address, u32 (&bytes)[1]) { bytes[0] = ptx::load4(address); }
  static __device__ void load(const u8* address, u32 (&bytes)[2]) {
    const uint2 both = ptx::load8(address);
    bytes[0] = both.x;
    bytes[1] = both.y;
  }

  static __device__ uint4 convert(const u32 (&bytes)[1], float factor) {
    float x[4];
    unpack4<Format>(bytes[0], x);
    return make_uint4(__float_as_uint(x[0] * factor), __float_as_uint(x[1] * factor), __float_as_uint(x[2] * factor),
                      __float_as_uint(x[3] * factor));
  }
  static __device__ uint4 convert(const u32 (&bytes)[2], float factor) {
    float x[4], y[4];
    unpack4<Format>(bytes[0], x);
    unpack4<Format>(bytes[1], y);
    return make_uint4(Output::pack2(x[0] * factor, x[1] * factor), Output::pack2(x[2] * factor, x[3] * factor),
                      Output::pack2(y[0] * factor, y[1] * factor), Output::pack2(y[2] * factor, y[3] * factor));
  }
};

}  // namespace mxfp8
