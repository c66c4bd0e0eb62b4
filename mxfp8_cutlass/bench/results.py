"""All that a run found, and how it is kept."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from mxfp8_cutlass.bench.host import ColdStart, HostTime
from mxfp8_cutlass.bench.memory import Move
from mxfp8_cutlass.bench.speed import Ceilings, Effort, Row


@dataclass
class Results:
    """A run, filled part by part; a part that was not asked for is empty."""

    about: dict[str, str]
    effort: Effort
    ceilings: Ceilings = field(default_factory=Ceilings)
    speed: list[Row] = field(default_factory=list)
    memory: list[Move] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)
    cold_start: list[ColdStart] = field(default_factory=list)
    scaling: dict[str, list[Row]] = field(default_factory=dict)
    failure: str = ""
    """What ended the run before its time, if anything did."""

    def to_json(self) -> str:
        """JSON without NaN or infinities, which it does not have."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
