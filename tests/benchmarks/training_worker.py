"""A rank that measures on command: ``python -m tests.benchmarks.training_worker PACKAGE``, one command per line.

Each answer is a line of JSON. Times are CPU seconds of the rank's main thread where what is compared is its own work,
and seconds on the clock where it waits for others.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 600


def main(package: str) -> None:
    """Answer commands until the end of input."""
    torch.set_num_threads(1)
    accelerator = import_module(package).Accelerator(cpu=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        value = COMMANDS[name](package, accelerator, *arguments)
        print(json.dumps(value), flush=True)


def trimmed(times: list[float]) -> float:
    """Return the mean of the middle 80 %: steps differ inside a window of accumulation, so a median would not do."""
    kept = sorted(times)[len(times) // 10 : -len(times) // 10]
    return statistics.fmean(kept)


def step(package: str, accelerator: Any, window: str) -> float:
    """Return what a training step takes longer through an Accelerator than in plain torch (DDP), in CPU seconds."""
    return _prepared(package, int(window)) - _plain(int(window), accelerator.num_processes)


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), torch.randn(2, 4)


def _plain(window: int, ranks: int) -> float:
    model, optimizer, scheduler, inputs = _parts()
    trained: Any = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    times = []
    for index in range(STEPS):
        begin = time.thread_time()
        closes = (index + 1) % window == 0
        if closes or ranks == 1:
            loss = trained(inputs).sum()
            (loss / window if window > 1 else loss).backward()
        else:
            with trained.no_sync():
                (trained(inputs).sum() / window).backward()
        if closes:
            optimizer.step()
            for _ in range(ranks):
                scheduler.step()
            optimizer.zero_grad()
        times.append(time.thread_time() - begin)
    return trimmed(times)


def _prepared(package: str, window: int) -> float:
    accelerator = import_module(package).Accelerator(cpu=True, gradient_accumulation_steps=window)
    model, optimizer, scheduler, inputs = _parts()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    times = []
    for _ in range(STEPS):
        begin = time.thread_time()
        if window == 1:
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        else:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        times.append(time.thread_time() - begin)
    return trimmed(times)


def loader(_: str, accelerator: Any) -> float:
    """Return what a batch of a prepared loader takes longer than one of the plain loader, in CPU seconds."""
    plain = DataLoader(TensorDataset(torch.randn(4000, 8), torch.zeros(4000)), batch_size=4)
    return _per_batch(accelerator.prepare(plain)) - _per_batch(plain)


def _per_batch(batches: Any) -> float:
    begin = time.thread_time()
    count = sum(1 for _ in batches)
    return (time.thread_time() - begin) / count


def collectives(package: str, accelerator: Any) -> dict[str, float]:
    """Return how long each operation takes for 50 tensors of 64 x 4, and one collective packed by hand, in seconds."""
    operations: Any = import_module(f"{package}.utils")
    data = {f"k{index}": torch.randn(64, 4) for index in range(50)}
    found = {"fused": _median(lambda: _fused(list(data.values()), accelerator.num_processes))}
    for name in ("gather", "reduce", "pad_across_processes", "broadcast"):
        operation = getattr(operations, name)
        found[name] = _median(lambda operation=operation: operation(data))
    return found


def _fused(leaves: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    rows = [torch.empty_like(flat) for _ in range(ranks)]
    torch.distributed.all_gather(rows, flat)
    parts = torch.stack(rows).split([leaf.numel() for leaf in leaves], dim=1)
    return [part.reshape(-1, *leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]


def _median(work: Callable[[], object], repeats: int = 20) -> float:
    torch.distributed.barrier()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


COMMANDS: dict[str, Callable[..., Any]] = {"step": step, "loader": loader, "collectives": collectives}

if __name__ == "__main__":
    main(sys.argv[1])
