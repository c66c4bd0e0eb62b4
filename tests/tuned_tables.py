"""A tuned table of a test's own in place of the package's."""

from __future__ import annotations

from mxfp8_cutlass import select
from mxfp8_cutlass.tuned import table


def use(monkeypatch, directory, *entries):
    """Let select read these entries, or with none an absent table. Returns what forgets them all again."""
    monkeypatch.setattr(table, "DIRECTORY", directory)
    if entries:
        table.table_path("90a").write_text(table.Table(entries, {"device": "CPU, reference"}).to_json())
    forget()
    return forget


def forget():
    """Empty the caches that hold what was read or picked."""
    table.load.cache_clear()
    select.select_stacked.cache_clear()
    select._choose.cache_clear()
