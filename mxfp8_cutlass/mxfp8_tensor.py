"""MXFP8Tensor: FP8 elements and their E8M0 block scales, kept and checked together."""

from __future__ import annotations

import math

import torch

BLOCK = 32
"""Elements along K that share one E8M0 scale (OCP microscaling, `sf_vec_size`)."""

RUN = 128
"""Elements along K that share one scale once folded: four blocks."""

TILE_ROWS = 128
"""Rows that share one scale once folded to tiles."""

SCALE_NAN = 255
"""The E8M0 byte that means NaN; in `tile_scale` it marks a mixed tile, whose rows keep their own scales."""

ROW_PADDING = 16
"""scale_by_run pads each run's scales to a multiple of as many: bulk copies move aligned pieces of 16 bytes."""

SPARE_BYTES = 256
"""Bytes behind the last scale that may be read: a copy takes a tile's worth, wherever in it the rows end."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""What kernels' configs call the types."""


class MXFP8Tensor:
    """A 2D or 3D tensor in MXFP8: element (..., k) is `data[..., k] * 2**(scale[..., k // 32] - 127)`.

    Args:
        data: float8_e4m3fn or float8_e5m2, shape (R, K) or (G, R, K), contiguous, K a positive multiple of 32.
        scale: float8_e8m0fnu, or uint8 that holds the same bytes; shape data.shape[:-1] + (K // 32,), contiguous.
            Kept as float8_e8m0fnu, without a copy.
        folded: what may be relied on. 0: nothing. 1: the blocks of each run of 128 elements of a row have equal
            scales. 128: besides, `tile_scale` gives one scale per 128 x 128 tile. Use `fold` to get there: the claim
            itself is trusted, since checking it would read the scales back from the device.
        tile_scale: with folded=128 only: uint8, shape (..., ceil(R / 128), ceil(K / 128)), contiguous. A byte of 255
            marks a mixed tile, whose rows keep one scale per run.
        swizzled: whether `scale` is in the blocked layout instead, of the shape that `swizzle_scales` gives; what
            Blackwell's grouped GEMM reads. Elsewhere products bring it back first, at each call; fold and dequantize
            take compact scales alone.
        offs: with swizzled=True, for data (R, K): the ends of the groups of rows that `scale` was laid out for, int32
            or int64 (G,). Those of a product with this tensor must have the same values.

    A folded tensor is not to be written to: `fold` keeps its scales in a second order as well. Fold anew instead.

    Raises:
        TypeError: an argument is no tensor, or of a dtype that is not listed above.
        ValueError: a shape, a layout, a device or `folded` breaks a rule above.
    """

    __slots__ = ("_run_scale", "data", "folded", "offs", "scale", "swizzled", "tile_scale")

    data: torch.Tensor
    scale: torch.Tensor
    folded: int
    tile_scale: torch.Tensor | None
    swizzled: bool
    offs: torch.Tensor | None

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        *,
        folded: int = 0,
        tile_scale: torch.Tensor | None = None,
        swizzled: bool = False,
        offs: torch.Tensor | None = None,
    ) -> None:
        _check_data(data)
        shape = scale_shape(data.shape)
        if swizzled:
            shape = _swizzled_shape(data, folded, offs)
        elif offs is not None:
            raise ValueError("offs is given and swizzled is False: compact scales do not depend on groups")
        _check_part("scale", scale, SCALE_DTYPES, shape, data)
        if folded not in (0, 1, TILE_ROWS):
            raise ValueError(f"folded is {folded!r}: it must be 0, 1 or 128")
        if (tile_scale is not None) != (folded == TILE_ROWS):
            have = "missing" if tile_scale is None else "given"
            raise ValueError(f"tile_scale is {have} while folded is {folded}: it goes with folded=128 and nothing else")
        if tile_scale is not None:
            _check_part("tile_scale", tile_scale, (torch.uint8,), tile_scale_shape(data.shape), data)
        self._set(data, scale.view(torch.float8_e8m0fnu), int(folded), tile_scale)
        self.swizzled, self.offs = bool(swizzled), offs

    def _set(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        folded: int,
        tile_scale: torch.Tensor | None,
        run_scale: torch.Tensor | None = None,
    ) -> None:
        self.data, self.scale, self.folded, self.tile_scale = data, scale, folded, tile_scale
        self._run_scale, self.swizzled, self.offs = run_scale, False, None

    @classmethod
    def unchecked(
        cls,
        data: torch.Tensor,
        scale: torch.Tensor,
        folded: int = 0,
        tile_scale: torch.Tensor | None = None,
        run_scale: torch.Tensor | None = None,
    ) -> MXFP8Tensor:
        """For parts that this package made itself: no checks, since these cost more than launching a kernel does.

        `run_scale`: what scale_by_run is to return, if the kernel that wrote the other parts wrote it too.
        """
        self = cls.__new__(cls)
        self._set(data, scale.view(torch.float8_e8m0fnu), folded, tile_scale, run_scale)
        return self

    @property
    def shape(self) -> torch.Size:
        """(R, K) or (G, R, K)."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """2 or 3."""
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        """Where all parts lie."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The elements' FP8 type."""
        return self.data.dtype

    @property
    def K(self) -> int:  # noqa: N802 - the axis' name everywhere in the package
        """Length of the blocked axis, the last one."""
        return int(self.data.shape[-1])

    @property
    def scale_bytes(self) -> torch.Tensor:
        """The scales as the uint8 biased exponents that they are; shares memory with `scale`."""
        return self.scale.view(torch.uint8)

    def scale_by_run(self) -> torch.Tensor:
        """A folded tensor's scales as grouped GEMM kernels read them: uint8 (..., ceil(K / 128), R16), contiguous.

        A tile's scales of one run of 128 elements lie together in this order. R16 is R rounded up to a multiple of 16,
        and 256 bytes behind the last scale are readable too: kernels fetch aligned pieces of 16 bytes. Bytes of rows
        from R on have no meaning. What `fold` and `quantize(..., fold=True)` have not written already, each call lays
        out anew: a copy kept here would be wrong once `scale` changes, or on another stream, or after a capture.
        """
        if self._run_scale is not None:
            return self._run_scale
        by_run = empty_by_run(self.data)
        by_run[..., : self.shape[-2]] = self.scale_bytes[..., :: RUN // BLOCK].mT
        return by_run

    def swizzle(self, offs: torch.Tensor | None = None) -> MXFP8Tensor:
        """The same tensor with its scales in the blocked layout, for groups that `offs` ends; see `swizzle_scales`.

        What Blackwell's grouped GEMM reads: do this once for weights. Itself if it is swizzled already; no longer
        folded, since these kernels have no use for that.
        """
        from mxfp8_cutlass.scale_layout import swizzle_scales  # noqa: PLC0415 - scale_layout.py imports this module

        if self.swizzled:
            return self
        swizzled = MXFP8Tensor.unchecked(self.data, swizzle_scales(self.scale, offs))
        swizzled.swizzled, swizzled.offs = True, offs
        return swizzled

    def unswizzle(self) -> MXFP8Tensor:
        """The same tensor with compact scales; itself if it has them already. See `unswizzle_scales`."""
        from mxfp8_cutlass.scale_layout import unswizzle_scales  # noqa: PLC0415 - as above

        if not self.swizzled:
            return self
        return MXFP8Tensor.unchecked(self.data, unswizzle_scales(self.scale, scale_shape(self.shape), self.offs))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values in `dtype`; see `mxfp8_cutlass.dequantize`."""
        from mxfp8_cutlass.quantize import dequantize  # noqa: PLC0415 - quantize.py imports this module

        return dequantize(self, dtype)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> MXFP8Tensor:
        """The same tensor on another device; itself if it is there already. The FP8 type cannot be changed."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"device is {device}: to() moves between devices; dequantize() gives other dtypes")
        data = self.data.to(device, non_blocking=non_blocking)
        if data is self.data:
            return self
        scale = self.scale_bytes.to(device, non_blocking=non_blocking)
        if self.swizzled:
            offs = None if self.offs is None else self.offs.to(device, non_blocking=non_blocking)
            return MXFP8Tensor(data, scale, swizzled=True, offs=offs)
        tile_scale = None if self.tile_scale is None else self.tile_scale.to(device, non_blocking=non_blocking)
        run_scale = None
        if self._run_scale is not None:
            run_scale = empty_by_run(data).copy_(self._run_scale, non_blocking=non_blocking)
        return MXFP8Tensor.unchecked(data, scale, self.folded, tile_scale, run_scale)

    def __repr__(self) -> str:
        shape = ", ".join(str(n) for n in self.shape)
        state = "swizzled" if self.swizzled else f"folded={self.folded}"
        return f"MXFP8Tensor(({shape}), {self.dtype}, device={str(self.device)!r}, {state})"


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of compact scales for data of `shape` (..., R, K): (..., R, K / 32)."""
    return (*shape[:-1], shape[-1] // BLOCK)


def empty_by_run(data: torch.Tensor) -> torch.Tensor:
    """Room for what scale_by_run returns for a tensor with these elements, (..., R, K)."""
    *matrices, rows, k = data.shape
    runs, padded = -(-k // RUN), -(-rows // ROW_PADDING) * ROW_PADDING
    count = math.prod(matrices) * runs * padded
    memory = torch.empty(count + SPARE_BYTES, dtype=torch.uint8, device=data.device)
    return memory[:count].view(*matrices, runs, padded)


def tile_scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of `tile_scale` for data of `shape` (..., R, K): (..., ceil(R / 128), ceil(K / 128))."""
    return (*shape[:-2], -(-shape[-2] // TILE_ROWS), -(-shape[-1] // RUN))


def _swizzled_shape(data: torch.Tensor, folded: int, offs: torch.Tensor | None) -> tuple[int, ...]:
    from mxfp8_cutlass.scale_layout import check_groups, swizzled_shape  # noqa: PLC0415 - it imports this module

    if folded:
        raise ValueError(f"folded is {folded!r} and swizzled is True: folded tensors have compact scales")
    shape = scale_shape(data.shape)
    check_groups("scale", shape, data.device, offs, "rows")
    return swizzled_shape(shape, None if offs is None else offs.shape[0])


def _check_data(data: torch.Tensor) -> None:
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"data is a {type(data).__name__}: it must be a torch.Tensor")
    if data.dtype not in FP8_DTYPES:
        raise TypeError(f"data has dtype {data.dtype}: it must be float8_e4m3fn or float8_e5m2")
    check_blocked("data", data)


def check_blocked(name: str, x: torch.Tensor) -> None:
    """The layout rules that every tensor with blocks along its last axis obeys."""
    shape = tuple(x.shape)
    if len(shape) not in (2, 3):
        raise ValueError(f"{name} has shape {shape}: it must have 2 or 3 dimensions")
    if shape[-1] == 0 or shape[-1] % BLOCK:
        raise ValueError(f"{name} has shape {shape}: its last axis, K = {shape[-1]}, must be a positive multiple of 32")
    if not x.is_contiguous():
        raise ValueError(f"{name} has shape {shape} and strides {tuple(x.stride())}: it must be contiguous")


def _check_part(
    name: str, part: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], data: torch.Tensor
) -> None:
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{name} is a {type(part).__name__}: it must be a torch.Tensor")
    if part.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} has dtype {part.dtype}: it must be {allowed}")
    if tuple(part.shape) != tuple(shape):
        raise ValueError(
            f"{name} has shape {tuple(part.shape)}: for data of shape {tuple(data.shape)} it must be {tuple(shape)}"
        )
    if part.device != data.device:
        raise ValueError(f"{name} is on {part.device}: it must be on the device of data, {data.device}")
    if not part.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(part.stride())}: it must be contiguous")
