"""Debugging: what it costs a training step while nobody uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.benchmarks.bench import REPEATS, Figure, alternate, compared, row

STEPS, BLOCKS = 100, 5


@row("debugging", "unused")
def unused() -> Iterator[Figure]:
    """A step of a launched run with flight recorder, agent and checks, against the same with all of them off."""
    on, off = alternate(REPEATS, lambda: launched(quiet=False), lambda: launched(quiet=True))
    yield compared(
        "a step, 2 ranks, DDP: recorder, agent and checks on",
        on,
        off,
        unit="µs",
        scale=1e6,
        ratio=1.02,
        note="peer: the same run with all three off",
    )
    yield compared(
        "checks of a step: the loss, and the optimizer's hooks",
        [checks() for _ in range(5)],
        unit="µs",
        scale=1e6,
        limit=5,
    )


def launched(*, quiet: bool) -> float:
    """Return the seconds per step of rank 0 in a run of two ranks."""
    import_module("torch._dynamo")  # an optimizer's first step would import it in each rank
    from notebook_accelerate import notebook_launcher
    from notebook_accelerate.debug import flight

    off = dict.fromkeys(flight.environment(), "0")
    run: Any = notebook_launcher(
        train,
        (quiet,),
        num_processes=2,
        use_port=0,
        start_method="fork",
        panel=False,
        env={"ACCELERATE_USE_CPU": "1", **(off if quiet else {})},
    )
    return float(run.results[0])


def train(quiet: bool) -> float:
    """In a rank: train a small model; return the seconds per step of the fastest block of steps."""
    import torch

    from notebook_accelerate import Accelerator
    from notebook_accelerate.debug import agent

    torch.manual_seed(0)
    accelerator = Accelerator()
    if quiet:
        accelerator._checks.active = False
        host: Any = agent.current()
        host._ticks.clear()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch, target = torch.randn(64, 64), torch.randn(64, 8)
    found = []
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
        found.append((time.perf_counter() - begin) / STEPS)
    return min(found)


def checks() -> float:
    """Return the seconds that the checks of one step take by themselves."""
    import torch

    from notebook_accelerate.debug.checks import Checks

    watched = Checks(several=False)
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
