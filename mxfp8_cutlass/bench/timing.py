"""Clocks, and how calls are timed: interleaved, with L2 flushed before each, as medians with quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

LEAST_ROUNDS = 3
FLUSH_BYTES = 256 << 20
"""Reading as much takes about 60 us, in which the host enqueues the call that is timed next."""


class Timer(Protocol):
    """A stream's clock. Marks are made in the order in which the stream gets to them."""

    def mark(self) -> Any:  # noqa: ANN401 - each timer has marks of its own
        """Mark this place of the stream."""

    def elapsed_ms(self, start: Any, stop: Any) -> float:  # noqa: ANN401 - as above
        """Milliseconds between two marks; `wait` must have been called since they were made."""

    def wait(self) -> None:
        """Until the device has done everything."""

    def flush(self) -> None:
        """Evict everything from L2."""

    def host_s(self) -> float:
        """Seconds on the host's clock."""


class CudaTimer:
    """CUDA events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = max(FLUSH_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.zeros(size // 4, device=device)
        self._sink = torch.empty((), device=device)

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Milliseconds between two events that have happened."""
        return float(start.elapsed_time(stop))

    def wait(self) -> None:
        """Until the device has done everything."""
        torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Evict everything from L2 by reads: lines that were written would be written back while the call runs."""
        torch.sum(self._buffer, dim=0, out=self._sink)

    def host_s(self) -> float:
        """Seconds on the host's clock."""
        return time.perf_counter()


class HostTimer:
    """The host's clock, for operands on the CPU."""

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def elapsed_ms(self, start: float, stop: float) -> float:
        """Milliseconds between two readings."""
        return 1e3 * (stop - start)

    def wait(self) -> None:
        """Nothing runs in the background."""

    def flush(self) -> None:
        """Leave caches as they are."""

    def host_s(self) -> float:
        """Seconds."""
        return time.perf_counter()


def timer_for(device: torch.device) -> Timer:
    """The clock of a device: the one place that decides how time is taken."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


@dataclass(frozen=True)
class Spread:
    """Times of one call."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Summarize at least one time."""
        if len(times) == 1:
            return cls(times[0], times[0], times[0], 1)
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, low, high, len(times))

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.count)


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], timer: Timer, reps: int, budget_s: float
) -> dict[str, Spread]:
    """Time warm calls on the stream, in milliseconds.

    A round runs each call once, and each round starts with another one, so that clocks and temperature treat all alike.
    The host waits for the device between rounds only, so within one it runs ahead and its own time does not show.

    Args:
        calls: by name.
        timer: the device's clock.
        reps: rounds.
        budget_s: seconds for each call; once all of them together have used theirs up, no further round starts, but
            there are at least 3 (or `reps`, if that is less).
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = timer.host_s()
    for number in range(reps):
        if number >= LEAST_ROUNDS and timer.host_s() - begin > budget_s * len(names):
            break
        shift = number % len(names) if names else 0
        marks = []
        for name in names[shift:] + names[:shift]:
            timer.flush()
            start = timer.mark()
            calls[name]()
            marks.append((name, start, timer.mark()))
        timer.wait()
        for name, start, stop in marks:
            times[name].append(timer.elapsed_ms(start, stop))
    return {name: Spread.of(values) for name, values in times.items()}
