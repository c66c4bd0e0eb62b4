"""Launches each kind of kernel once, on small ragged problems: what to run under compute-sanitizer. No test by itself.

With the argument `racecheck`, each lane of a warp arrives at barriers for itself (templates/include/mxfp8/ring.cuh).
docs/development.md has the commands.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

import mxfp8_cutlass as mx
from mxfp8_cutlass import inputs
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.config_space import sm90_configs, sm90_k_group_configs

SIZES = [130, 0, 1, 300, 64]
N, K = 400, 1120
SHAPES = [(300, 256, 512), (17, 1024, 96), (0, 64, 32), (129, 16, 32)]


def build_for_racecheck(configs: list[mx.TileConfig]) -> None:
    """From here on kernels are compiled with MXFP8_RACECHECK; these at once, several at a time."""
    render = inputs.render
    inputs.render = lambda config: "#define MXFP8_RACECHECK\n" + render(config)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        list(processes.map(get_cubin, configs))


def main() -> None:
    configs = [c for c in sm90_configs() if (c.element_a, c.element_b, c.out) == ("e4m3", "e4m3", "bf16")]
    if "racecheck" in sys.argv[1:]:
        build_for_racecheck(configs)
    torch.manual_seed(0)
    groups, rows = len(SIZES), sum(SIZES) + 9
    x, w = torch.randn(rows, K, device="cuda"), torch.randn(groups, N, K, device="cuda")
    w[1, :200] *= torch.exp(6 * torch.randn(200, 1, device="cuda"))  # mixed tiles
    w[2, :, :64] *= 1e30  # extreme scales
    w[3] *= 1e-30
    offs = torch.tensor(SIZES, device="cuda").cumsum(0).to(torch.int32)
    bias = torch.randn(groups, N, device="cuda", dtype=torch.bfloat16)

    mx.dequantize(mx.quantize(x.bfloat16(), torch.float8_e5m2, "floor", fold=True), torch.bfloat16)
    mx.quantize_both(x, offs, columnwise_fold_rows=128, bias_grad=True, bias_scale=x[:, 0])
    mx.quantize_both(w[:, :288].bfloat16(), fold_rows=128, columnwise_fold_rows=1)
    xq, wq = mx.quantize(x), mx.quantize(w)
    for scale, ends, cut in ((xq.scale, offs, "rows"), (xq.scale, 32 * torch.arange(1, 6).to(offs), "blocks")):
        mx.unswizzle_scales(mx.swizzle_scales(scale, ends, groups=cut), scale.shape, ends, groups=cut)
    folded = {rows: mx.fold(wq, rows, return_stats=True)[0] for rows in (1, 128)}
    for config in configs:
        exact = config.promotion_k == 32
        a, b = (xq, wq) if exact else (mx.fold(xq), folded[config.sfb_rows])
        out = torch.zeros(rows, N, device="cuda", dtype=torch.bfloat16)
        mx.grouped_mm(a, b, offs, bias=bias, out=out, accumulate=True, exact=exact, config=config)
    columns = {rows: mx.quantize_columnwise(x, offs, fold_rows=rows) for rows in (1, 128)}
    narrow = mx.quantize_columnwise(x[:, :N].contiguous(), offs, fold_rows=1)
    k_configs = [c for c in sm90_k_group_configs() if c.element_a == c.element_b == "e4m3" and c.out != "fp16"]
    for config in k_configs:
        out = torch.zeros(groups, N, K, device="cuda", dtype=torch.float32 if config.out == "fp32" else torch.bfloat16)
        for accumulate in (False, True):
            mx.grouped_mm(narrow, columns[config.sfb_rows], out=out, accumulate=accumulate, config=config)
    mx.grouped_mm(mx.quantize(torch.randn(groups, 70, K, device="cuda")), folded[128])
    pairs = [(torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")) for m, n, k in SHAPES]
    mx.grouped_gemm([(mx.quantize(a), mx.quantize(b)) for a, b in pairs])
    torch.cuda.synchronize()
    print(f"{len(configs) + 2 * len(k_configs) + 2} grouped GEMM launches")  # noqa: T201 - so that a log shows how far it came


if __name__ == "__main__":
    main()
