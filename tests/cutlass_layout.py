"""CUTLASS's own layout of scales, from its host code; run as a script to write the table in data/."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from mxfp8_cutlass.headers import include_path

TABLE = Path(__file__).parent / "data" / "cutlass_scale_layout.json"
TABLE_SHAPES = [(1, 1, 32), (1, 128, 128), (1, 130, 160), (2, 257, 416), (1, 640, 1056)]
"""(matrices, rows, K)"""

SOURCE = """
#include <cstdio>
#include "cutlass/detail/sm100_blockscaled_layout.hpp"

using Config = cutlass::detail::Sm1xxBlockScaledConfig<32>;

template <class Layout>
void print(Layout layout, int rows, int k, int matrices) {
  std::printf("%d", static_cast<int>(cute::size(cute::filter_zeros(layout))));
  for (int l = 0; l < matrices; ++l)
    for (int row = 0; row < rows; ++row)
      for (int element = 0; element < k; element += 32) std::printf(" %d", static_cast<int>(layout(row, element, l)));
  std::printf("\\n");
}

int main() {
  char operand;
  int matrices, rows, k;
  const int other = 48;  // the other operand's rows, which must not matter
  while (std::scanf(" %c %d %d %d", &operand, &matrices, &rows, &k) == 4) {
    if (operand == 'A') {
      print(Config::tile_atom_to_shape_SFA(cute::make_shape(rows, other, k, matrices)), rows, k, matrices);
    } else {
      print(Config::tile_atom_to_shape_SFB(cute::make_shape(other, rows, k, matrices)), rows, k, matrices);
    }
  }
}
"""


class CutlassLayout:
    """Where CUTLASS has the scales of (matrices, rows, K), by a program that is compiled once."""

    def __init__(self, compiler: str, folder: Path) -> None:
        source, self._program = folder / "layout.cpp", folder / "layout"
        source.write_text(SOURCE)
        includes = [f"-I{directory}" for directory in include_path()]
        subprocess.run([compiler, "-std=c++17", "-w", *includes, source, "-o", self._program], check=True)

    def __call__(self, operand: str, shapes: list[tuple[int, int, int]]) -> list[tuple[int, np.ndarray]]:
        """For each shape, as operand "A" or "B": bytes in all, and each scale's offset (matrices, rows, blocks)."""
        text = "".join(f"{operand} {matrices} {rows} {k}\n" for matrices, rows, k in shapes)
        output = subprocess.run([self._program], input=text, capture_output=True, text=True, check=True).stdout
        results = []
        for line, (matrices, rows, k) in zip(output.splitlines(), shapes, strict=True):
            size, *offsets = map(int, line.split())
            results.append((size, np.array(offsets).reshape(matrices, rows, -(-k // 32))))
        return results


def summary(layout: CutlassLayout) -> list[dict[str, object]]:
    """The table: for each shape and operand, the size and the offsets of scattered scales."""
    entries = []
    for operand in "AB":
        for shape, (size, offsets) in zip(TABLE_SHAPES, layout(operand, TABLE_SHAPES), strict=True):
            flat = offsets.ravel()
            some = sorted({0, flat.size - 1, *range(0, flat.size, flat.size // 40 | 1)})
            entries.append(
                {"operand": operand, "shape": shape, "bytes": size, "offsets": [[i, int(flat[i])] for i in some]}
            )
    return entries


def _write_table() -> None:
    import tempfile  # noqa: PLC0415 - the script's alone

    with tempfile.TemporaryDirectory() as folder:
        entries = summary(CutlassLayout("g++", Path(folder)))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")


if __name__ == "__main__":
    _write_table()
