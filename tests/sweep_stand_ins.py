"""What tests of sweep share: a played clock on which each kernel takes its own time, kernels that fail."""

from __future__ import annotations

from bench_stand_ins import FakeTimer

import mxfp8_cutlass
from mxfp8_cutlass.select import make_facts
from mxfp8_cutlass.sweep import operands
from mxfp8_cutlass.sweep.problems import parse_list, parse_stacked
from mxfp8_cutlass.sweep.run import Plan

FACTS = make_facts(128, 128, "e4m3", "e4m3", "bf16")
STACKED = parse_stacked("3,48,32,160")
MASKED = parse_stacked("3,46,32,160", masked=True)
LIST = parse_list("5,32,128;0,16,64;9,48,96")


class PlayedTimer(FakeTimer):
    """A replay runs the captured body again."""

    lost = False

    def capture(self, body):
        self.events.append("capture")
        body()
        return body

    def wait(self):
        if self.lost:
            raise RuntimeError("the context is gone")
        super().wait()


class Kernels:
    """Stands in for the products: `ms` of a kernel on the played clock, then the reference; or what `faults` does."""

    def __init__(self, monkeypatch, ms=lambda config: 1):
        self.timer, self.ms, self.faults, self.calls = PlayedTimer(), ms, {}, []
        for name in ("grouped_mm", "grouped_gemm"):
            monkeypatch.setattr(operands, name, self._stand_in(getattr(mxfp8_cutlass, name)))

    def _stand_in(self, product):
        def call(*arguments, config, **keywords):
            self.calls.append(config.name)
            self.timer.events.append("call")
            self.timer.time += self.ms(config)
            if config.name in self.faults:
                return self.faults[config.name](keywords)
            return product(*arguments, config=config, **keywords)

        return call


class Steps:
    """Counts what a progress bar is told."""

    def __init__(self):
        self.expected, self.done = 0, 0

    def expect(self, steps):
        self.expected += steps

    def step(self, text, count=1):
        self.done += count


def plan(*problems, **keywords):
    return Plan(problems or (STACKED,), **({"facts": FACTS, "keep": None, "launches": 2, "rounds": 3} | keywords))
