// The parameters of an SM100 grouped GEMM, made by CUTLASS's own code on whatever device there is: NVRTC has no host code.
//
// The bytes depend on the kernel, the number of groups, the SMs and the addresses of the arrays, not on shapes. Tensor maps
// in them are requests (cutlass_patches.py), which the host replaces by what the driver encodes.
#pragma once

#include "mxfp8/patched_cutlass.cuh"

#ifdef __CUDACC_RTC__
namespace std {
using cuda::std::is_const_v;  // of the scheduler's host code
}  // namespace std
#endif

#include "mxfp8/sm100_arguments.cuh"
#include "mxfp8/sm100_grouped_gemm.cuh"

namespace mxfp8 {

struct Sm100BuildParams {
  Sm100ArgumentsParams arrays;  // of which the arrays' addresses (bias: null if there is none) and `groups` matter
  u8* params;                   // room for the parameters, kSm100ParamsBytes, aligned to 128
  u64* facts;                   // (6,): bytes of parameters, of workspace, of shared memory, grid x, y, z
  void* workspace;
  float beta;  // 0, or 1 to add to the output
  int sms;
};

constexpr int kSm100ParamsBytes = 4096;

// The same on a host, with nvcc, is what tests compare with.
template <class Gemm>
CUTLASS_HOST_DEVICE void build_params(const Sm100BuildParams& build) {
  using Kernel = typename Gemm::Kernel;
  using Params = typename Kernel::Params;
  static_assert(sizeof(Params) <= kSm100ParamsBytes);
  static_assert(sizeof(typename Kernel::InternalStrideA) == sizeof(long long));
  static_assert(sizeof(typename Kernel::InternalStrideB) == sizeof(long long));
  static_assert(sizeof(typename Kernel::InternalStrideD) == sizeof(long long));
  static_assert(sizeof(typename Gemm::Shape) == sizeof(Sm100Shape));

  const Sm100ArgumentsParams& x = build.arrays;
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {static_cast<int>(x.groups), reinterpret_cast<typename Gemm::Shape*>(x.shapes), nullptr};
  auto& mainloop = arguments.mainloop;
  mainloop.ptr_A = reinterpret_cast<decltype(mainloop.ptr_A)>(x.a);
  mainloop.dA = reinterpret_cast<decltype(mainloop.dA)>(x.stride_a);
  mainloop.ptr_B = reinterpret_cast<decltype(mainloop.ptr_B)>(x.b);
  mainloop.dB = reinterpret_cast<decltype(mainloop.dB)>(x.stride_b);
  if constexpr (Gemm::kBlockScaled) {
    static_assert(sizeof(typename Gemm::Mainloop::InternalLayoutSFA) == sizeof(Sm100ScaleLayout));
    static_assert(sizeof(typename Gemm::Mainloop::InternalLayoutSFB) == sizeof(Sm100ScaleLayout));
    mainloop.ptr_SFA = reinterpret_cast<decltype(mainloop.ptr_SFA)>(x.sfa);
    mainloop.layout_SFA = reinterpret_cast<decltype(mainloop.layout_SFA)>(x.layout_sfa);
    mainloop.ptr_SFB = reinterpret_cast<decltype(mainloop.ptr_SFB)>(x.sfb);
    mainloop.layout_SFB = reinterpret_cast<decltype(mainloop.layout_SFB)>(x.layout_sfb);
  }
  auto& epilogue = arguments.epilogue;
  // As BiasAndSource nests: beta, C, (bias, accumulator, their sum), the whole.
  epilogue.thread = {{{build.beta}}, {}, {{reinterpret_cast<typename Gemm::Bias const* const*>(x.bias)}, {}, {}}, {}};
  epilogue.ptr_C = reinterpret_cast<decltype(epilogue.ptr_C)>(x.out);
  epilogue.dC = reinterpret_cast<decltype(epilogue.dC)>(x.stride_out);
  epilogue.ptr_D = reinterpret_cast<decltype(epilogue.ptr_D)>(x.out);
  epilogue.dD = reinterpret_cast<decltype(epilogue.dD)>(x.stride_out);
  arguments.hw_info.sm_count = build.sms;

  for (int i = 0; i < kSm100ParamsBytes; ++i) build.params[i] = 0;
  Params* params = new (build.params) Params(Kernel::to_underlying_arguments(arguments, build.workspace));
  const dim3 grid = Kernel::get_grid_shape(*params);
  const u64 facts[] = {sizeof(Params), Kernel::get_workspace_size(arguments), Gemm::kSharedBytes, grid.x, grid.y, grid.z};
  for (int i = 0; i < 6; ++i) build.facts[i] = facts[i];
}

}  // namespace mxfp8
