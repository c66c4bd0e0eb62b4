"""Compiling ahead of the timing, in processes: NVRTC compiles one kernel at a time in each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from mxfp8_cutlass import env
from mxfp8_cutlass.bench.run import is_compiled
from mxfp8_cutlass.bench.speed import reason
from mxfp8_cutlass.cache import get_cubin
from mxfp8_cutlass.generator.config_space import GroupedGemmConfig
from mxfp8_cutlass.generator.render import render
from mxfp8_cutlass.headers import HeadersNotFoundError
from mxfp8_cutlass.inputs import inputs_of, source_digest


def source_of(config: GroupedGemmConfig) -> str:
    """What a kernel is built from: its key in the cache, or this package's part of it where nothing can be compiled."""
    try:
        return inputs_of(config).key
    except HeadersNotFoundError:
        return source_digest(render(config))


def missing(configs: Iterable[GroupedGemmConfig]) -> list[GroupedGemmConfig]:
    """The kernels that are neither in the bundle nor in the cache; none where nothing can be compiled."""
    if not env.jit():
        return []
    try:
        return [config for config in configs if not is_compiled(config)]
    except HeadersNotFoundError:
        return []


def compile_all(configs: list[GroupedGemmConfig], jobs: int, done: Callable[[str], None]) -> dict[str, str]:
    """Compile into the cache. Returns errors by kernel; `done` is told each kernel that is finished."""
    failures: dict[str, str] = {}
    if not configs:
        return failures
    # A fresh interpreter per worker: forking after torch's threads have started may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(configs)), context) as pool:
        futures = {pool.submit(_compile, config): config for config in configs}
        try:
            for future in as_completed(futures):
                error = future.exception()
                # A worker that was killed takes the others' kernels with it: those compile when they are first used.
                if error is not None and not isinstance(error, BrokenProcessPool):
                    failures[futures[future].name] = reason(error)
                done(futures[future].name)
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


def _compile(config: GroupedGemmConfig) -> None:
    get_cubin(config)
