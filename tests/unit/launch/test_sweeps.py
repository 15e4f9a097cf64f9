"""Sweeps: which runs they launch, side by side on which cores, and what is left of them after an interruption."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import DeviceBusyError, LaunchConfig, notebook_launcher, runs, shutdown, sweep
from notebook_accelerate.launch.sweeps import Sweep, _call, _FixedTrials, _slots
from notebook_accelerate.telemetry import MetricEvent, emit
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


Start = Callable[..., Sweep]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield `sweep`, whose sweeps are stopped at the end."""
    found: list[Sweep] = []

    def begin(*args: Any, **options: Any) -> Sweep:
        found.append(sweep(*args, panel=False, **options))
        return found[-1]

    yield begin
    for each in found:
        each.stop(0.5)


def train(lr: float, width: int = 4, folder: str = "") -> float:
    """Log the value of a parabola, fail at 13 and last forever at 600, unless there is a file."""
    for step in range(3):
        emit(MetricEvent({"loss": (lr - 2) ** 2 + 3 - step}, step))
    if lr == 13:
        raise ValueError("unlucky")
    while lr == 600 and not (Path(folder) / "gate").exists():
        time.sleep(0.05)
    return lr


# ---- the trials


def _values(space: Any, most: int | None = None) -> list[dict[str, Any]]:
    source = _FixedTrials(space, most)
    return [dict(trial.values) for trial in iter(source.next_trial, None)]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"lr": [1, 2], "width": (3, 4)}, [(1, 3), (1, 4), (2, 3), (2, 4)]),
        ({"lr": range(2), "width": 8}, [(0, 8), (1, 8)]),
        ([{"lr": 1, "width": 2}], [(1, 2)]),
        (({"lr": lr, "width": 2 * lr} for lr in range(2)), [(0, 0), (1, 2)]),
    ],
    ids=["a grid", "a fixed value", "a list", "a generator"],
)
def test_a_space_gives_the_arguments_of_each_run(space: Any, expected: list[tuple[int, int]]) -> None:
    assert _values(space) == [{"lr": lr, "width": width} for lr, width in expected]


def test_arguments_are_passed_by_name() -> None:
    def keywords(first: int, *, second: int, third: int = 3) -> tuple[int, int, int]:
        return first, second, third

    function, arguments = _call(keywords, {"second": 2, "first": 1})
    assert (function(*arguments), function.__name__) == ((1, 2, 3), "keywords")
    with pytest.raises(
        ValueError, match=r"keywords\(\) cannot be called with lr: .* its parameters are: first, second"
    ):
        _call(keywords, {"lr": 1})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"space": "lr"}, "pass a grid such as"),
        ({"space": [0.1]}, "pass dicts such as"),
        ({"space": {"rate": [1]}}, "its parameters are: lr, width, folder"),
        ({"space": {"lr": [1]}, "devices_per_run": 1000}, "devices_per_run=1000, but the sweep may use"),
        ({"space": {"lr": [1]}, "devices_per_run": 0}, "devices_per_run"),
        ({"space": {"lr": [1]}, "resume": True}, "pass save='runs'"),
        ({"space": {"lr": []}}, "space has no arguments for any run"),
        ({"space": []}, "space has no arguments for any run"),
        ({"space": [{}]}, r"train\(\) cannot be called with no arguments: missing a required argument: 'lr'"),
        ({"space": {"lr": [1]}, "stop_if": 3}, "stop_if=3 is not allowed; pass a function"),
        ({"space": {"lr": [1]}, "study": object()}, "metric='loss', trials=20"),
    ],
)
def test_mistakes_are_raised_by_the_call(options: dict[str, Any], match: str) -> None:
    if "study" in options:
        options["study"] = type("Study", (), {"directions": [1]})()
    with pytest.raises(ValueError, match=match):
        sweep(train, panel=False, **options)


def test_the_devices_of_a_sweep_are_divided_into_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accelerate.hardware.detection.cores", lambda: tuple(range(8)))
    assert _slots(LaunchConfig(cpu=True), 3) == [(0, 1, 2), (3, 4, 5)]
    assert _slots(LaunchConfig(cpu=True, devices=4), 2) == [(0, 1), (2, 3)]
    assert _slots(LaunchConfig(cpu=True, devices=[7, 5, 3]), 1) == [(7,), (5,), (3,)]


# ---- runs


def test_a_sweep_ends_with_a_failure_and_a_stop(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    space = {"lr": [1, 13, 600, 2], "folder": str(tmp_path)}
    found = start(train, space, stop_if=lambda metrics: metrics["loss"].values[-1] > 1000)
    assert found.wait(120)
    assert [run.status for run in found.runs] == ["succeeded", "failed", "stopped", "succeeded"]
    assert all(run.plan is not None and run.plan.num_processes == 1 for run in found.runs)
    assert [run.config.devices for run in found.runs[:2]] == [(core,) for core in sorted(os.sched_getaffinity(0))[:2]]
    best = found.best("loss", "min")
    assert (best.arguments["lr"], found.best("loss", "max").arguments["lr"]) == (2, 600)
    assert best.results == (2,)
    with pytest.raises(ValueError, match="no run has logged a finite 'acc'; the metrics are: loss"):
        found.best("acc", "max")
    with pytest.raises(ValueError, match="pass 'min' or 'max'"):
        found.best("loss", "low")
    frame = found.to_pandas()
    assert list(frame["status"]) == [run.status for run in found.runs]
    assert list(frame["args.lr"]) == [1, 13, 600, 2]
    assert list(frame["loss"])[::3] == [2.0, 1.0]
    assert set(frame["path"]) == {""}, "the runs are not kept"
    assert repr(found) == "<Sweep of train: 4 runs: 2 succeeded, 1 failed, 1 stopped>"
    assert "unlucky" not in capfd.readouterr().err, "each run shows its output in its own panel"


def test_an_interrupted_sweep_continues(start: Start, tmp_path: Path) -> None:
    space = {"lr": [1, 13, 600, 2], "folder": str(tmp_path)}
    first = start(train, space, save=tmp_path / "runs", devices=1)
    until(lambda: len(first.runs) == 3 and "loss" in first.runs[2].metrics)
    first.stop(0.5)
    assert [run.status for run in first.runs] == ["succeeded", "failed", "stopped"]
    (tmp_path / "gate").touch()
    again = start(train, space, save=tmp_path / "runs", devices=1, resume=True)
    assert again.wait(120)
    assert [run.status for run in again.runs] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert [run.folder for run in again.runs[:2]] == [run.folder for run in first.runs[:2]], "these are not repeated"
    assert again.runs[2].folder != first.runs[2].folder
    assert again.runs[2].name == first.runs[2].name


KERNEL = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from notebook_accelerate import sweep
from tests.unit.launch.test_sweeps import train
cores = sorted(os.sched_getaffinity(0))
def start(folder, rates, core, **options):
    space = {"lr": rates, "folder": sys.argv[2]}
    return sweep(train, space, save=sys.argv[2] + "/" + folder, devices=[core], panel=False, **options)
for found in start("detached", [600, 2], cores[-1], detach=True), start("kept", [1, 600, 2], cores[0]):
    while found.runs[-1].arguments["lr"] != 600 or "loss" not in found.runs[-1].metrics:
        time.sleep(0.05)
time.sleep(1.0)  # Let the journals be written.
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sweeps_continue_after_their_kernel_was_killed(
    start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer((tmp_path / "gate").touch)  # Otherwise, the detached run would survive a failed test.
    root = str(Path(__file__).resolve().parents[3])
    kernel = subprocess.run([sys.executable, "-c", KERNEL, root, str(tmp_path)], check=False, timeout=120)
    assert kernel.returncode == -9
    kept, detached = tmp_path / "kept", tmp_path / "detached"
    assert [run.status for run in runs(kept)] == ["succeeded", "lost"]
    assert [run.status for run in runs(detached)] == ["running"]
    cores, (live,) = sorted(os.sched_getaffinity(0)), runs(detached)
    message = f"the detached run {live.name} holds cpu:{cores[-1]}; .*{re.escape(f'attach({live.name!r}).stop()')}"
    with pytest.raises(DeviceBusyError, match=message):
        notebook_launcher(train, (1,), devices=cores[-1:], panel=False)
    lost = start(train, {"lr": [1, 600, 2], "folder": str(tmp_path)}, save=kept, devices=cores[:1], resume=True)
    adopted = start(train, {"lr": [600, 2], "folder": str(tmp_path)}, save=detached, devices=cores[-1:], resume=True)
    until(lambda: len(lost.runs) == 2)
    assert [run.status for run in adopted.runs] == ["running"], "its core is not free"
    (tmp_path / "gate").touch()
    assert lost.wait(120)
    assert adopted.wait(120)
    assert [run.results for run in lost.runs] == [(1,), (600,), (2,)]
    assert [run.results for run in adopted.runs] == [(600,), (2,)]
    assert len(runs(kept)) == 4, "the run that had succeeded is not repeated"
    assert len(runs(detached)) == 2, "the live run is not repeated"


def test_an_error_of_the_space_ends_the_sweep(start: Start) -> None:
    def space() -> Iterator[dict[str, Any]]:
        yield {"lr": 1}
        yield {"lr": 2}
        raise RuntimeError("out of ideas")

    found = start(train, space(), devices=1)
    with pytest.raises(RuntimeError, match="out of ideas"):
        found.wait(120)
    assert [run.wait(60) and run.status for run in found.runs] == ["succeeded", "succeeded"]


def test_a_run_that_is_launched_during_a_stop_is_stopped(start: Start) -> None:
    asked, given = threading.Event(), threading.Event()

    def space() -> Iterator[dict[str, Any]]:
        yield {"lr": 1}
        asked.set()
        assert given.wait(60)
        yield {"lr": 600}

    found = start(train, space(), devices=1)
    assert asked.wait(60)
    stopper = threading.Thread(target=found.stop, args=(0.5,))
    stopper.start()
    until(lambda: found._stopping)
    given.set()
    stopper.join(60)
    assert [run.status for run in found.runs] == ["succeeded", "stopped"]


def test_shutdown_stops_a_sweep(start: Start) -> None:
    found = start(train, {"lr": [600, 600]}, devices=1)
    shutdown()
    assert found.wait(60)
    assert [run.status for run in found.runs] == ["stopped"], "no further run is launched"


def test_stop_if_is_called_only_after_new_points(start: Start) -> None:
    def print_often(lr: float) -> None:
        emit(MetricEvent({"loss": lr}, 0))
        for line in range(8):
            print(line, flush=True)
            time.sleep(0.15)

    counts: list[int] = []
    found = start(print_often, {"lr": [1]}, stop_if=lambda metrics: counts.append(len(metrics["loss"].values)))
    assert found.wait(120)
    assert counts == [1]


def test_an_error_of_stop_if_ends_the_sweep(start: Start) -> None:
    found = start(train, {"lr": [600, 1, 2]}, stop_if=lambda metrics: 1 / (len(metrics["loss"].values) - 3) > 9)
    with pytest.raises(ZeroDivisionError):
        found.wait(120)
    assert found.runs[0].status == "running", "a live run continues"
    found.stop(0.5)
    assert found.runs[0].wait(60)


# ---- Optuna


def test_a_study_chooses_the_arguments_and_prunes(start: Start) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(
        sampler=optuna.samplers.GridSampler({"lr": [2.0, 3.0, 600.0]}, seed=0),
        pruner=optuna.pruners.ThresholdPruner(upper=1000),
    )
    space = {"lr": optuna.distributions.FloatDistribution(1.0, 1000.0)}
    found = start(train, space, study=study, metric="loss", trials=3, devices=1)
    assert found.wait(120)
    by_rate = {trial.params["lr"]: trial for trial in study.trials}
    assert {rate: trial.state.name for rate, trial in by_rate.items()} == {
        2.0: "COMPLETE", 3.0: "COMPLETE", 600.0: "PRUNED"
    }  # fmt: skip
    assert (study.best_params, study.best_value) == ({"lr": 2.0}, 1.0)
    assert by_rate[3.0].intermediate_values == {0: 4.0, 1: 3.0, 2: 2.0}
    names = {run.arguments["lr"]: run.name for run in found.runs}
    assert {rate: trial.user_attrs["run"] for rate, trial in by_rate.items()} == names


def test_a_study_continues_with_its_unfinished_trials(start: Start, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"lr": [600.0, 2.0]}, seed=1))
    options: dict[str, Any] = {"study": study, "metric": "loss", "trials": 2, "save": tmp_path / "runs", "devices": 1}

    def space(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1.0, 1000.0), "folder": str(tmp_path)}

    first = start(train, space, **options)
    until(lambda: any("loss" in run.metrics and run.arguments["lr"] == 600 for run in list(first.runs)))
    first.stop(0.5)
    assert "RUNNING" in [trial.state.name for trial in study.trials]
    (tmp_path / "gate").touch()
    again = start(train, space, **options, resume=True)
    assert again.wait(120)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    assert study.best_value == 1.0
