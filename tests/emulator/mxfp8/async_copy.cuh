// Stands in for templates/include/mxfp8/async_copy.cuh on a CPU: copies happen late, when they are waited for.
#pragma once

#include <vector>

#include "mxfp8/copy_engine.cuh"

namespace mxfp8::ptx {

struct Copy { u8* shared; const u8* global; bool present; };
inline std::vector<Copy> copies[1024];  // of each thread

inline void copy16(u8* shared, const u8* global, bool present) {
  if (reinterpret_cast<u64>(shared) % 16 != 0 || reinterpret_cast<u64>(global) % 16 != 0) std::abort();
  copies[threadIdx.x].push_back({shared, global, present});
}

inline void wait_for_copies() {
  for (const Copy& copy : copies[threadIdx.x]) {
    if (copy.present) std::memcpy(copy.shared, copy.global, 16);
    else std::memset(copy.shared, 0, 16);
  }
  copies[threadIdx.x].clear();
}

}  // namespace mxfp8::ptx
