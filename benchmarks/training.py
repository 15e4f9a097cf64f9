"""Training: the overhead of this package and of Accelerate, compared with plain torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.bench import REPEATS, Figure, alternate, compared, row
from tests.support.ranks import run_ranks

HERE, PEER = "notebook_accelerate", "accelerate"
Step = Callable[[], object]


# ---- steps


@row("training", "step")
def step_overhead() -> Iterator[Figure]:
    """Measure a training step of a tiny model, relative to the same step in plain torch."""
    for ranks, count in ((1, 300), (2, 150)):
        for accumulation in (1, 4):
            plain, here, peer = run_ranks(time_steps, accumulation, count, world_size=ranks, process_group=ranks > 1)[0]
            what = f"{ranks} rank{'s, DDP' if ranks > 1 else ''}, accumulation {accumulation}"
            step = sorted(plain)[len(plain) // 2] * 1e6
            yield compared(
                f"a step of a tiny model, {what}: overhead",
                [a - b for a, b in zip(here, plain, strict=True)],
                [a - b for a, b in zip(peer, plain, strict=True)],
                unit="µs",
                scale=1e6,
                ratio=0.3,
                note=f"the plain step took {step:.0f} µs",
            )


def time_steps(accumulation: int, count: int) -> list[list[float]]:
    """Return the seconds per step on a rank, for each side (plain, here, peer) and round."""
    sides = plain_step(accumulation), prepared_step(HERE, accumulation), prepared_step(PEER, accumulation)
    return alternate(2 * REPEATS, *(timer(step, count) for step in sides))


def timer(step: Step, count: int) -> Callable[[], float]:
    """Return a function that runs `count` steps and returns the seconds per step."""
    import torch.distributed as dist

    def measure() -> float:
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    return measure


def parts() -> tuple[Any, Any, Any, Any, Any]:
    """Return a tiny model, its optimizer and schedule, and a batch."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return model, optimizer, schedule, torch.randn(4, 8), torch.randn(4, 4)


def plain_step(accumulation: int) -> Step:
    """Return a training step in plain torch, with DDP if there is a process group."""
    import torch
    import torch.distributed as dist

    model, optimizer, schedule, x, y = parts()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else None
    forward, done = wrapped or model, 0

    def step() -> None:
        nonlocal done
        done += 1
        sync = done % accumulation == 0
        with nullcontext() if sync or wrapped is None else wrapped.no_sync():
            loss = torch.nn.functional.mse_loss(forward(x), y)
            (loss / accumulation if accumulation > 1 else loss).backward()
        if sync:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return step


def prepared_step(package: str, accumulation: int) -> Step:
    """Return a training step that is written as the package's documentation recommends."""
    import torch

    accelerator = import_module(package).Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer, schedule, x, y = parts()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def update() -> None:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def accumulating() -> None:
        with accelerator.accumulate(model):
            update()

    return accumulating if accumulation > 1 else update


# ---- loaders


@row("training", "loader")
def loader_overhead() -> Iterator[Figure]:
    """Measure the iteration over a prepared loader, relative to the plain loader."""
    for ranks in (1, 2):
        plain, here, peer = run_ranks(time_loaders, world_size=ranks, process_group=ranks > 1)[0]
        yield compared(
            f"a batch of a plain loader, {ranks} rank{'s' * (ranks > 1)}: overhead",
            [a - b for a, b in zip(here, plain, strict=True)],
            [a - b for a, b in zip(peer, plain, strict=True)],
            unit="µs",
            scale=1e6,
            ratio=0.3,
            note=f"a batch of the plain loader took {sorted(plain)[len(plain) // 2] * 1e6:.0f} µs",
        )


class Samples:
    """A dataset whose samples cost almost nothing to read."""

    def __init__(self, length: int) -> None:
        import torch

        self.length, self.sample = length, {"x": torch.ones(8), "y": torch.ones(2)}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample


def loader(length: int) -> Any:
    """Return a loader of batches of four samples."""
    from torch.utils.data import DataLoader

    return DataLoader(Samples(length), batch_size=4)  # type: ignore[arg-type]


def time_loaders() -> list[list[float]]:
    """Return the seconds per batch on a rank, for each side and round. All sides yield the same number of batches."""
    from torch import distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sides = [
        loader(2000),
        *(import_module(name).Accelerator(cpu=True).prepare(loader(2000 * ranks)) for name in (HERE, PEER)),
    ]

    def measure(side: Any) -> float:
        begin, batches = time.perf_counter(), 0
        for _ in side:
            batches += 1
        assert batches == 500, batches
        return (time.perf_counter() - begin) / batches

    return alternate(2 * REPEATS, *(lambda side=side: measure(side) for side in sides))


@row("training", "skipping")
def skipping() -> Iterator[Figure]:
    """Measure the time until the first batch after skipping 100,000 batches, relative to skipping 10."""
    here, peer = run_ranks(time_skips, world_size=1)[0]
    many, few = sorted(here[1])[len(here[1]) // 2], sorted(here[0])[len(here[0]) // 2]
    peer_many, peer_few = sorted(peer[1])[len(peer[1]) // 2], sorted(peer[0])[len(peer[0]) // 2]
    yield Figure(
        what="skip_first_batches: 100,000 batches relative to 10",
        unit="×",
        ours=many / few,
        peer=peer_many / peer_few,
        goal="≤ 2",
        met=many <= 2 * few,
        note=f"here {few * 1e3:.2f} and {many * 1e3:.2f} ms, peer {peer_few * 1e3:.2f} and {peer_many * 1e3:.2f} ms",
    )


def time_skips() -> list[list[list[float]]]:
    """Return the seconds until a rank's first batch, for each package and number of skipped batches (10, 100,000)."""
    found = []
    for name in (HERE, PEER):
        package = import_module(name)
        prepared = package.Accelerator(cpu=True).prepare(loader(401_000))

        def measure(count: int, package: Any = package, prepared: Any = prepared) -> float:
            begin = time.perf_counter()
            next(iter(package.skip_first_batches(prepared, count)))
            return time.perf_counter() - begin

        found.append(alternate(REPEATS, lambda run=measure: run(10), lambda run=measure: run(100_000)))  # type: ignore[misc]
    return found


# ---- collectives


@row("training", "collectives")
def collectives() -> Iterator[Figure]:
    """Measure collectives of a dict of 50 tensors of shape 64 × 4, relative to one collective of the same size."""
    for name, (fused, here, peer) in run_ranks(time_collectives, world_size=2, process_group=True)[0].items():
        base = sorted(fused)[len(fused) // 2]
        yield compared(
            f"{name} of 50 tensors, relative to one fused collective",
            [value / base for value in here],
            [value / base for value in peer],
            unit="×",
            limit=1.2,
            note=f"the fused collective took {base * 1e6:.0f} µs",
        )


def time_collectives() -> dict[str, list[list[float]]]:
    """Return the seconds per operation on a rank, for each side (one plain collective, here, peer)."""
    import torch
    import torch.distributed as dist

    tree = {f"tensor {index}": torch.randn(64, 4) for index in range(50)}
    uneven = {name: tensor[: 60 + dist.get_rank()] for name, tensor in tree.items()}
    flat = torch.cat([tensor.flatten() for tensor in tree.values()])
    halves = [torch.empty_like(flat) for _ in range(2)]
    sizes = torch.zeros(100, dtype=torch.long)
    all_sizes = [torch.empty_like(sizes) for _ in range(2)]
    plain: dict[str, Step] = {
        "gather": lambda: dist.all_gather(halves, flat),
        "reduce": lambda: dist.all_reduce(flat),
        "broadcast": lambda: dist.broadcast(flat, 0),
        "pad_across_processes": lambda: dist.all_gather(all_sizes, sizes),
    }
    for name in (HERE, PEER):
        import_module(name).Accelerator(cpu=True)
    utils = [import_module(f"{name}.utils") for name in (HERE, PEER)]
    found = {}
    for name, collective in plain.items():
        value = uneven if name.startswith("pad") else tree
        sides = [collective, *(lambda m=module, n=name, v=value: getattr(m, n)(v) for module in utils)]  # type: ignore[misc]
        found[name] = alternate(2 * REPEATS, *(timer(side, 20) for side in sides))
    return found


# ---- checkpoints


@row("training", "saving")
def saving() -> Iterator[Figure]:
    """Measure how long a checkpoint of 1 GB blocks a training loop."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        here, peer = run_ranks(time_saves, folder, world_size=1, timeout=1200.0)[0]
    yield compared("save_state of 1 GB: here with blocking=False", here, peer, unit="s", ratio=0.2)


def time_saves(folder: str) -> list[list[float]]:
    """Return the time of each side's `save_state`, here with `blocking=False`. The disk is idle before each save."""
    import os

    import torch

    model = torch.nn.ParameterList([torch.ones(16, 1 << 20) for _ in range(16)])
    sides = []
    for name, options in ((HERE, {"blocking": False}), (PEER, {})):
        accelerator = import_module(name).Accelerator(cpu=True)
        accelerator.prepare_model(model)
        target = str(Path(folder) / name)

        def measure(save: Any = accelerator.save_state, target: str = target, options: Any = options) -> float:
            begin = time.perf_counter()
            save(target, **options)
            taken = time.perf_counter() - begin
            import_module(f"{HERE}.checkpointing").wait_for_saves("the benchmark")
            os.sync()
            return taken

        sides.append(measure)
    return alternate(REPEATS, *sides)


# ---- the import


@row("training", "import")
def imports() -> Iterator[Figure]:
    """Measure the import of Accelerator in an interpreter that has already imported torch."""
    here, peer = alternate(REPEATS, lambda: import_seconds(HERE), lambda: import_seconds(PEER))
    yield compared("from … import Accelerator, with torch already imported", here, peer, unit="s", ratio=1.0)


def import_seconds(package: str) -> float:
    """Return how many seconds the import takes in a new interpreter that has already imported torch."""
    code = (
        "import time, torch; begin = time.perf_counter()\n"
        f"from {package} import Accelerator\nprint(time.perf_counter() - begin)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
