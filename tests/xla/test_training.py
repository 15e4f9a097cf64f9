"""Training on an XLA device gives the same numbers as plain torch, and files that load everywhere."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate import Accelerator
from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.utils import set_seed

pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-xla", exc_type=ImportError)
pytestmark = pytest.mark.xla
BATCHES = 6


def parts() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(4 * BATCHES, 4), torch.randint(0, 3, (4 * BATCHES,)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return model, optimizer, DataLoader(data, batch_size=4), scheduler


def train(accumulation: int, accelerator: Accelerator | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, loader, scheduler = parts()
    if accelerator is not None:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for index, (inputs, labels) in enumerate(loader):
        last = (index + 1) % accumulation == 0
        if accelerator is None:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / accumulation).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            continue
        assert inputs.device.type == "xla"
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                assert accelerator.gradient_state.is_xla_gradients_synced
            optimizer.step()
            assert not (last and accelerator.gradient_state.is_xla_gradients_synced)
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return losses, state


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_weights_equal_plain_torch(accumulation: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    assert accelerator.distributed_type.value == "XLA"
    assert accelerator.strategy.name == "xla"
    losses, state = train(accumulation, accelerator)
    expected, weights = train(accumulation, None)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        assert state[name].device.type == "cpu"
        torch.testing.assert_close(state[name], weight, rtol=1e-4, atol=1e-6)


def test_checkpoints_and_saved_models_restore_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for inputs, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.save_model(model, tmp_path / "model")
    before = {name: weight.clone() for name, weight in accelerator.get_state_dict(model).items()}
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in before.items():
        assert torch.equal(saved[name], weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rate = scheduler.get_last_lr()
    scheduler.step()
    accelerator.load_state(tmp_path / "checkpoint")
    assert scheduler.get_last_lr() == rate
    for name, weight in accelerator.get_state_dict(model).items():
        assert torch.equal(weight, before[name])


def test_reductions_of_one_replica_are_its_values() -> None:
    accelerator = Accelerator()
    ours = COMMUNICATORS["xla"]  # A single process does not need its communicator.
    values = torch.tensor([3.0, -2.0], device=accelerator.device)
    assert ours.all_reduce(values.clone(), maximum=True).tolist() == [3.0, -2.0]
    assert ours.all_reduce(values.clone()).tolist() == [3.0, -2.0]
    assert accelerator.reduce(values, "max").tolist() == [3.0, -2.0]
    assert accelerator.gather(values).tolist() == [3.0, -2.0]


def test_bf16_computes_in_bf16_and_follows_float32() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model, _, loader, _ = accelerator.prepare(*parts())
    inner: list[torch.dtype] = []
    handle = model[0].register_forward_hook(lambda *call: inner.append(call[2].dtype))
    inputs, _ = next(iter(loader))
    assert model(inputs).dtype == torch.float32
    assert inner == [torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    handle.remove()
    accelerator.free_memory()
    losses, state = train(1, accelerator)
    expected, weights = train(1, None)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != pytest.approx(expected, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=0.1)


def test_random_numbers_continue_after_resuming(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Dropout(0.5))
    ones = torch.ones(4, 64, device=accelerator.device)

    def draw() -> list[Any]:
        return [model(ones).cpu().tolist(), torch.rand(3, device=accelerator.device).cpu().tolist(),
                torch.rand(3).tolist(), random.random()]  # fmt: skip

    set_seed(5)
    draw()
    accelerator.save_state(tmp_path / "checkpoint")
    expected = draw()
    assert draw() != expected
    accelerator.load_state(tmp_path / "checkpoint")
    assert draw() == expected


SEVERAL_DEVICES = """
import json, sys
sys.path.insert(0, {root!r})
from tests.xla.test_training import train
from notebook_accelerate import Accelerator
from torch_xla import runtime
accelerator = Accelerator()
losses, _ = train(1, accelerator)
print("RESULT", json.dumps([losses, runtime.is_spmd(), runtime.global_runtime_device_count()]))
"""


NOT_JOINED = """
import sys
sys.path.insert(0, {root!r})
from notebook_accelerate import Accelerator
try:
    Accelerator()
except RuntimeError as error:
    print("RESULT", error)
"""


def test_processes_that_the_runtime_does_not_connect_raise() -> None:
    """On the CPU, a process's runtime knows only that process, so collectives would do nothing."""
    root = str(Path(__file__).resolve().parents[2])
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", NOT_JOINED.format(root=root)],
        env={**os.environ, **world, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks were started, but torch_xla's runtime (PJRT_DEVICE=CPU) has connected 1" in done.stdout
    assert "num_processes=1" in done.stdout


def test_a_single_process_uses_all_its_devices() -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_DEVICES.format(root=root)],
        env={**os.environ, "CPU_NUM_DEVICES": "4", "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses, spmd, devices = json.loads(done.stdout.rpartition("RESULT")[2])
    assert (spmd, devices) == (True, 4)
    assert losses == pytest.approx(train(1, None)[0], rel=1e-5)
