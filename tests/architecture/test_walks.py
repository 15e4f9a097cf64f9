"""Real runs call the functions that the step lists in docs/architecture.md name, in the same order."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import notebook_accelerate

# Import this before tracing starts, because tracing slows down the import of torch.
from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.errors import RunInterrupted, RunStoppedError
from notebook_accelerate.launch import starting
from notebook_accelerate.widgets.render_schedule import ticker
from notebook_accelerate.widgets.run_panel import RunPanel
from tests.support.waiting import until
from tests.support.walks import Call, Trace, first_missing, steps_of

_trace = Trace()
"""The trace of the current test. Each rank is forked from this process, and returns its part of the trace."""


@pytest.fixture
def trace() -> Iterator[Trace]:
    global _trace
    with Trace() as _trace:
        yield _trace


def _calls() -> list[Call]:
    return _trace.own_calls()


def test_a_launch_follows_its_walk(trace: Trace) -> None:
    run = notebook_accelerate.notebook_launcher(_calls, num_processes=2, use_port=0, start_method="fork")
    missing = first_missing(steps_of("A launch"), trace.merged(*run.results))
    assert missing is None, f"the launch did not reach {missing}"


def _log(go: Path) -> list[Call]:
    accelerator = Accelerator(cpu=True)
    until(go.exists)
    accelerator.log({"loss": 0.5}, step=1)
    time.sleep(0.5)  # Give the agent time to send the metric.
    return _trace.own_calls()


def test_a_metric_follows_its_walk(trace: Trace, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = notebook_accelerate.notebook_launcher(
        _log, (go,), num_processes=2, use_port=0, start_method="fork", block=False
    )
    panel = RunPanel(run)
    ticker.add(panel.schedule)
    try:
        go.touch()
        until(lambda: panel.plot.full)
        assert run.wait(240)
    finally:
        panel.close()
    missing = first_missing(steps_of("A metric"), trace.merged(*run.results))
    assert missing is None, f"the metric did not reach {missing}"


def _run_until_stopped(folder: Path) -> None:
    (folder / os.environ["RANK"]).touch()
    time.sleep(600)


def _stop_the_run() -> None:
    notebook_accelerate.runs()[-1].stop()


def _interrupt_the_cell() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "begins_with", "error"),
    [(_stop_the_run, "stop", RunStoppedError), (_interrupt_the_cell, "on_signal", RunInterrupted)],
    ids=["run.stop", "interrupt"],
)
def test_a_stop_follows_its_walk(
    stop: Callable[[], None],
    begins_with: str,
    error: type[BaseException],
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_signal, untraced = starting.BlockingCell.on_signal, []

    def noted(cell: starting.BlockingCell) -> None:
        # Python does not trace what a signal handler calls if the signal arrives while the trace notes a call.
        untraced.append(any(frame.f_code is Trace._note.__code__ for frame, _ in traceback.walk_stack(None)))
        on_signal(cell)

    monkeypatch.setattr(starting.BlockingCell, "on_signal", noted)
    for number in range(10):
        (folder := tmp_path / str(number)).mkdir()
        trace.calls.clear()
        untraced.clear()
        _stop_a_run(stop, error, folder)
        if not any(untraced):
            break
    steps = [step for step in steps_of("A stop") if step.number > 1 or step.function == begins_with]
    missing = first_missing(steps, trace.merged())
    assert missing is None, f"the stop did not reach {missing}"


def _stop_a_run(stop: Callable[[], None], error: type[BaseException], folder: Path) -> None:
    """Launch a run, and stop it once both ranks run."""

    def stop_when_running() -> None:
        until(lambda: len(list(folder.iterdir())) == 2)
        stop()

    thread = threading.Thread(target=stop_when_running)
    thread.start()
    # SIGINT may be ignored in the process that runs the tests.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            notebook_accelerate.notebook_launcher(
                _run_until_stopped, (folder,), num_processes=2, use_port=0, start_method="fork"
            )
    finally:
        signal.signal(signal.SIGINT, handler)
        thread.join()


def test_a_save_follows_its_walk(trace: Trace, tmp_path: Path) -> None:
    accelerator = notebook_accelerate.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    (tmp_path / "note").write_text("the folder exists")
    accelerator.save_state(str(tmp_path), blocking=False)
    accelerator.end_training()
    missing = first_missing(steps_of("A save"), trace.merged())
    assert missing is None, f"the save did not reach {missing}"
