"""Launches on a Ray cluster of two nodes on this machine, compared with local ones. Run `make bench ROWS=ray`."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from benchmarks.bench import Figure, alternate, compared, row
from benchmarks.debugging import SIZES, train
from tests.support.ray_cluster import SHADOW, LocalCluster

REPEATS = 3
LINES, LOGS = 20_000, 20_000
PEER = "the peer is the same ranks as local processes (spawn)"


@row("ray", "ray")
def on_ray() -> Iterator[Figure]:
    """Measure rank startup, a training step, and logging."""
    if importlib.util.find_spec("ray") is None:
        yield Figure(what="launching on Ray", unit="s", ours=None, note="Ray is not installed: make bench ROWS=ray")
        return
    with cluster():
        sides = {"ray": partial(launch, on="ray"), "local": partial(launch, start_method="spawn")}
        yield from starting(**sides)
        yield from stepping(**sides)
        yield from logging(**sides)


@contextmanager
def cluster() -> Iterator[None]:
    """Run a cluster of two nodes with one CPU each."""
    sys.path.insert(0, str(SHADOW))
    found = LocalCluster(1, 1)
    os.environ["RAY_ADDRESS"] = found.address
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        found.close()


def launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Launch a function on two ranks."""
    from notebook_accelerate import notebook_launcher

    env = {"ACCELERATE_USE_CPU": "1"}
    return notebook_launcher(function, arguments, num_processes=2, use_port=0, panel=False, env=env, **options)


def starting(ray: Callable[..., Any], local: Callable[..., Any]) -> Iterator[Figure]:
    """Measure the time from the call to the last rank's first line, and to the return."""

    def first_line(side: Callable[..., Any]) -> float:
        begin = time.time()
        return max(side(time.time).results) - begin

    def whole(side: Callable[..., Any]) -> float:
        begin = time.time()
        side(int)
        return time.time() - begin

    for what, measure, limit in (("to the first line", first_line, 15), ("to the return, empty function", whole, 20)):
        ours, peer = alternate(REPEATS, partial(measure, ray), partial(measure, local))
        yield compared(f"2 ranks on 2 nodes: {what}", ours, peer, unit="s", limit=limit, note=PEER)


def stepping(ray: Callable[..., Any], local: Callable[..., Any]) -> Iterator[Figure]:
    """Measure a training step, in which Ray takes no part."""

    def step(side: Callable[..., Any]) -> float:
        return statistics.median(wall for (wall, _), _ in side(train, SIZES["10 ms"]).results[0])

    ours, peer = alternate(REPEATS, partial(step, ray), partial(step, local))
    yield compared("a step of 10 ms, 2 ranks, DDP", ours, peer, unit="ms", scale=1e3, ratio=1.1, note=PEER)


def logging(ray: Callable[..., Any], local: Callable[..., Any]) -> Iterator[Figure]:
    """Measure what a logged number costs the rank, and the throughput of printed lines."""

    def call(side: Callable[..., Any]) -> float:
        return float(side(emits).results[0])

    def line(side: Callable[..., Any]) -> float:
        with redirect_stdout(StringIO()):  # The ranks' lines would bury the table of figures.
            run = side(prints)
        assert len(run.logs(rank=0)) > 0
        return float((run.ended - max(run.results)) / (2 * LINES))

    ours, peer = alternate(REPEATS, partial(call, ray), partial(call, local))
    yield compared("a logged number, in the rank", ours, peer, unit="µs", scale=1e6, limit=10, note=PEER)
    ours, peer = alternate(REPEATS, partial(line, ray), partial(line, local))
    yield compared(
        f"one of {2 * LINES:,} printed lines, from the first print to the end of the run", ours, peer, unit="µs",
        scale=1e6, limit=100, note=PEER,
    )  # fmt: skip


def emits() -> float:
    """Log numbers on a rank. Return the seconds per number."""
    from notebook_accelerate.telemetry import MetricEvent, emit

    begin = time.perf_counter()
    for step in range(LOGS):
        emit(MetricEvent({"loss": 0.5}, step))
    return (time.perf_counter() - begin) / LOGS


def prints() -> float:
    """Print lines on a rank. Return the time at which printing began."""
    begin = time.time()
    for number in range(LINES):
        print(f"line {number}")
    return begin
