// Grouped GEMM for Blackwell: CUTLASS's block-scaled collectives, put together by its builders.
//
// D = A * B^T + bias + beta * C for each group, with A (M, K) and B (N, K) in MXFP8, C and D (M, N) and bias (N) of one type.
// Shapes, pointers, strides and layouts of scales are arrays on the device, an entry for each group; the bias' may be null.
// Scales lie in the 128x4 blocked layout.
// Headers are those that a kernel needs: collective_builder.hpp and gemm_universal.hpp would bring all architectures'.
#pragma once

#include "mxfp8/patched_cutlass.cuh"

#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/sm100_blockscaled_mma_array_warpspecialized.hpp>
#include <cutlass/gemm/collective/builders/sm100_blockscaled_umma_builder.inl>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm100_gemm_array_tma_warpspecialized.hpp>

namespace mxfp8 {

// CUTLASS unpacks it at run time, which a stride without a member would not allow.
template <class StrideN>
using BatchStride = cute::Stride<cute::_0, StrideN, long long>;

// An epilogue's visitors: beta * C + (accumulator + bias), in FP32, rounded once. C is not loaded if beta is 0.
template <class CtaShape, class Out>
using BiasAndSource = cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Out, float,
                                           cutlass::FloatRoundStyle::round_to_nearest>,
    cutlass::epilogue::fusion::Sm90ScalarBroadcast<float, BatchStride<cute::_0>>, cutlass::epilogue::fusion::Sm90SrcFetch<Out>,
    cutlass::epilogue::fusion::Sm90EVT<
        cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, float, float,
                                               cutlass::FloatRoundStyle::round_to_nearest>,
        cutlass::epilogue::fusion::Sm90RowBroadcast</*Stages=*/0, CtaShape, Out*, float, BatchStride<cute::_1>>,
        cutlass::epilogue::fusion::Sm90AccFetch>>;

// TileM: rows of a tile, 128 for one SM's MMA, 256 for a pair's.
template <class ElementA, class ElementB, class Out, int TileM, int TileN, int ClusterM, int ClusterN>
struct Sm100GroupedGemm {
  static constexpr bool kPair = TileM == 256;
  static constexpr int kAlignmentAB = 16;  // elements: TMA's 16 bytes
  static constexpr int kAlignmentOut = 16 / sizeof(Out);
  static constexpr bool kBlockScaled = true;
  using Bias = Out;

  using Arch = cutlass::arch::Sm100;
  using OpClass = cutlass::arch::OpClassBlockScaledTensorOp;
  using TileShape = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, cute::_128>;
  using ClusterShape = cute::Shape<cute::Int<ClusterM>, cute::Int<ClusterN>, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor*;
  using ColumnMajor = cutlass::layout::ColumnMajor*;
  using EpilogueSchedule = cute::conditional_t<kPair, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm,
                                               cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>;
  using MainloopSchedule = cute::conditional_t<kPair, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmMxf8f6f4Sm100,
                                               cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100>;

  // For wide tiles the builder takes 64 or 128 columns at a time, which spills registers and, of FP32, fills shared memory.
  // With 256 columns the epilogue's are also those that two accumulators share in tensor memory: 2 * 256 - 32 leave 32 of
  // its 512 columns for scales, which take 12.
  using EpilogueTile = cute::conditional_t<(TileN > 128), cute::Shape<cute::_128, cute::_32>,
                                           cutlass::epilogue::collective::EpilogueTileAuto>;
  using CtaShape = cute::Shape<cute::_128, cute::Int<TileN>, cute::_128>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, OpClass, TileShape, ClusterShape, EpilogueTile, float, float, Out, RowMajor, kAlignmentOut,
      Out, RowMajor, kAlignmentOut, EpilogueSchedule, BiasAndSource<CtaShape, Out>>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, OpClass, cutlass::mx_float8_t<ElementA>, RowMajor, kAlignmentAB, cutlass::mx_float8_t<ElementB>, ColumnMajor,
      kAlignmentAB, float, TileShape, ClusterShape, Stages, MainloopSchedule>::CollectiveOp;

  using Shape = cute::Shape<int, int, int>;  // M, N, K
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  using Params = typename Kernel::Params;
  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;

  CUTLASS_DEVICE static void run(Params const& params) {
    extern __shared__ __align__(1024) char shared[];
    Kernel{}(params, shared);
  }
};

}  // namespace mxfp8
