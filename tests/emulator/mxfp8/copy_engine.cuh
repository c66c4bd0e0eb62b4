// Stands in for templates/include/mxfp8/copy_engine.cuh on a CPU: copies happen when they are asked for. A barrier holds
// the bytes that are missing.
#pragma once

#include "mxfp8/ptx.cuh"

namespace mxfp8 {

// kernel_emulator.tensor_map makes them.
struct alignas(64) TensorMap {
  u64 address, matrices, rows, k, box_rows, padding[11];
};

namespace ptx {

inline u8* dynamic_shared() {
  alignas(1024) static u8 bytes[227 * 1024];
  return bytes;
}

inline void barrier_init(u64* barrier, u32) { *barrier = 0; }
inline void barrier_fence() {}
inline void barrier_expect(u64* barrier, u32 bytes) { *barrier += bytes; }
inline void barrier_wait(u64* barrier, u32) {
  __syncthreads();  // the thread that asks for copies may come later than others
  if (*barrier != 0) std::abort();
}
inline void fence_writes() {}

// Calls `copy` with the places of each 16 bytes in shared and in global memory; nullptr outside the tensor.
template <class Copy>
void for_box(const u8* shared, const TensorMap& map, u32 k, u32 row, u32 matrix, Copy copy) {
  if (reinterpret_cast<u64>(shared) % 1024 != 0 || matrix >= map.matrices || k >= map.k) std::abort();
  for (u32 r = 0; r < map.box_rows; ++r) {
    for (u32 chunk = 0; chunk < 8; ++chunk) {
      const u64 offset = ((static_cast<u64>(matrix) * map.rows + row + r) * map.k) + k + 16 * chunk;
      const bool inside = row + r < map.rows && k + 16 * chunk < map.k;
      copy(const_cast<u8*>(shared) + 128 * r + 16 * (chunk ^ (r & 7)),
           inside ? reinterpret_cast<u8*>(map.address + offset) : nullptr);
    }
  }
}

inline void load_box(u8* to, const TensorMap& map, u64* barrier, u32 k, u32 row, u32 matrix) {
  for_box(to, map, k, row, matrix, [](u8* place, u8* global) {
    if (global) std::memcpy(place, global, 16);
    else std::memset(place, 0, 16);
  });
  *barrier -= 128 * map.box_rows;
}

inline void store_box(const TensorMap& map, const u8* from, u32 k, u32 row, u32 matrix) {
  for_box(from, map, k, row, matrix, [](u8* place, u8* global) {
    if (global) std::memcpy(global, place, 16);
  });
}

inline void commit_stores() {}
template <int Pending>
void wait_for_stores() {}

}  // namespace ptx
}  // namespace mxfp8
