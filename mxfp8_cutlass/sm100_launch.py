"""Launches of SM100's grouped GEMMs: a kernel writes the arrays of the groups, then CUTLASS's kernel reads them.

Each launch has memory of its own for the arrays and CUTLASS's workspace, from torch's allocator. It goes back in stream
order, so neither launches on several streams nor graphs share any.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mxfp8_cutlass.generator.render import KernelConfig
from mxfp8_cutlass.generator.sm100_config import Sm100Config
from mxfp8_cutlass.generator.sm100_launch_config import Sm100ArgumentsConfig, Sm100ParamsConfig
from mxfp8_cutlass.kernel import current_stream, load, multiprocessors, target_of
from mxfp8_cutlass.launch import MAX_KNOWN, Addresses, Shapes, keep_for_graphs
from mxfp8_cutlass.sm100_arguments import GroupArrays, Sm100ArgumentsParams
from mxfp8_cutlass.sm100_params import parameter_of

OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class _Gemm:
    """CUTLASS's kernel for a number of groups, ready but for where its memory lies."""

    def __init__(
        self, config: KernelConfig, builder: KernelConfig, groups: int, device: int, *, accumulate: bool, bias: bool
    ) -> None:
        self.arrays = GroupArrays(groups)
        self._kernel = load(config, device)
        self._parameter = parameter_of(builder, groups, device, accumulate=accumulate, bias=bias)
        self._by_start: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._nbytes = self.arrays.nbytes + self._parameter.facts.workspace_bytes
        self._device = torch.device("cuda", device)

    def memory(self) -> torch.Tensor:
        """Room for the arrays, and behind them CUTLASS's workspace."""
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def launch(self, start: int, stream: int) -> None:
        """Launch for the arrays in memory that begins at an address."""
        params = self._by_start.get(start)
        if params is None:
            if len(self._by_start) >= MAX_KNOWN:
                self._by_start.clear()
            params = self._by_start[start] = self._parameter.at(start)
        self._kernel.launch(params, self._parameter.facts.grid, stream)


class Sm100Launch:
    """A launch for groups that share N and K, complete but for its addresses. Threads can share it.

    Args:
        config: the GEMM, loaded here. CUTLASS's code runs once for its parameter, which waits for the device.
        shapes: as for launch.StackedLaunch.
        groups: how many.
        device: of the operands.
        index_is_int64: whether `offs` or `counts` are int64, else int32.
        accumulate: whether to add to the output.
        bias: whether there is one.
        cuts_k: whether `offs` cuts K, and each group has an output of its own.
        builder: the kernel that runs CUTLASS's code; the config's own unless given.
    """

    def __init__(
        self,
        config: Sm100Config,
        shapes: Shapes,
        groups: int,
        device: int,
        *,
        index_is_int64: bool,
        accumulate: bool,
        bias: bool = False,
        cuts_k: bool = False,
        builder: KernelConfig | None = None,
    ) -> None:
        self.config, self._device = config, device
        builder = builder or Sm100ParamsConfig(config.target_sm, config)
        self._gemm = _Gemm(config, builder, groups, device, accumulate=accumulate, bias=bias)
        self._write_arrays = load(Sm100ArgumentsConfig(target_of(device)), device)
        writes_zeros = cuts_k and not accumulate
        self._grid = multiprocessors(device) if writes_zeros else 1
        self._arguments = Sm100ArgumentsParams(
            m=shapes.m,
            n=shapes.n,
            k=shapes.k,
            tokens=shapes.tokens if cuts_k else shapes.m,
            index_is_int64=index_is_int64,
            groups=groups,
            cuts_k=cuts_k,
            out_bytes=OUT_BYTES[config.out],
            writes_zeros=writes_zeros,
        )
        self.known: set[Addresses] = set()
        """Addresses of earlier calls."""
        self._made: dict[tuple[int, Addresses], Sm100ArgumentsParams] = {}
        """The first kernel's argument for these, and for where the arrays lay."""

    def __call__(self, x: Addresses) -> None:
        """Launch both kernels on the current stream."""
        memory = self._gemm.memory()
        start, stream = memory.data_ptr(), current_stream(self._device)
        arguments = self._made.get((start, x))
        if arguments is None:
            if len(self._made) >= MAX_KNOWN:
                self._made.clear()
                self.known.clear()
            arguments = Sm100ArgumentsParams.from_buffer_copy(self._arguments)
            set_operands(arguments, x)
            self._gemm.arrays.set_addresses(arguments, start)
            self._made[start, x] = arguments
            self.known.add(x)
        self._write_arrays.launch(arguments, self._grid, stream)
        self._gemm.launch(start, stream)


def set_operands(arguments: Sm100ArgumentsParams, x: Addresses) -> None:
    """Set where the operands of all groups lie."""
    arguments.base_a, arguments.base_b, arguments.base_sfa, arguments.base_sfb = x.a, x.b, x.sfa, x.sfb
    arguments.base_out, arguments.base_bias, arguments.offs, arguments.counts = x.out, x.bias, x.offs, x.counts


def launch_sm100_list(
    config: Sm100Config, problems: Sequence[tuple[Shapes, Addresses]], *, accumulate: bool, device: int
) -> None:
    """Launch one kernel for problems of any shapes. Their arrays travel to the device by a copy on the same stream."""
    builder = Sm100ParamsConfig(config.target_sm, config)
    gemm = _Gemm(config, builder, len(problems), device, accumulate=accumulate, bias=False)
    host = torch.empty(gemm.arrays.nbytes, dtype=torch.uint8, pin_memory=True)
    write_problems(gemm.arrays, host, problems)
    keep_for_graphs(host)
    memory = gemm.memory()
    memory[: host.numel()].copy_(host, non_blocking=True)
    gemm.launch(memory.data_ptr(), current_stream(device))


def write_problems(arrays: GroupArrays, memory: torch.Tensor, problems: Sequence[tuple[Shapes, Addresses]]) -> None:
    """Write the arrays for problems that each have scales in the blocked layout of their own."""
    columns = {
        "shapes": [(s.m, s.n, s.k) for s, _ in problems],
        **{field: [(getattr(x, field),) for _, x in problems] for field in ("a", "b", "sfa", "sfb", "out")},
        "bias": [(0,) for _ in problems],
        "stride_a": [(s.k,) for s, _ in problems],
        "stride_b": [(s.k,) for s, _ in problems],
        "stride_out": [(s.n,) for s, _ in problems],
        "layout_sfa": [scale_layout(s.m, s.k) for s, _ in problems],
        "layout_sfb": [scale_layout(s.n, s.k) for s, _ in problems],
    }
    for field, entries in columns.items():
        view = arrays.view(memory, field)
        view.copy_(torch.tensor(entries, dtype=view.dtype))


def scale_layout(rows: int, k: int) -> tuple[int, int, int, int, int]:
    """mxfp8::Sm100ScaleLayout of a whole matrix: 512-byte tiles of 128 rows x 128 elements along K."""
    row_tiles, quads = -(-rows // 128), -(-k // 128)
    return row_tiles, quads, 1, 512 * quads, 512 * quads * row_tiles
