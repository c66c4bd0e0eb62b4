"""A grouped GEMM of CUTLASS's own for SM90, which SM100's launch path can run: FP8 without scales, bf16 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jinja2 import ChoiceLoader, DictLoader

from mxfp8_cutlass.generator import render

GEMM = """\
#include "mxfp8/patched_cutlass.cuh"
#include "mxfp8/sm100_params.cuh"

#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_array_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_array_tma_warpspecialized_cooperative.hpp>

namespace stock {

using Out = cutlass::bfloat16_t;
using Element = cutlass::float_e4m3_t;
using RowMajor = cutlass::layout::RowMajor*;
using ColumnMajor = cutlass::layout::ColumnMajor*;
using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
using Cluster = cute::Shape<cute::Int<{{ config.cluster_m }}>, cute::_1, cute::_1>;
using Accumulator = float;

struct Gemm {
  static constexpr bool kBlockScaled = false;
  using Bias = Out;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, Accumulator, Out, RowMajor, 8, Out, RowMajor, 8,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, mxfp8::BiasAndSource<Tile, Out>>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, 16, Element, ColumnMajor, 16, Accumulator,
      Tile, Cluster, Stages, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum>::CollectiveOp;
  using Shape = cute::Shape<int, int, int>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  using Params = typename Kernel::Params;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
};

}  // namespace stock
"""

KERNEL = """\
{% include "stock_sm90.cuh.j2" %}
static_assert(stock::Gemm::Kernel::MaxThreadsPerBlock == {{ config.threads }});
static_assert(stock::Gemm::kSharedBytes <= {{ config.shared_memory }});

extern "C" __global__ void __cluster_dims__({{ config.cluster_m }}, 1, 1) __launch_bounds__({{ config.threads }}, 1)
{{ config.name }}(const __grid_constant__ stock::Gemm::Params params) {
  extern __shared__ __align__(1024) char shared[];
  stock::Gemm::Kernel{}(params, shared);
}
"""

BUILDER = """\
{% include "stock_sm90.cuh.j2" %}
extern "C" __global__ void __launch_bounds__(1)
{{ config.name }}(const __grid_constant__ mxfp8::Sm100BuildParams params) {
  mxfp8::build_params<stock::Gemm>(params);
}
"""

TEMPLATES = {"stock_sm90.cuh.j2": GEMM, "stock_sm90.cu.j2": KERNEL, "stock_sm90_params.cu.j2": BUILDER}


@dataclass(frozen=True)
class StockConfig:
    """The GEMM."""

    cluster_m: int = 1
    target_sm: ClassVar[str] = "90a"
    template: ClassVar[str] = "stock_sm90.cu.j2"
    threads: ClassVar[int] = 384
    shared_memory: ClassVar[int] = 227 * 1024
    out: ClassVar[str] = "bf16"

    @property
    def name(self) -> str:
        return f"stock_sm90_{self.cluster_m}x1x1"

    def check(self) -> str | None:
        return None


@dataclass(frozen=True)
class StockParamsConfig(StockConfig):
    """The kernel that makes its parameter."""

    template: ClassVar[str] = "stock_sm90_params.cu.j2"
    threads: ClassVar[int] = 1
    shared_memory: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return f"params_of_stock_sm90_{self.cluster_m}x1x1"


def use_templates(monkeypatch) -> None:
    """Render from these templates as well as from the package's."""
    environment = render._environment()
    monkeypatch.setattr(environment, "loader", ChoiceLoader([DictLoader(TEMPLATES), environment.loader]))
