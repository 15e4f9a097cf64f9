"""Saving in the background: the files have the state at the time of the call. The pause and memory are measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator
from notebook_accelerate.state import AcceleratorState, GradientState
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
WIDTH, DEPTH, ROWS = gpu.size(2048, 32), gpu.size(12, 3), gpu.size(8192, 16)


class _Training:
    def __init__(self) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=gpu.DRY)
        torch.manual_seed(0)
        raw = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.model, self.optimizer = self.accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=0.05))
        self.batch = gpu.batch(0, ROWS, WIDTH).to(self.accelerator.device)
        self.steps(3)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.accelerator.backward(self.model(self.batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        states: Any = self.optimizer.state
        moments = [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*self.model.parameters(), *moments]


@pytest.fixture
def training() -> _Training:
    return _Training()


def test_a_save_has_the_state_of_the_call(training: _Training, tmp_path: Path, figure: Figure) -> None:
    folder = str(tmp_path / "out")
    begin = time.perf_counter()
    training.accelerator.save_state(folder)
    figure("blocking save", f"{time.perf_counter() - begin:.2f} s")
    for _ in range(gpu.size(6, 2)):
        expected = [tensor.clone() for tensor in training.tensors()]
        gpu.synchronize()
        begin = time.perf_counter()
        training.accelerator.save_state(folder, blocking=False)
        returned = time.perf_counter() - begin
        training.steps(8)
        training.accelerator.load_state(folder)  # load_state waits for the thread that writes.
        assert all(map(torch.equal, training.tensors(), expected))
    nbytes = sum(tensor.nbytes for tensor in training.tensors())
    figure("background save: the call", f"{1000 * returned:.0f} ms for {nbytes >> 20} MiB")


@gpu.only_cuda
def test_a_save_on_another_stream_has_the_state_of_the_call(training: _Training, tmp_path: Path) -> None:
    side: Any = torch.cuda.Stream()
    expected = [tensor.clone() for tensor in training.tensors()]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.accelerator.save_state(str(tmp_path / "out"), blocking=False)
        training.steps(5)
    torch.cuda.current_stream().wait_stream(side)
    training.accelerator.load_state(str(tmp_path / "out"))
    assert all(map(torch.equal, training.tensors(), expected))
