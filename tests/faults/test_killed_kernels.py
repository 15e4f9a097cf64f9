"""If a detached run's kernel is killed at a random moment, a new kernel gets the run with its whole history."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from notebook_accelerate import attach, notebook_launcher
from notebook_accelerate.launch.detached import run_directory
from tests.faults.test_kept_runs import train
from tests.support.detached import user_folder
from tests.support.kernel import Kernel
from tests.support.nightly import rest_nightly
from tests.support.waiting import until

_STEPS = 50
_KILLS = 50
_FUNCTION = """
import notebook_accelerate
from notebook_accelerate import notebook_launcher
from tests.faults.test_kept_runs import train as train_model

def train(*arguments):
    return train_model(*arguments)
"""
_LAUNCH = "run = notebook_launcher(train, {}, num_processes=2, use_port=0, detach=True, name='killed', panel=False{})"
_SCENES = {"start": -1, "run": 4, "failure": 18, "breakpoint": 5, "save": 17}
"""For each scene in which the kernel is killed, the step that the run must have reached. A random delay follows."""
_DAILY = {"start"}
_SECONDS = {"start": 5.0}
"""The maximum random delay in seconds, for scenes where it is not 0.4."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's detached runs."""
    with user_folder(tmp_path / "state", monkeypatch) as folder:
        yield folder


@cache
def _undisturbed() -> tuple[tuple[Any, ...], list[list[int]], list[list[str]]]:
    """Return the results, the logged steps and the output lines of a run whose kernel is not killed."""
    with TemporaryDirectory() as folder:
        run = notebook_launcher(train, (folder, 0.0, _STEPS), num_processes=2, use_port=0, panel=False)
    steps = [run.metrics["loss"].rank(rank).steps.tolist() for rank in (0, 1)]
    return run.results, steps, [run.logs(rank) for rank in (0, 1)]


@pytest.mark.parametrize("scene", rest_nightly(((scene,) for scene in _SCENES), lambda scene: scene in _DAILY))
def test_a_kernel_killed_at_a_random_moment_loses_nothing(state: Path, tmp_path: Path, scene: str) -> None:
    _kill_at(scene, time.time_ns(), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(_KILLS))
def test_kernels_killed_at_random_moments_lose_nothing(state: Path, tmp_path: Path, number: int) -> None:
    _kill_at(list(_SCENES)[number % len(_SCENES)], number, tmp_path)


def _kill_at(scene: str, seed: int, tmp_path: Path) -> None:
    """Kill the kernel of a detached run, attach from a new one, and compare with a run that nothing has disturbed."""
    print(f"scene {scene}, seed {seed}")
    fails_at, stops_at = (25 if scene == "failure" else -1), (10 if scene == "breakpoint" else -1)
    arguments = (str(tmp_path / "project"), 0.02, _STEPS, fails_at, stops_at)
    # Leaving the block deletes the kernel's folder while the ranks run.
    with Kernel(cwd=tmp_path, detached=1) as kernel:
        kernel.check(_FUNCTION)
        kernel.submit(_LAUNCH.format(arguments, ""))
        until(run_directory.entries)
        if _SCENES[scene] >= 0:
            run = attach("killed")
            until(lambda: run._internals.store.last_step.get(0, -1) >= _SCENES[scene])
        time.sleep(random.Random(seed).random() * _SECONDS.get(scene, 0.4))
        kernel.kill()
    with Kernel() as kernel:
        kernel.check(f"{_FUNCTION}\nrun = notebook_accelerate.attach('killed')")
        if scene == "breakpoint":
            kernel.until("run._internals.commands.prompts.debugged() == [1]", 120)
            kernel.types("c")
            kernel.check("notebook_accelerate.debug()")
        assert kernel.value("run.wait(120)")
        if scene == "failure":
            assert kernel.value("run.status") == "failed"
            assert kernel.value("run.failures[0].chain[-1].message") == "as asked"
            assert kernel.value("len(run.logs(0))") == fails_at
            kernel.check(_LAUNCH.format(arguments, ", resume=run"))
            assert kernel.value("run.wait(120)")
        assert kernel.value("run.status") == "succeeded", kernel.value("str(run.report())")
        results, steps, lines = _undisturbed()
        if scene == "failure":  # The log has the failed run's lines, and then those after its checkpoint again.
            lines = [each[:fails_at] + each[fails_at - 5 :] for each in lines]
        assert kernel.value("run.results") == list(results), "the results are bitwise equal"
        assert kernel.value("[run.metrics['loss'].rank(rank).steps.tolist() for rank in (0, 1)]") == steps
        # A rank also prints that it deletes a checkpoint and, on a slow machine, that it waited.
        found = kernel.value("[run.logs(rank) for rank in (0, 1)]")
        assert [[line for line in each if line.startswith("step ")] for each in found] == lines
        pids = kernel.value("[info.pid for info in run.ranks]")
    assert not any(map(psutil.pid_exists, pids))
