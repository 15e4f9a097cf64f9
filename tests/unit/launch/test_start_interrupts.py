"""Interrupts before anything runs, and what happens when the end of a run cannot be displayed."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable

import pytest

import notebook_accelerate
from notebook_accelerate import notebook_launcher
from notebook_accelerate.errors import RunInterrupted
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.run import rebuild
from notebook_accelerate.launch.run_display import LaunchOutput
from notebook_accelerate.launch.state.journal import Journal
from tests.support.ports import free_port
from tests.support.runs import launch
from tests.support.waiting import until

Press = Callable[..., None]


def test_an_interrupt_during_planning_leaves_no_run(press: Press) -> None:
    before = notebook_accelerate.runs()
    press(threading.Thread.start.__code__)
    with pytest.raises(KeyboardInterrupt):
        launch(time.sleep, 600)
    assert notebook_accelerate.runs() == before


def test_an_interrupt_before_the_runs_thread_starts_ends_the_run(press: Press) -> None:
    press(threading.Thread.start.__code__, 2)  # The first thread makes the plan.
    with pytest.raises(RunInterrupted) as caught:
        launch(time.sleep, 600)
    assert caught.value.run.status == "stopped"
    assert caught.value.run.wait(0)


def test_an_interrupt_before_an_inline_run_starts_ends_it(press: Press) -> None:
    press(LaunchOutput.show_panel.__code__)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(time.sleep, (600,))
    run = notebook_accelerate.runs()[-1]
    assert run.wait(0), "when the kernel exits, it must not wait forever for the run to stop"
    assert run.status == "stopped"


class _Gone:
    """A stream whose reader goes away."""

    closed = gone = False

    def write(self, text: str) -> int:
        if "late" in text:
            raise BrokenPipeError
        return len(text)

    def flush(self) -> None:
        return


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_ends_even_if_its_end_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        os.write(1, b"early\n")
        time.sleep(0.02)
        os.write(1, b"late\n")

    monkeypatch.setattr(sys, "stdout", _Gone())
    run = launch(body, num_processes=1, block=False)
    assert run.wait(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ranks_that_cannot_be_held_are_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is displayed while ranks are held, but nothing reads the output."""

    def body() -> None:
        if os.environ["RANK"] == "1":
            os.write(1, b"late\n")
            raise KeyError("missing")
        time.sleep(600)

    monkeypatch.setattr(sys, "stdout", _Gone())
    run = launch(body, hold_on_error=True, block=False)
    assert run.wait(30)
    run.stop(grace=1.0)
    assert run.status == "failed"
    assert not run.held
    assert all(info.exited for info in run.ranks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_a_failing_callback_does_not_block_a_launch(error: type[BaseException]) -> None:
    def body() -> None:
        time.sleep(0.3)

    run = launch(body, block=False)

    def fail(_: object) -> None:
        raise error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.add_done_callback(fail)
        assert run.wait(30)
        run.stop()
    assert run.status == "succeeded"


def test_the_end_of_one_run_can_wait_for_the_end_of_another() -> None:
    other = launch(time.sleep, 600, block=False)
    seen: list[str] = []

    def stop_other(_: object) -> None:
        other.stop(grace=1.0)
        seen.append(other.status)

    run = launch(time.sleep, 0.3, block=False)
    run.add_done_callback(stop_other)
    assert run.wait(30)
    until(lambda: seen == ["stopped"])


def test_an_interrupt_while_an_inline_run_ends_leaves_it_finished(press: Press) -> None:
    press(Journal.append.__code__, 7)  # These are RunCreated, RunPlanned, four events of the attempt, and RankExited.
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(int)
    run = notebook_accelerate.runs()[-1]
    assert run.done
    assert run.status == "succeeded"
    assert rebuild(run.config, run.function_name, run._internals.journal.records).status == "succeeded"


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_an_interrupt_while_the_first_notebook_starts_listening_stops_the_run(press: Press, backend: str) -> None:
    port = free_port()
    press(HostListener._bind.__code__)
    with pytest.raises(RunInterrupted) as caught:
        notebook_launcher(
            time.sleep, (600,), num_nodes=2, use_port=port, rdzv_backend=backend, rdzv_conf={"secret": "hush"}
        )
    assert caught.value.run.status == "stopped"
    assert not [thread.name for thread in threading.enumerate() if thread.name == "notebook-accelerate-listener"]
    with socket.create_server(("127.0.0.1", port)):
        pass
