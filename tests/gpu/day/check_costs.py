"""The cost of a step in plain torch, in Accelerate, and in this package outside and inside a launched rank."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

import pytest
import torch

from notebook_accelerate import notebook_launcher
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
SHAPES = {"4 layers of 64": (64, 4, 16), "8 layers of 1024": (gpu.size(1024, 64), 8, gpu.size(2048, 16))}
PRECISIONS = ("no", "bf16") if gpu.DRY else ("no", "bf16", "fp16")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS, TURNS = gpu.size(100, 5), 2
SIDES = ["torch", *(["accelerate"] if importlib.util.find_spec("accelerate") else []), "notebook_accelerate"]


def _plain(model: torch.nn.Module, optimizer: Any, precision: str, batch: torch.Tensor) -> None:
    with torch.autocast(gpu.DEVICE, TYPES.get(precision), enabled=precision in TYPES):
        output = model(batch)
    output.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _prepared(accelerator: Any, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def measure(package: str, precision: str, shape: str) -> float:
    """Return the median duration of a step in microseconds."""
    width, depth, rows = SHAPES[shape]
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    batch = gpu.batch(0, rows, width).to(gpu.DEVICE)
    accelerator: Any = None
    if package == "torch":
        model.to(gpu.DEVICE)
    else:
        state = import_module(f"{package}.state")
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        accelerator = import_module(package).Accelerator(cpu=gpu.DRY, mixed_precision=precision)
        model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for turn in range(6):
        gpu.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            if accelerator is None:
                _plain(model, optimizer, precision, batch)
            else:
                _prepared(accelerator, model, optimizer, batch)
        gpu.synchronize()
        found += [1e6 * (time.perf_counter() - begin) / STEPS] * (turn > 0)
    return statistics.median(found)


def measure_all(package: str) -> dict[str, float]:
    """Return the figures of one package in all cases."""
    return {f"{precision}, {shape}": measure(package, precision, shape) for precision in PRECISIONS for shape in SHAPES}


def test_the_cost_of_a_step_is_near_plain_torch(figure: Figure) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(TURNS):
        for side in (*SIDES, "a launched rank"):
            if side == "a launched rank":
                options: Any = {"num_processes": 1, "timeout": 90, "use_port": 0}
                found = notebook_launcher(measure_all, ("notebook_accelerate",), **options).results[0]
            else:
                command = [sys.executable, "-m", "tests.gpu.day.check_costs", side]
                done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
                found = json.loads(done.stdout.strip().splitlines()[-1])
            for name, value in found.items():
                rows.setdefault(name, {}).setdefault(side, []).append(value)
    for name, row in rows.items():
        text = ", ".join(f"{side} {min(values):.0f}" for side, values in row.items())
        figure(f"µs of a step: {name}", text)
        assert min(row["notebook_accelerate"]) < 5 * min(row["torch"]), (
            "this indicates a wrong code path, not a difference of microseconds"
        )


if __name__ == "__main__":
    print(json.dumps(measure_all(sys.argv[1])))
