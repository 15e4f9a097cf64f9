"""A rank whose main thread waits for its device can be detected, diagnosed, questioned, stopped and killed.

In a dry run, a thread that spins in C replaces the wait, and a stub of torch.cuda says that a device is in use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import Accelerator, notebook_launcher
from notebook_accelerate.debugging import process_stacks
from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.launch import Run
from tests.support import gpu, spin
from tests.support.counted_cuda import CountedCuda
from tests.support.gpu import Figure
from tests.support.waiting import until

pytestmark = pytest.mark.gpu
SECONDS = 45
"""The number of seconds that the rank waits if nothing stops it."""


def _wait_for_device(library: Path | None) -> str:
    accelerator = Accelerator(cpu=gpu.DRY)
    tensor: Any = torch.ones(3, device=accelerator.device)
    ready = True  # noqa: F841 - the tests ask for it
    if library is not None:
        wait = spin.load(library)
        tensor = spin.on_device(wait, SECONDS)
        CountedCuda(busy=True).install()
        wait(SECONDS)
    else:
        torch.cuda._sleep(int(1.7e9 * SECONDS))
        torch.cuda.synchronize()
    return f"the wait ended by itself, with {tensor.shape}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Return the library that the rank waits in, or None if it waits for the device itself."""
    return spin.build(tmp_path_factory.mktemp("spin")) if gpu.DRY else None


def _launch(library: Path | None, **options: float) -> Run:
    run = notebook_launcher(_wait_for_device, (library,), num_processes=1, use_port=0, block=False, **options)
    assert isinstance(run, Run)
    return run


@pytest.fixture
def waiting(library: Path | None) -> Iterator[Run]:
    """Yield a run whose rank waits."""
    run = _launch(library, timeout=90)
    until(lambda: run.ended or run.ask("ready", timeout=5.0) == {0: True}, 40.0)
    time.sleep(3.0)  # Wait until the main thread has made no progress for a while.
    yield run
    run.stop(grace=1.0)
    run.wait(20)


def test_hang_timeout_ends_a_waiting_rank(library: Path | None) -> None:
    begin = time.monotonic()
    run = _launch(library, hang_timeout=6)
    run.wait(SECONDS - 5)
    assert isinstance(run.error, RunTimeoutError), "a rank that waits for the device counts as active"
    assert "hang_timeout" in str(run.error)
    assert time.monotonic() - begin < SECONDS - 5


def test_a_waiting_rank_is_diagnosed(waiting: Run, figure: Figure) -> None:
    begin = time.perf_counter()
    found = waiting.diagnose()
    figure("diagnosis of a waiting rank", f"{time.perf_counter() - begin:.2f} s")
    assert "all are moving" not in found.verdict
    assert "_wait_for_device" in found.text


def test_a_waiting_rank_answers_questions(waiting: Run, figure: Figure) -> None:
    assert waiting.ask("1 + 1", timeout=6) == {0: 2}
    begin = time.perf_counter()
    answer = str(waiting.ask("tensor", timeout=6)[0])
    figure("question for a tensor on a busy device", f"{time.perf_counter() - begin:.2f} s")
    assert "the device is busy" in answer
    assert waiting.ask("1 + 1", timeout=6) == {0: 2}, "the agent still works"
    assert "_wait_for_device" in str(waiting.stacks())
    begin = time.perf_counter()
    assert waiting.memory(seconds=0) is not None
    figure("run.memory(seconds=0) of a waiting rank", f"{time.perf_counter() - begin:.2f} s")
    assert waiting.ask("2 + 2", timeout=6) == {0: 4}


@pytest.mark.skipif(process_stacks.py_spy_path() is None, reason="py-spy is not installed")
def test_py_spy_reads_its_native_frames_in_time(waiting: Run, figure: Figure) -> None:
    command = [str(process_stacks.py_spy_path()), "dump", "--native", "--pid", str(waiting.ranks[0].pid)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    seconds = time.perf_counter() - begin
    figure("py-spy dump --native of a waiting rank", f"{seconds:.2f} s")
    if done.returncode and "ermission" in done.stderr:
        pytest.skip("this machine does not let py-spy read other processes")
    assert done.returncode == 0, done.stderr
    assert "_wait_for_device" in done.stdout
    assert seconds < process_stacks.PY_SPY_SECONDS


def test_a_waiting_rank_can_be_stopped(waiting: Run, figure: Figure) -> None:
    pid = waiting.ranks[0].pid
    assert pid is not None
    begin = time.perf_counter()
    waiting.stop(grace=3.0)
    waiting.wait(20)
    figure("stop of a waiting rank, grace 3 s", f"{time.perf_counter() - begin:.1f} s")
    assert waiting.ended is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_waiting_rank_can_be_killed(waiting: Run) -> None:
    pid = waiting.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    waiting.wait(20)
    assert waiting.ended is not None
