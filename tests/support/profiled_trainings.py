"""Training runs for tests of the profiler: some with one planted fault each, and some healthy ones."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from notebook_accelerate import Accelerator, notebook_launcher, torch_internals
from notebook_accelerate.launch import Run
from tests.support.waiting import until

WIDTH, ROWS, STEPS = 512, 192, 1_000_000
Batch = tuple[torch.Tensor, torch.Tensor]


def mlp(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def batches(rows: int = ROWS) -> Iterator[Batch]:
    """Yield the same batch for every step, so that no step waits for data."""
    batch = torch.randn(rows, 256), torch.randint(0, 10, (rows,))
    for _ in range(STEPS):
        yield batch


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = mlp() if model is None else model
    prepared_ones: tuple[Any, Any] = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return prepared_ones


def step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


# ---- planted faults


class SlowRows(Dataset[Batch]):
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> Batch:
        if os.environ["RANK"] == "1":
            time.sleep(0.001)
        return torch.ones(256), torch.tensor(1)


def slow_loader() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    loader: Any = accelerator.prepare(DataLoader(SlowRows(), batch_size=64))
    for batch in loader:
        step(accelerator, model, optimizer, batch)


def unbalanced_batches() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    for batch in batches(ROWS * 6 if accelerator.process_index == 0 else ROWS):
        step(accelerator, model, optimizer, batch)


def reads_of_values() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, mlp(8))
    total = correct = 0.0
    for batch in batches(2048):
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        for each in losses.detach():
            total += each.item()
            correct += (each < 1.0).item()
        accelerator.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()


class Wavy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(1000):
            x = torch.sin(x) * 1.01 + 0.01
        y: torch.Tensor = self.last(x)
        return y


def small_operations() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, Wavy())
    for batch in batches(8):
        step(accelerator, model, optimizer, batch)


def barriers() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    for batch in batches():
        step(accelerator, model, optimizer, batch)
        accelerator.wait_for_everyone()


def growing_graphs() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    losses = []
    for batch in batches():
        losses.append(step(accelerator, model, optimizer, batch))  # noqa: PERF401 - the planted fault


def growing_sum() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    total_loss: Any = 0.0
    for batch in batches():
        total_loss += step(accelerator, model, optimizer, batch)


def retained_activations() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    activations: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output, name=name: activations.__setitem__(name, output))
    for batch in batches(1024):
        step(accelerator, model, optimizer, batch)


class FullPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y: torch.Tensor = self.layers(x.float())
        return y


def full_precision() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = prepared(accelerator, FullPrecision())
    for batch in batches():
        step(accelerator, model, optimizer, batch)


def logging_storm() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, mlp(128))
    logger = logging.getLogger("storm")
    logger.addHandler(logging.FileHandler(os.devnull))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for batch in batches(64):
        step(accelerator, model, optimizer, batch)
        for name, value in list(model.named_parameters()) * 200:
            logger.info("%s: %s", name, value.shape)


def checkpoint_each_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, mlp(2048))
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches(16):
            step(accelerator, model, optimizer, batch)
            torch.save(model.state_dict(), Path(folder) / "model.pt")


def interpreter_lock() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)

    def count() -> None:
        number = 0
        while True:
            number += 1

    if accelerator.process_index == 1:
        threading.Thread(target=count, name="counter", daemon=True).start()
    for batch in batches():
        step(accelerator, model, optimizer, batch)


def not_compiled() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 256))  # type: ignore[no-untyped-call]
    for batch in batches():
        step(accelerator, model, optimizer, batch)


def slowest_rank() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    for batch in batches():
        if accelerator.process_index == 1:
            time.sleep(0.4)
        step(accelerator, model, optimizer, batch)


def outside_torch() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    for batch in batches():
        step(accelerator, model, optimizer, batch)
        time.sleep(0.4)


PLANTED: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        slow_loader, unbalanced_batches, reads_of_values, small_operations, barriers, growing_graphs, growing_sum,
        retained_activations, full_precision, logging_storm, checkpoint_each_step, interpreter_lock, not_compiled,
        slowest_rank, outside_torch,
    )
}  # fmt: skip


# ---- healthy ones


def with_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    for batch in batches():
        loss = step(accelerator, model, optimizer, batch)
        accelerator.log({"loss": loss.item()})


def plain_torch() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    running = 0.0
    for batch in batches():
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()


def in_bf16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = prepared(accelerator)
    for batch in batches():
        step(accelerator, model, optimizer, batch)


def accumulating() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = prepared(accelerator)
    losses = []
    for batch in batches():
        with accelerator.accumulate(model):
            losses.append(step(accelerator, model, optimizer, batch).detach())


def compiled() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    fast = torch.compile(model, backend="eager")
    for batch in batches():
        step(accelerator, fast, optimizer, batch)


def with_loader() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    model, optimizer = prepared(accelerator, nn.Sequential(*layers, nn.Linear(32 * 14 * 14, 10)))
    data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
    loader: Any = accelerator.prepare(DataLoader(data, batch_size=64, shuffle=True))
    for _ in range(STEPS):
        for batch in loader:
            step(accelerator, model, optimizer, batch)


HEALTHY: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (with_accelerator, plain_torch, in_bf16, accumulating, compiled, with_loader)
}


@contextmanager
def training(function: Callable[[], None], ranks: int = 2) -> Iterator[Run]:
    """Run a training function on ranks that inherit the imports of torch's profiler, and stop the run at the end."""
    torch_internals.import_inductor()
    run = notebook_launcher(function, (), ranks, use_port=0, block=False, panel=False, start_method="fork")
    try:
        until(lambda: run.ended is not None or run._internals.journal.store.step_times(0))
        yield run
    finally:
        run.stop(grace=1.0)
