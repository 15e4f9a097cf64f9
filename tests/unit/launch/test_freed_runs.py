"""Finished runs keep no arguments in memory, and results only if they are recent or variables refer to them."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import notebook_accelerate
from notebook_accelerate import ResultsFreedError, Run, RunNotFinishedError, WorkerError
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.run import rebuild, result_bytes
from notebook_accelerate.launch.state import rank_result
from notebook_accelerate.launch.state.run_events import RunEnded
from notebook_accelerate.telemetry import MetricEvent, emit
from tests.support.runs import launch, plan_run
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("zygote")
START_METHODS = [("inline", 1), ("fork", 2), ("zygote", 2), pytest.param("spawn", 2, marks=pytest.mark.nightly)]
METHODS = pytest.mark.parametrize(("method", "count"), START_METHODS)
SEPARATE = pytest.mark.parametrize(("method", "count"), START_METHODS[1:])
LARGE = 2 << 20


class Argument:
    """An object whose deletion a test observes."""

    def __init__(self) -> None:
        self.tensor = torch.ones(100)


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """Disable the cyclic garbage collector, so that objects are freed only when their reference counts drop to zero."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _launch_several(count: int = run_registry.KEPT_RESULTS, **options: Any) -> None:
    for _ in range(count):
        launch(int, **options)


# ---- arguments


@METHODS
def test_nothing_of_the_call_outlives_the_run(method: str, count: int) -> None:
    def run_it() -> tuple[Run, list[weakref.ref[Any]]]:
        argument, closed_over = Argument(), Argument()

        def train(given: Argument) -> float:
            return float(given.tensor.sum() + closed_over.tensor.sum())

        run = launch(train, argument, num_processes=count, start_method=method)
        return run, [weakref.ref(argument), weakref.ref(closed_over), weakref.ref(train)]

    run, references = run_it()
    assert run.results == (200.0,) * count
    until(lambda: [reference() for reference in references] == [None] * 3)


@SEPARATE
def test_arguments_are_dropped_while_the_ranks_run(method: str, count: int, tmp_path: Path) -> None:
    def wait(given: Argument) -> float:
        until((tmp_path / "go").exists)
        return float(given.tensor.sum())

    argument = Argument()
    reference = weakref.ref(argument)
    run = launch(wait, argument, num_processes=count, start_method=method, block=False)
    del argument
    until(lambda: reference() is None)
    (tmp_path / "go").touch()
    assert run.wait(60)
    assert run.results == (100.0,) * count


@SEPARATE
def test_arguments_are_kept_for_restarts_and_dropped_with_the_last(method: str, count: int) -> None:
    def fail_once(given: Argument) -> float:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("once")
        return float(given.tensor.sum())

    argument = Argument()
    reference = weakref.ref(argument)
    run = launch(fail_once, argument, num_processes=count, start_method=method, block=False, max_restarts=1)
    del argument
    assert run.wait(60)
    assert run.results == (100.0,) * count
    until(lambda: reference() is None)


def test_arguments_of_a_launch_that_fails_are_dropped() -> None:
    class Unpicklable(Argument):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    argument = Unpicklable()
    reference = weakref.ref(argument)
    with pytest.raises(notebook_accelerate.SerializationError):
        launch(int, argument, start_method="zygote")
    del argument
    gc.collect()  # The error's traceback and its frames refer to each other, so only the garbage collector frees them.
    assert reference() is None


# ---- results


def _value_of(run: Run) -> weakref.ref[Any]:
    return weakref.ref(run.results[0])


@METHODS
def test_a_run_without_references_is_kept_among_the_last_three(method: str, count: int) -> None:
    run = launch(lambda: torch.ones(10), num_processes=count, start_method=method)
    value, number = _value_of(run), run.id
    del run
    _launch_several(run_registry.KEPT_RESULTS - 1)
    assert value() is not None
    kept = next(run for run in notebook_accelerate.runs() if run.id == number)
    assert kept.results[0] is value()
    del kept
    _launch_several(1)
    assert value() is None


@METHODS
def test_a_run_that_a_variable_refers_to_keeps_its_results(method: str, count: int) -> None:
    run = launch(lambda: torch.ones(10), num_processes=count, start_method=method)
    _launch_several(run_registry.KEPT_RESULTS + 1)
    assert run in notebook_accelerate.runs()
    assert run.results[0].sum() == 10
    value = _value_of(run)
    del run
    assert value() is None


def test_the_state_of_a_rank_keeps_its_result() -> None:
    info = launch(lambda: torch.ones(10)).ranks[1]
    _launch_several()
    assert float(info.result.sum()) == 10


def _train() -> Any:
    print("a line")
    emit(MetricEvent({"loss": 0.25}, 3))
    return torch.ones(LARGE)


@METHODS
def test_everything_but_the_results_of_an_old_run_can_be_read(method: str, count: int) -> None:
    run = launch(_train, num_processes=count, start_method=method)
    number, text, html, lines = run.id, run.report().text, run.report().html, run.logs()
    records = [type(record.event) for record in run._internals.journal.records]
    del run
    _launch_several()
    old = next(run for run in notebook_accelerate.runs() if run.id == number)
    assert (old.status, old.done, old.wait(0), old.logs()) == ("succeeded", True, True, lines)
    assert (old.report().text, old.report().html) == (text, html)
    assert float(old.metrics["loss"].values[0]) == 0.25
    assert [type(record.event) for record in old._internals.journal.records] == records
    assert old is next(run for run in notebook_accelerate.runs() if run.id == number)
    old.stop()
    old.free_results()
    with pytest.raises(ResultsFreedError, match=rf"run {number} were freed.*run = notebook_launcher"):
        old.results  # noqa: B018


def test_the_error_of_an_old_run_has_its_text_and_no_frames() -> None:
    def fail() -> None:
        held = torch.ones(LARGE)
        raise ValueError("text", held.shape)

    with pytest.raises(WorkerError, match="text") as caught:
        launch(fail, num_processes=1, start_method="inline")
    reference = weakref.ref(caught.value)
    del caught
    number = notebook_accelerate.runs()[-1].id
    _launch_several()
    gc.collect()  # This frees tracebacks.
    assert reference() is None
    old = next(run for run in notebook_accelerate.runs() if run.id == number)
    assert "ValueError" in str(old.error)
    assert "fail" in old.report().text
    with pytest.raises(WorkerError):
        old.results  # noqa: B018


def test_large_results_of_the_last_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_registry, "KEPT_RESULT_BYTES", 10 * LARGE)
    # Each of two ranks returns LARGE numbers of 8 bytes.
    numbers = [launch(lambda: torch.ones(LARGE)).id for _ in range(3)]

    def kept() -> list[bool]:
        found = {run.id: run for run in notebook_accelerate.runs()}
        return [bool(result_bytes(found[number])) for number in numbers]

    assert kept() == [False, False, True]
    numbers.append(launch(lambda: torch.ones(4 * LARGE)).id)
    assert kept() == [False, False, False, True], "the last run keeps its results, whatever their size"


def test_the_kept_runs_are_those_that_finished_last(tmp_path: Path) -> None:
    def wait() -> Any:
        until((tmp_path / "go").exists)
        return "slow"

    number = launch(wait, block=False).id
    _launch_several()
    (tmp_path / "go").touch()
    until(lambda: notebook_accelerate.runs()[-4].done)
    slow = next(run for run in notebook_accelerate.runs() if run.id == number)
    assert slow.results == ("slow",) * 2


def test_a_running_run_is_kept_regardless_of_how_many_others_finish() -> None:
    number = launch(time.sleep, 600, block=False).id
    _launch_several(4)
    lasting = next(run for run in notebook_accelerate.runs() if run.id == number)
    assert lasting.status == "running"
    lasting.stop(grace=1.0)


def test_results_may_use_the_registry_when_they_are_deleted() -> None:
    found: list[int] = []

    class Asks:
        def __del__(self) -> None:
            found.append(len(notebook_accelerate.runs()))

    launch(Asks, num_processes=1, start_method="inline")
    _launch_several()
    assert found


def test_deleting_runs_while_launching_others_is_safe() -> None:
    errors: list[BaseException] = []

    def launch_and_drop() -> None:
        try:
            for _ in range(4):
                assert launch(lambda: np.ones(LARGE), start_method="zygote").results[1].sum() == LARGE
                assert notebook_accelerate.runs()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=launch_and_drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- close


@METHODS
def test_free_results_frees_them_immediately(method: str, count: int) -> None:
    run = launch(lambda: torch.ones(LARGE), num_processes=count, start_method=method)
    info, value = run.ranks[0], _value_of(run)
    run.free_results()
    assert value() is None
    assert result_bytes(run) == 0
    run.free_results()
    for read in (lambda: run.results, lambda: info.result):
        with pytest.raises(ResultsFreedError, match=rf"results of run {run.id} were freed by run\.free_results\(\)"):
            read()
    assert (run.status, run in notebook_accelerate.runs()) == ("succeeded", True)
    assert run.report().text


def test_free_results_of_a_running_run_is_refused() -> None:
    run = launch(time.sleep, 600, block=False)
    until(lambda: run.status == "running")
    with pytest.raises(RunNotFinishedError, match=rf"run {run.id} is running; end it first: run\.stop\(\)"):
        run.free_results()
    run.stop(grace=1.0)
    run.free_results()


def test_free_results_keeps_what_the_user_has_read() -> None:
    run = launch(lambda: torch.ones(LARGE))
    value = run.results[0]
    run.free_results()
    assert float(value.sum()) == LARGE


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        (torch.ones(LARGE), 4 * LARGE, 4 * LARGE + 1000),
        ({"a": [np.ones(LARGE)], "b": b"x" * LARGE}, 9 * LARGE, 9 * LARGE + 1000),
        ([Argument()] * 1000, 400, 20_000),
        (list(range(1_000_000)), 8_000_000, 9_000_000),
        (int, 0, 2000),
    ],
)
def test_the_size_of_a_value_in_the_kernel_is_estimated(value: Any, least: int, most: int) -> None:
    assert least <= rank_result.holding(value).nbytes <= most


def test_results_are_deleted_without_the_lock_of_the_registry() -> None:
    ended: list[bool] = []

    class ListsRuns:
        def __del__(self) -> None:
            thread = threading.Thread(target=notebook_accelerate.runs, daemon=True)
            thread.start()
            thread.join(10)
            ended.append(not thread.is_alive())

    planned = plan_run()
    planned._internals.journal.append(RunEnded("failed", "LaunchError", "it failed"))
    run = rebuild(planned.config, "train", planned._internals.journal.records)
    run.marker = ListsRuns()  # type: ignore[attr-defined]
    run_registry._entries.append(run_registry._Entry(run))
    del run
    run_registry._drop_old_results(planned)
    assert ended == [True]


class _FailingView:
    def add(self, _run: Run) -> None:
        raise OSError("the view has no room")


def test_a_view_that_fails_warns_and_does_not_disturb_the_launch() -> None:
    view = _FailingView()
    run_registry.watch_launches(view.add)
    with pytest.warns(UserWarning, match="a view of launches failed: OSError: the view has no room"):
        run = launch(int, num_processes=1, start_method="inline")
    assert run.status == "succeeded"
