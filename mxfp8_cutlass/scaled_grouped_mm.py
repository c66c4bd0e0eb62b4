"""scaled_grouped_mm: torch.nn.functional.scaled_grouped_mm's signature, for its MXFP8 recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxfp8_cutlass.columns import ColumnwiseMXFP8, check_offs, columns_of_rows
from mxfp8_cutlass.grouped_mm import grouped_mm
from mxfp8_cutlass.mxfp8_tensor import BLOCK, FP8_DTYPES, SCALE_DTYPES, MXFP8Tensor, scale_shape
from mxfp8_cutlass.scale_layout import Groups, swizzled_shape, unswizzle_scales

RECIPE, PLAIN, SWIZZLED = "BlockWise1x32", "NO_SWIZZLE", "SWIZZLE_32_4_4"


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: object,
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: object,
    swizzle_a: object = None,
    swizzle_b: object = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,  # noqa: ARG001, FBT001, FBT002 - torch's signature
) -> torch.Tensor:
    """Multiply as torch.nn.functional.scaled_grouped_mm does for ScalingType.BlockWise1x32.

    (M, K) x (G, K, N), offs cutting M -> (M, N); (M, K) x (K, N), offs cutting K -> (G, M, N);
    (G, M, K) x (G, K, N) -> (G, M, N). Operands are folded on Hopper, at each call: see `grouped_mm`.

    Args:
        mat_a: float8_e4m3fn or float8_e5m2, row-major.
        mat_b: the same, with each matrix column-major: a transposed view of (G, N, K) or (N, K).
        scale_a: float8_e8m0fnu or uint8. Swizzled: as `swizzle_scales` lays out those of a matrix or of its groups, of
            any shape with as many bytes as the groups need, or more. Else compact: (..., M, K // 32).
        scale_recipe_a: ScalingType.BlockWise1x32.
        scale_b: the same for mat_b's rows of K: compact (..., N, K // 32).
        scale_recipe_b: ScalingType.BlockWise1x32.
        swizzle_a: SwizzleType.SWIZZLE_32_4_4, or NO_SWIZZLE or None for compact scales.
        swizzle_b: the same.
        bias: (G, N), of the output's dtype; not where offs cuts K.
        offs: int32 or int64 (G,): the end of each group. Where it cuts K, a group's blocks start at its first element,
            and its scales are right after those of the groups before.
        output_dtype: bfloat16 (None too), float16 or float32.
        contraction_dim: the last axis of mat_a and the one before the last of mat_b, or nothing.
        use_fast_accum: has no effect: sums are promoted to float32 as in `grouped_mm`.

    Raises:
        TypeError: an argument is of another type or dtype than listed above.
        ValueError: a recipe, shape, layout or device breaks a rule above.
    """
    first, second = _only("scale_a", scale_a), _only("scale_b", scale_b)
    for name, recipe in (("scale_recipe_a", scale_recipe_a), ("scale_recipe_b", scale_recipe_b)):
        if (have := _name(_only(name, recipe))) != RECIPE:
            raise ValueError(f"{name} is {have}: it must be {RECIPE}")
    swizzled = [_is_swizzled(name, value) for name, value in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b))]
    rows = _rows_of_b(mat_a, mat_b, contraction_dim)
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    if mat_a.ndim == 2 and rows.ndim == 2:
        if bias is not None:
            raise ValueError("bias is given and mat_b is 2D: it does not go with offs that cut K")
        if offs is None:
            raise ValueError("offs is None and mat_b is 2D: it must be the end of each group along K")
        check_offs(offs, "mat_a", mat_a.device)
        lhs = _columns("scale_a", first, mat_a, offs, swizzled=swizzled[0])
        rhs = _columns("scale_b", second, rows, offs, swizzled=swizzled[1])
        return grouped_mm(lhs, rhs, offs, out_dtype=dtype)
    if offs is not None:
        check_offs(offs, "mat_a", mat_a.device)
    a = _rows("scale_a", first, mat_a, offs if mat_a.ndim == 2 else None, swizzled=swizzled[0])
    b = _rows("scale_b", second, rows, None, swizzled=swizzled[1])
    return grouped_mm(a, b, offs, bias=bias, out_dtype=dtype)


def _rows(name: str, scale: object, data: torch.Tensor, offs: torch.Tensor | None, *, swizzled: bool) -> MXFP8Tensor:
    """An operand of which offs, if given, cuts the rows; its scales stay in the layout that they have."""
    compact = scale_shape(data.shape)
    checked = _checked_scale(name, scale, data)
    if not swizzled:
        return MXFP8Tensor(data, _compact(name, checked, compact, compact))
    return MXFP8Tensor(data, _blocked(name, checked, compact, offs, "rows"), swizzled=True, offs=offs)


def _columns(name: str, scale: object, data: torch.Tensor, offs: torch.Tensor, *, swizzled: bool) -> ColumnwiseMXFP8:
    """An operand of which offs cuts K."""
    n, k = data.shape
    most = n, k // BLOCK + min(k, offs.shape[0])  # groups of any sizes begin as many blocks
    checked = _checked_scale(name, scale, data)
    if not swizzled:
        return columns_of_rows(data, _compact(name, checked, (n, -(-k // BLOCK)), most), offs)
    blocked = _blocked(name, checked, most, offs, "blocks")
    return columns_of_rows(data, unswizzle_scales(blocked, most, offs, groups="blocks"), offs)


def _only(name: str, value: object) -> object:
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{name} has {len(value)} entries: the MXFP8 recipe has one")
        return value[0]
    return value


def _name(value: object) -> str:
    """Of torch's ScalingType or SwizzleType, whose classes older versions lack."""
    return str(getattr(value, "name", value))


def _is_swizzled(name: str, value: object) -> bool:
    have = PLAIN if value is None or value == [] else _name(_only(name, value))
    if have not in (PLAIN, SWIZZLED):
        raise ValueError(f"{name} is {have}: it must be {SWIZZLED} or {PLAIN}")
    return have == SWIZZLED


def _rows_of_b(mat_a: torch.Tensor, mat_b: torch.Tensor, contraction_dim: Sequence[int]) -> torch.Tensor:
    """mat_b as (..., N, K), after checking the pair."""
    for name, mat in (("mat_a", mat_a), ("mat_b", mat_b)):
        if not isinstance(mat, torch.Tensor):
            raise TypeError(f"{name} is a {type(mat).__name__}: it must be a torch.Tensor")
        if mat.dtype not in FP8_DTYPES:
            raise TypeError(f"{name} has dtype {mat.dtype}: it must be float8_e4m3fn or float8_e5m2")
    if (mat_a.ndim, mat_b.ndim) not in ((2, 3), (2, 2), (3, 3)):
        raise ValueError(f"mat_a is {mat_a.ndim}D and mat_b {mat_b.ndim}D: 2D and 3D, 2D and 2D, or 3D and 3D")
    if len(contraction_dim) not in (0, 2):
        raise ValueError(f"contraction_dim is {contraction_dim}: it must be empty or an axis of each")
    if len(contraction_dim) == 2:
        axes = contraction_dim[0] % mat_a.ndim, contraction_dim[1] % mat_b.ndim
        if axes != (mat_a.ndim - 1, mat_b.ndim - 2):
            raise ValueError(f"contraction_dim is {contraction_dim}: K is mat_a's last and mat_b's last but one")
    if mat_a.shape[-1] != mat_b.shape[-2]:
        raise ValueError(f"mat_b has shape {tuple(mat_b.shape)}: its K must be that of mat_a, {mat_a.shape[-1]}")
    rows = mat_b.mT
    if not rows.is_contiguous():
        raise ValueError(f"mat_b has strides {tuple(mat_b.stride())}: it must be column-major, (..., N, K) transposed")
    if not mat_a.is_contiguous():
        raise ValueError(f"mat_a has strides {tuple(mat_a.stride())}: it must be row-major")
    return rows


def _checked_scale(name: str, scale: object, data: torch.Tensor) -> torch.Tensor:
    """The scales of an operand as bytes, after checking all but their shape."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}: it must be a torch.Tensor")
    if scale.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {scale.dtype}: it must be float8_e8m0fnu or uint8")
    if scale.device != data.device:
        raise ValueError(f"{name} is on {scale.device}: it must be on {data.device}, as its elements are")
    if not scale.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(scale.stride())}: it must be contiguous")
    return scale.view(torch.uint8)


def _compact(name: str, scale: torch.Tensor, least: tuple[int, ...], most: tuple[int, ...]) -> torch.Tensor:
    """Compact scales, of a shape between these two, which differ in the last axis alone."""
    if scale.ndim != len(most) or scale.shape[:-1] != most[:-1] or not least[-1] <= scale.shape[-1] <= most[-1]:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}: compact scales have {least}")
    return scale


def _blocked(
    name: str, scale: torch.Tensor, compact: tuple[int, ...], offs: torch.Tensor | None, groups: Groups
) -> torch.Tensor:
    """Swizzled scales, of the shape that `swizzle_scales` gives compact ones of a shape."""
    shape = swizzled_shape(compact, None if offs is None else offs.shape[0], groups)
    needed = torch.Size(shape).numel()
    flat = scale.flatten()
    if len(compact) == 3 and flat.numel() != needed:
        raise ValueError(f"{name} has {flat.numel()} bytes: matrices with scales of shape {compact} have {needed}")
    # Another buffer may have room for other worst cases; what the groups do use lies at the same place.
    flat = flat[:needed] if flat.numel() >= needed else torch.nn.functional.pad(flat, (0, needed - flat.numel()))
    return flat.view(shape)
