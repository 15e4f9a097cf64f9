"""Other calls of the training API: preparing, clipping, printing, objects, metrics, dispatching and small tensors."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.bench import REPEATS, Figure, alternate, compared, row
from benchmarks.training import HERE, PEER, loader, timer
from tests.support.ranks import run_ranks


def accelerators(**options: Any) -> list[Any]:
    """Return one Accelerator of this package and one of Accelerate."""
    return [import_module(name).Accelerator(cpu=True, **options) for name in (HERE, PEER)]


@row("training", "preparing")
def preparing() -> Iterator[Figure]:
    """Measure `prepare` with a model of 1,000 modules and its optimizer."""
    here, peer = run_ranks(time_preparing, world_size=1)[0]
    yield compared("prepare of a model of 1,000 modules", here, peer, unit="ms", scale=1e3, ratio=1.0)


def time_preparing() -> list[list[float]]:
    """Return the duration in seconds of a call on a rank, for each side."""
    import torch

    def side(accelerator: Any) -> Callable[[], float]:
        def measure() -> float:
            model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(500)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            taken = timer(lambda: accelerator.prepare(model, optimizer), 1)()
            accelerator.free_memory()
            return taken

        return measure

    return alternate(REPEATS, *(side(accelerator) for accelerator in accelerators()))


@row("training", "clipping")
def clipping() -> Iterator[Figure]:
    """Measure `clip_grad_norm_` of 200 gradients."""
    plain, here, peer = run_ranks(time_clipping, world_size=1)[0]
    note = f"torch's own function takes {sorted(plain)[len(plain) // 2] * 1e6:.0f} µs"
    yield compared("clip_grad_norm_ of 200 gradients", here, peer, unit="µs", scale=1e6, ratio=1.0, note=note)


def time_clipping() -> list[list[float]]:
    """Return the duration in seconds of a call on a rank, for each side (torch, here, peer)."""
    import torch

    parameters = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    clips = [torch.nn.utils.clip_grad_norm_, *(accelerator.clip_grad_norm_ for accelerator in accelerators())]
    return alternate(2 * REPEATS, *(timer(lambda clip=clip: clip(parameters, 1.0), 20) for clip in clips))  # type: ignore[misc]


@row("training", "printing on the main process")
def printing_once() -> Iterator[Figure]:
    """Measure `accelerator.print` and a loop with `tqdm`, whose output is discarded."""
    printed, bars = run_ranks(time_printing, world_size=1)[0]
    yield compared("accelerator.print of a line", *printed, unit="µs", scale=1e6, ratio=1.0)
    yield compared("tqdm: one step of a progress bar", *bars, unit="µs", scale=1e6, ratio=1.0)


def time_printing() -> list[list[list[float]]]:
    """Return the seconds per line and per step of a progress bar, each for both sides."""
    sides = accelerators()
    utils = [import_module(f"{name}.utils") for name in (HERE, PEER)]

    def bar(module: Any) -> float:
        begin = time.perf_counter()
        for _ in module.tqdm(range(2000), file=io.StringIO()):
            pass
        return (time.perf_counter() - begin) / 2000

    with contextlib.redirect_stdout(io.StringIO()):
        lines = alternate(REPEATS, *(timer(lambda a=side: a.print("loss", 0.25), 500) for side in sides))  # type: ignore[misc]
    return [lines, alternate(REPEATS, *(lambda module=module: bar(module) for module in utils))]


@row("training", "objects")
def objects() -> Iterator[Figure]:
    """Measure `gather_object` of 10,000 small objects from each of two ranks."""
    here, peer = run_ranks(time_objects, world_size=2, process_group=True)[0]
    yield compared("gather_object of 10,000 dicts per rank", here, peer, unit="ms", scale=1e3, ratio=1.0)


def time_objects() -> list[list[float]]:
    """Return the duration in seconds of a call on a rank, for each side."""
    accelerators()
    values = [{"id": index, "text": f"sample {index}"} for index in range(10_000)]
    utils = [import_module(f"{name}.utils") for name in (HERE, PEER)]
    return alternate(REPEATS, *(timer(lambda m=module: m.gather_object(values), 1) for module in utils))  # type: ignore[misc]


@row("training", "metrics")
def metrics() -> Iterator[Figure]:
    """Measure `gather_for_metrics` of predictions and labels after every batch, on two ranks."""
    here, peer = run_ranks(time_metrics, world_size=2, process_group=True)[0]
    yield compared("an evaluation step with gather_for_metrics", here, peer, unit="µs", scale=1e6, ratio=0.5)


def time_metrics() -> list[list[float]]:
    """Return the seconds per batch of an evaluation on a rank, for each side."""
    import torch

    def side(accelerator: Any) -> Callable[[], float]:
        prepared = accelerator.prepare(loader(802))

        def measure() -> float:
            begin, batches = time.perf_counter(), 0
            with torch.no_grad():
                for batch in prepared:
                    accelerator.gather_for_metrics((batch["x"] * 2, batch["y"]))
                    batches += 1
            return (time.perf_counter() - begin) / batches

        return measure

    return alternate(REPEATS, *(side(accelerator) for accelerator in accelerators()))


@row("training", "dispatching")
def dispatching() -> Iterator[Figure]:
    """Measure a batch that the main process reads and sends to two ranks, compared with the peer and with shards."""
    dispatched, sharded, peer = run_ranks(time_dispatching, world_size=2, process_group=True)[0]
    yield compared("a dispatched batch", dispatched, peer, unit="µs", scale=1e6, ratio=1.0)
    yield compared("a dispatched batch, relative to a sharded one", dispatched, sharded, unit="µs", scale=1e6)


def time_dispatching() -> list[list[float]]:
    """Return the seconds per batch on a rank: dispatched here, sharded here, and dispatched by the peer."""

    def side(package: str, dispatch: bool) -> Callable[[], float]:
        module = import_module(package)
        options = module.utils.DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=False)
        prepared = module.Accelerator(cpu=True, dataloader_config=options).prepare(loader(1600))

        def measure() -> float:
            begin, batches = time.perf_counter(), 0
            for _ in prepared:
                batches += 1
            return (time.perf_counter() - begin) / batches

        return measure

    return alternate(REPEATS, side(HERE, dispatch=True), side(HERE, dispatch=False), side(PEER, dispatch=True))


@row("training", "small tensors")
def small_tensors() -> Iterator[Figure]:
    """Measure `save_state` and `load_state` of 10,000 small tensors."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        saves, loads = run_ranks(time_small_tensors, folder, world_size=1, timeout=1200.0)[0]
    yield compared("save_state of 10,000 tensors of 64 numbers", *saves, unit="ms", scale=1e3, ratio=1.0)
    yield compared("load_state of 10,000 tensors of 64 numbers", *loads, unit="ms", scale=1e3, ratio=1.0)


def time_small_tensors(folder: str) -> list[list[list[float]]]:
    """Return how many seconds saving and loading take, each for both sides. The disk is idle before each save."""
    import torch

    saves, loads = [], []
    for name, accelerator in zip((HERE, PEER), accelerators(), strict=True):
        accelerator.prepare_model(torch.nn.ParameterList([torch.ones(64) for _ in range(10_000)]))
        target = str(Path(folder) / name)

        def save(accelerator: Any = accelerator, target: str = target) -> float:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()  # Flush the other side's files, so that this save does not wait for them.
            return timer(lambda: accelerator.save_state(target), 1)()

        saves.append(save)
        loads.append(timer(lambda a=accelerator, t=target: a.load_state(t), 1))  # type: ignore[misc]
    return [alternate(REPEATS, *saves), alternate(REPEATS, *loads)]
