"""The kernels' text: Jinja templates (``*.cu.j2``) and, under ``include/``, the headers that hold the algorithms."""

from __future__ import annotations

from pathlib import Path

TEMPLATES = Path(__file__).parent
INCLUDE = TEMPLATES / "include"
