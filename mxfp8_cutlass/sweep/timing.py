"""How a kernel is timed: launches in a CUDA graph, L2 flushed before each, events around each launch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mxfp8_cutlass.bench.timing import CudaTimer, HostTimer, Timer


class ReplayTimer(Timer, Protocol):
    """A clock whose marks also work within what it captures."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record what `body` enqueues, and return what enqueues it again. Marks made in `body` are made anew."""


class GraphTimer(CudaTimer):
    """Events that are nodes of a CUDA graph. Needs torch 2.9."""

    def mark(self) -> torch.cuda.Event:
        """Record an event, as a node if the stream is capturing."""
        event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture a graph. Not by torch.cuda.graph, which gives all cached memory back before each."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                body()
            finally:
                graph.capture_end()
        return graph.replay


class HostReplayTimer(HostTimer):
    """The host's clock, for operands on the CPU: a replay runs the body again."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Nothing is recorded."""
        return body


def replay_timer_for(device: torch.device) -> ReplayTimer:
    """The clock of a device."""
    return GraphTimer(device) if device.type == "cuda" else HostReplayTimer()


class Replay:
    """Launches of one call, to be replayed. The call must have run before: nothing may be loaded within a capture."""

    def __init__(self, call: Callable[[], object], timer: ReplayTimer, launches: int) -> None:
        self._call = call
        self._timer = timer
        self._launches = launches
        self._marks: list[tuple[Any, Any]] = []
        self._replay = timer.capture(self._body)

    def _body(self) -> None:
        self._marks = []
        for _ in range(self._launches):
            self._timer.flush()
            start = self._timer.mark()
            self._call()
            self._marks.append((start, self._timer.mark()))

    def sample_us(self) -> list[float]:
        """Replay, wait, and return the time of each launch in microseconds."""
        self._replay()
        self._timer.wait()
        return [1e3 * self._timer.elapsed_ms(start, stop) for start, stop in self._marks]
