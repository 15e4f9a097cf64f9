"""Ranks whose main thread waits for a device. A thread spinning in C replaces CUDA, and `torch.cuda` is a stub."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.launch import Run
from notebook_accelerate.launchers import notebook_launcher
from tests.support import spin
from tests.support.counted_cuda import CountedCuda
from tests.support.waiting import until

SECONDS = 60.0
"""The time in seconds that a rank waits if nothing stops it. No test takes this long."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spin.build(tmp_path_factory.mktemp("spin"))


def _wait_in_collective(library: Path) -> None:
    """Let rank 0 wait in its third all_reduce, and rank 1 wait for its device before that all_reduce."""
    from notebook_accelerate import PartialState

    wait, rank = spin.load(library), PartialState(cpu=True).process_index
    CountedCuda(busy=True).install()
    spin.record_nccl(3 - rank, 2)
    wait(SECONDS)


def _wait_for_device(library: Path) -> None:
    wait = spin.load(library)
    CountedCuda(busy=True).install()
    loss, step = spin.on_device(wait, SECONDS), 7  # noqa: F841 - the test asks for them
    wait(SECONDS)


def _launch(function: Callable[..., Any], library: Path, ranks: int = 1, **options: Any) -> Run:
    run = notebook_launcher(function, (library,), num_processes=ranks, use_port=0, block=False, **options)
    assert isinstance(run, Run)
    return run


def test_hang_timeout_ends_a_rank_that_waits_for_its_device(library: Path) -> None:
    begin = time.monotonic()
    run = _launch(_wait_for_device, library, hang_timeout=3)
    run.wait()
    assert isinstance(run.error, RunTimeoutError)
    assert "hang_timeout" in str(run.error)
    assert time.monotonic() - begin < SECONDS / 2


def test_a_rank_without_a_device_is_computing_while_it_uses_the_processor(library: Path) -> None:
    run = _launch(_compute, library, hang_timeout=2)
    run.wait()
    assert run.results == ("computed",), run.error


def _compute(library: Path) -> str:
    spin.load(library)(5.0)
    return "computed"


@pytest.mark.parametrize("locked", [False, True], ids=["releases the lock", "keeps the lock"])
def test_a_rank_with_a_device_is_computing_while_its_device_is_idle(library: Path, locked: bool) -> None:
    run = _launch(partial(_compute_with_device, locked), library, hang_timeout=4)
    run.wait()
    assert run.results == (not locked,), run.error


def _compute_with_device(locked: bool, library: Path) -> bool:
    """Compute for longer than hang_timeout if the lock is released, and otherwise for less."""
    CountedCuda().install()
    spin.load(library, locked=locked)(2.5 if locked else 9.0)
    return not locked


def test_a_question_is_answered_while_the_device_is_busy_if_it_only_computes(library: Path) -> None:
    run = _launch(_wait_for_device, library)
    try:
        until(lambda: run.ask("step", timeout=5.0) == {0: 7})
        time.sleep(1.0)
        assert run.ask("[wait(2.0), step][1]", timeout=30.0) == {0: 7}
        run.ask("wait(20.0)", timeout=2.0)
        assert "is still being answered" in str(run.ask("wait(20.0)", timeout=10.0)[0])
    finally:
        run.stop(grace=0.5)
    run.wait()


def test_the_diagnosis_names_the_collective_of_nccl_and_the_missing_ranks(library: Path) -> None:
    run = _launch(_wait_in_collective, library, 2)
    try:
        until(lambda: "never reached" in run.diagnose().verdict)
        found = run.diagnose()
        assert "rank 1 never reached all_reduce, the 3rd" in found.verdict, found.text
        assert "wait(SECONDS)" in found.text
    finally:
        run.stop(grace=0.5)


def test_a_stall_in_nccl_is_reported_without_being_asked_for(library: Path) -> None:
    run = _launch(_wait_in_collective, library, 2)
    try:
        until(lambda: run._internals.journal.state.stall is not None)
        assert run._internals.journal.state.stall is not None
        assert "all_reduce, the 3rd" in run._internals.journal.state.stall.cause
    finally:
        run.stop(grace=0.5)


def test_a_value_on_a_busy_device_is_refused_and_the_agent_keeps_running(library: Path) -> None:
    run = _launch(_wait_for_device, library)
    try:
        until(lambda: run.ask("step", timeout=5.0) == {0: 7})
        time.sleep(1.0)
        assert "the device is busy" in str(run.ask("loss", timeout=10.0)[0]), "the rank answers within the limit"
        assert run.ask("step + 1", timeout=5.0) == {0: 8}
        for _ in range(9):
            run.ask("loss", timeout=5.0)
        assert run.ask("step + 2", timeout=5.0) == {0: 9}, "waiting for an answer is bounded"
        assert "_wait_for_device" in str(run.stacks())
    finally:
        pid = run.ranks[0].pid
        run.stop(grace=0.5)
    run.wait()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _wait_with_another_thread(library: Path) -> tuple[float, float]:
    """Return the switch interval after the main thread has waited in C, and the interval before."""
    wait, before = spin.load(library), sys.getswitchinterval()
    wait(10.0)
    return sys.getswitchinterval(), before


def test_a_slow_question_does_not_slow_down_the_rank(library: Path) -> None:
    run = _launch(_wait_with_another_thread, library)
    until(lambda: run.ranks[0].state == "running")
    time.sleep(1.0)
    run.ask("wait(60.0)", timeout=0.5)
    run.wait()
    after, before = run.results[0]
    assert after == before
