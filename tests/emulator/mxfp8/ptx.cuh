// Stands in for templates/include/mxfp8/ptx.cuh on a CPU.
#pragma once

#include <cmath>
#include <cstdlib>

namespace mxfp8 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

namespace ptx {

struct Fp8 { int mantissa, bias, largest; };
constexpr Fp8 kE4M3{3, 7, 0x7E}, kE5M2{2, 15, 0x7B};

inline double value(int byte, Fp8 format) {
  const int exponent = byte >> format.mantissa, fraction = byte & ((1 << format.mantissa) - 1);
  const int significand = exponent == 0 ? fraction : fraction + (1 << format.mantissa);
  return std::ldexp(significand, (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa);
}

inline u32 to_byte(double x, Fp8 format) {
  if (std::isnan(x)) return 0x55;  // no kernel may depend on it
  const double magnitude = std::fabs(x);
  int below = 0;
  while (below < format.largest && value(below + 1, format) <= magnitude) ++below;
  if (below < format.largest) {
    const double down = magnitude - value(below, format), up = value(below + 1, format) - magnitude;
    below += up < down || (up == down && below % 2 == 1);
  }
  return below | (std::signbit(x) ? 0x80 : 0);
}

inline float float_from_half(u16 half) { return static_cast<float>(emulator::bits<_Float16>(half)); }
inline u32 half_from_float(float x) { return emulator::bits<u16>(static_cast<_Float16>(x)); }
inline u32 bf16_from_float(float x) {
  const u32 bits = __float_as_uint(x);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline u16 fp8x2(float low, float high, Fp8 format) { return to_byte(low, format) | to_byte(high, format) << 8; }
inline u16 fp8x2(u32 halves, Fp8 format) { return fp8x2(float_from_half(halves), float_from_half(halves >> 16), format); }
inline u16 e4m3x2_from_floats(float low, float high) { return fp8x2(low, high, kE4M3); }
inline u16 e5m2x2_from_floats(float low, float high) { return fp8x2(low, high, kE5M2); }
inline u16 e4m3x2_from_halves(u32 halves) { return fp8x2(halves, kE4M3); }
inline u16 e5m2x2_from_halves(u32 halves) { return fp8x2(halves, kE5M2); }

inline u32 half_from_e4m3(u8 byte) {
  if ((byte & 0x7F) == 0x7F) return 0x7FFF;
  return half_from_float(static_cast<float>(value(byte & 0x7F, kE4M3))) | (byte & 0x80) << 8;
}
inline u32 halves_from_e4m3x2(u16 bytes) { return half_from_e4m3(bytes) | half_from_e4m3(bytes >> 8) << 16; }
inline u32 halves_from_e5m2x2(u16 bytes) { return (bytes & 0xFFu) << 8 | (bytes & 0xFF00u) << 16; }

inline u32 bf16x2_from_floats(float low, float high) { return bf16_from_float(low) | bf16_from_float(high) << 16; }
inline u32 f16x2_from_floats(float low, float high) { return half_from_float(low) | half_from_float(high) << 16; }

inline u32 mul_f16x2(u32 a, u32 b) {
  return f16x2_from_floats(float_from_half(a) * float_from_half(b), float_from_half(a >> 16) * float_from_half(b >> 16));
}
inline u32 max_magnitude_f16(u32 a, u32 b) {
  const u32 sign = (a ^ b) & 0x8000, x = a & 0x7FFF, y = b & 0x7FFF;
  return sign | (x > 0x7C00 || y > 0x7C00 ? 0x7FFF : max(x, y));
}
inline u32 max_magnitude_f16x2(u32 a, u32 b) {
  return max_magnitude_f16(a & 0xFFFF, b & 0xFFFF) | max_magnitude_f16(a >> 16, b >> 16) << 16;
}
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

template <class Vector>
Vector load(const void* address) {
  if (reinterpret_cast<u64>(address) % sizeof(Vector) != 0) std::abort();
  return *static_cast<const Vector*>(address);
}
inline uint4 load16(const void* address) { return load<uint4>(address); }
inline uint2 load8(const void* address) { return load<uint2>(address); }
inline u32 load4(const void* address) { return load<u32>(address); }
inline int load1(const u8* address) { return *address; }
inline void after_loads() { __syncwarp(); }

}  // namespace ptx
}  // namespace mxfp8
