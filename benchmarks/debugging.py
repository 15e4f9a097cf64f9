"""Debugging: what it costs a training step when it is not in use, and how long its answers take."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

from benchmarks.bench import REPEATS, Figure, compared, row
from tests.support.kernel import Kernel

STEPS, BLOCKS = 10, 60
SIZES = {"1 ms": (64, 256, 64), "10 ms": (256, 1024, 128)}
"""The widths of the input and of the hidden layer, and the batch size, by a step's approximate duration on one core."""


@row("debugging", "unused")
def unused() -> Iterator[Figure]:
    """Measure a step with and without the agent and checks, the flight recorder, and access by other processes."""
    for name, size in SIZES.items():
        found, without = launched(size, recorder=True), launched(size, recorder=False)
        for clock, what in enumerate(("wall clock", "CPU time")):
            on, off = ([pair[side][clock] for pair in found] for side in (0, 1))
            yield compared(
                f"a step of {name}, 2 ranks, DDP: agent and checks on, {what}",
                on,
                off,
                unit="µs",
                scale=1e6,
                ratio=1.02 if name == "10 ms" else None,
                note="the peer is the blocks of steps in between, with both off",
            )
        on, off = ([pair[1][1] for pair in pairs] for pairs in (found, without))
        yield compared(f"a step of {name}: flight recorder on, CPU time", on, off, unit="µs", scale=1e6)
    yes, no = zip(*((served("yes"), served("no")) for _ in range(6)), strict=True)
    for clock, what in enumerate(("a step of 1 ms, wall clock", "CPU time of the kernel for each step")):
        on, off = ([each[clock] for each in side] for side in (yes, no))
        note = "the peer is NOTEBOOK_ACCELERATE_SERVE=no"
        yield compared(f"other processes can attach: {what}", on, off, unit="µs", scale=1e6, note=note)
    alone = [checks() for _ in range(5)]
    yield compared("checks of one step: the loss and the optimizer's hooks", alone, unit="µs", scale=1e6, limit=5)


STUCK = """
import ctypes, os, time, torch, torch.distributed as dist
from notebook_accelerate import notebook_launcher

def skips():
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        time.sleep(600)
    dist.all_reduce(torch.ones(4))

def in_native_code():
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    dist.all_reduce(torch.ones(4))
"""


@row("debugging", "diagnose")
def diagnose() -> Iterator[Figure]:
    """Measure the diagnosis of a stuck run, in which a rank waits for another that sleeps or holds the GIL in C."""
    for function, what in (("skips", "one asleep in Python"), ("in_native_code", "one holding the GIL in C")):
        with Kernel() as kernel:
            kernel.check(STUCK, timeout=60)
            kernel.check(f"run = notebook_launcher({function}, num_processes=2, use_port=0, block=False, panel=False)")
            kernel.check(
                "while 'never reached all_reduce' not in run.diagnose().verdict:\n    time.sleep(0.2)", timeout=120
            )
            ask = "(begin := time.monotonic(), run.diagnose(), time.monotonic() - begin)[2]"
            assert kernel.value("run.status") == "running"
            took = [float(kernel.value(ask, timeout=60)) for _ in range(REPEATS)]
            kernel.check("run.stop(0.5)", timeout=60)
        yield compared(f"run.diagnose() of 2 stuck ranks, {what}", took, unit="s", limit=2)


def launched(size: tuple[int, int, int], *, recorder: bool) -> list[list[list[float]]]:
    """Launch `train` on two ranks, and return the measurements of rank 0."""
    import_module("torch._dynamo")  # Otherwise, the first step of an optimizer would import this in each rank.

    from notebook_accelerate import notebook_launcher
    from notebook_accelerate.launch.supervisor.rank_group import watched_rank_variables

    off = dict.fromkeys(watched_rank_variables(), "0")
    run: Any = notebook_launcher(
        train,
        (size,),
        num_processes=2,
        use_port=0,
        start_method="fork",
        panel=False,
        env={"ACCELERATE_USE_CPU": "1", **({} if recorder else off)},
    )
    found: list[list[list[float]]] = run.results[0]
    return found


def served(serve: str) -> tuple[float, float]:
    """Launch `train`. Return the median duration of a step, and the kernel's CPU time for each step, in seconds."""
    with mock.patch.dict(os.environ, NOTEBOOK_ACCELERATE_SERVE=serve):
        begin = time.process_time()
        found = launched(SIZES["1 ms"], recorder=True)
        kernel = time.process_time() - begin
    return statistics.median(on[0] for on, _ in found), kernel / (2 * BLOCKS * STEPS)


def train(size: tuple[int, int, int]) -> list[list[list[float]]]:
    """Train a model on one rank. Return (on, off) pairs of blocks, each as the wall and CPU seconds of a step."""
    import torch

    from notebook_accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator()
    thread: Any = next(thread for thread in threading.enumerate() if thread.name == "notebook-accelerate-agent")
    agent = thread._target.__self__
    ticks = list(agent._ticks)
    width, hidden, samples = size
    model = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch, target = torch.randn(samples, width), torch.randn(samples, 8)

    def block(active: bool) -> list[float]:
        accelerator._checks.active = active
        agent._ticks[:] = ticks if active else []
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
        return [(time.perf_counter() - wall) / STEPS, (time.process_time() - processor) / STEPS]

    block(active=True)
    # Neighbouring blocks see the same load of the machine. Alternate their order, so that neither side is always first.
    turns = [(True, False), (False, True)] * (BLOCKS // 2)
    pairs = [{active: block(active) for active in turn} for turn in turns]
    return [[pair[True], pair[False]] for pair in pairs]


def checks() -> float:
    """Return how many seconds the checks alone take in one step."""
    import torch

    from notebook_accelerate.worker.sanity_facts import SanityFacts

    watched = SanityFacts(several=False)
    watched.active = True
    loss = torch.tensor(1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    watched._optimizers = [optimizer]
    count = 20_000
    begin = time.perf_counter()
    for _ in range(count):
        watched.loss(loss)
        watched._on_step(optimizer, (), {})
        watched._on_any_step(optimizer, (), {})
    return (time.perf_counter() - begin) / count
