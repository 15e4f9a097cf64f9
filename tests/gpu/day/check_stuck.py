"""A rank whose main thread waits for its device: it is seen, diagnosed, asked, stopped and killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from notebook_accelerate import Accelerator, notebook_launcher
from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.launch import Run
from tests.support import gpu
from tests.support.gpu import Figure

pytestmark = pytest.mark.gpu
SECONDS = gpu.size(45, 20)


def _wait_for_device() -> str:
    accelerator = Accelerator(cpu=gpu.DRY)
    tensor = torch.ones(3, device=accelerator.device)
    if gpu.DRY:
        time.sleep(SECONDS)
    else:
        torch.cuda._sleep(int(1.7e9 * SECONDS))
        torch.cuda.synchronize()
    return f"the wait ended by itself: {tensor.sum().item()}"


def _launch(**options: float) -> Run:
    run = notebook_launcher(_wait_for_device, num_processes=1, use_port=0, block=False, **options)
    assert isinstance(run, Run)
    return run


@pytest.fixture
def waiting() -> Iterator[Run]:
    """Return a run whose rank waits."""
    run = _launch(timeout=90)
    time.sleep(gpu.size(7, 5))
    yield run
    run.stop(grace=1.0)
    run.wait(20)


def test_hang_timeout_ends_it() -> None:
    begin = time.monotonic()
    run = _launch(hang_timeout=6)
    run.wait(SECONDS - 5)
    assert isinstance(run.error, RunTimeoutError), "a rank that waits for the device counts as moving"
    assert "hang_timeout" in str(run.error)
    assert time.monotonic() - begin < SECONDS - 5


def test_it_is_diagnosed(waiting: Run, figure: Figure) -> None:
    begin = time.perf_counter()
    found = waiting.diagnose()
    figure("diagnosis of a waiting rank", f"{time.perf_counter() - begin:.2f} s")
    assert "all are moving" not in found.verdict
    assert "_wait_for_device" in found.text


def test_questions_are_answered(waiting: Run, figure: Figure) -> None:
    assert waiting.ask("1 + 1", timeout=6) == {0: 2}
    begin = time.perf_counter()
    answer = str(waiting.ask("tensor + 0" if gpu.DRY else "tensor", timeout=6)[0])
    figure("question for a tensor on a busy device", f"{time.perf_counter() - begin:.2f} s")
    assert gpu.DRY or "the device is busy" in answer
    assert waiting.ask("1 + 1", timeout=6) == {0: 2}, "the agent keeps working"
    assert "_wait_for_device" in str(waiting.stacks())


def test_it_stops(waiting: Run, figure: Figure) -> None:
    pid = waiting.ranks[0].pid
    assert pid is not None
    begin = time.perf_counter()
    waiting.stop(grace=3.0)
    waiting.wait(20)
    figure("stop of a waiting rank, grace 3 s", f"{time.perf_counter() - begin:.1f} s")
    assert waiting.ended is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_is_killed(waiting: Run) -> None:
    pid = waiting.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    waiting.wait(20)
    assert waiting.ended is not None
