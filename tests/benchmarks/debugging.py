"""Debugging: what it costs a training step while nobody uses it, and how long an answer takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from tests.benchmarks.bench import REPEATS, Figure, alternate, compared, row
from tests.support.kernel import Kernel

STEPS, BLOCKS = 10, 25
SIZES = {"1 ms": (64, 256, 64), "10 ms": (256, 1024, 128)}
"""Width of the input, of the hidden layer, and samples in a batch, by about how long a step takes on one core."""


@row("debugging", "unused")
def unused() -> Iterator[Figure]:
    """A step of a launched run with flight recorder, agent and checks, against the same with all of them off."""
    for name, size in SIZES.items():
        on, off = alternate(REPEATS // 2, partial(launched, size, quiet=False), partial(launched, size, quiet=True))
        yield compared(
            f"a step of {name}, 2 ranks, DDP: recorder, agent and checks on",
            on,
            off,
            unit="µs",
            scale=1e6,
            ratio=1.02 if name == "10 ms" else None,
            note="peer: the same run with all three off",
        )
    alone = [checks() for _ in range(5)]
    yield compared("checks of a step: the loss, and the optimizer's hooks", alone, unit="µs", scale=1e6, limit=5)


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
    """Ask a run that stands still why: one rank waits for another, which sleeps, or holds the interpreter in C."""
    for function, what in (("skips", "one in Python"), ("in_native_code", "one holds the interpreter in C")):
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
        yield compared(f"run.diagnose() of 2 ranks, {what}", took, unit="s", limit=2)


def launched(size: tuple[int, int, int], *, quiet: bool) -> float:
    """Return the seconds per step of rank 0 in a run of two ranks."""
    import_module("torch._dynamo")  # an optimizer's first step would import it in each rank

    from notebook_accelerate import notebook_launcher
    from notebook_accelerate.hardware import torch_build

    off = dict.fromkeys(torch_build.flight_recorder_variables(), "0")
    run: Any = notebook_launcher(
        train,
        (size, quiet),
        num_processes=2,
        use_port=0,
        start_method="fork",
        panel=False,
        env={"ACCELERATE_USE_CPU": "1", **(off if quiet else {})},
    )
    return float(run.results[0])


def train(size: tuple[int, int, int], quiet: bool) -> float:
    """In a rank: train a model; return the seconds per step of the fastest tenth of the blocks of steps."""
    import torch

    from notebook_accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator()
    if quiet:
        accelerator._checks.active = False
        agent: Any = next(thread for thread in threading.enumerate() if thread.name == "notebook-accelerate-agent")
        agent._target.__self__._ticks.clear()
    width, hidden, samples = size
    model = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch, target = torch.randn(samples, width), torch.randn(samples, 8)
    found = []
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
        found.append((time.perf_counter() - begin) / STEPS)
    return sorted(found)[BLOCKS // 10]


def checks() -> float:
    """Return the seconds that the checks of one step take by themselves."""
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
