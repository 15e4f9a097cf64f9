"""Launches of a single process: the kernel itself is the rank, and its state is restored afterwards."""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import notebook_accelerate
from notebook_accelerate import Accelerator, Run, WorkerError, hardware, notebook_launcher, runs, telemetry
from notebook_accelerate.launch.run import add_ending_callback
from notebook_accelerate.telemetry import MetricEvent, current_sink, install_sink
from tests.support.interpreters import InterpreterServer


def test_the_rank_is_this_process_with_a_temporary_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "the user's own")
    before = dict(os.environ)
    streams = sys.stdout, sys.stderr

    def look() -> tuple[Any, ...]:
        os.environ["LEFT_BEHIND"] = "1"
        os.environ.pop("HOME", None)
        names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
        return os.getpid(), *(os.environ[name] for name in names)

    run = notebook_launcher(look, mixed_precision="bf16")
    assert run.results == ((os.getpid(), "0", "1", "bf16"),)
    assert run.plan is not None
    assert run.plan.start_method == "inline"
    assert dict(os.environ) == before
    assert (sys.stdout, sys.stderr) == streams
    assert current_sink() is None


def test_environment_and_streams_are_restored_after_an_error_too() -> None:
    before, streams = dict(os.environ), (sys.stdout, sys.stderr)

    def fail() -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("on top") from error

    with pytest.raises(WorkerError, match="rank 0: ValueError: on top") as caught:
        notebook_launcher(fail)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert isinstance(cause.__cause__, KeyError)
    assert (dict(os.environ), (sys.stdout, sys.stderr), current_sink()) == (before, streams, None)
    text = "\n".join(caught.value._render_traceback_())
    assert "direct cause" in text
    assert "launch/processes/inline.py" not in text


@pytest.mark.parametrize(("code", "status"), [(None, "succeeded"), (0, "succeeded"), (3, "failed"), ("msg", "failed")])
def test_system_exit_ends_the_function_and_not_the_kernel(code: Any, status: str) -> None:
    if status == "failed":
        with pytest.raises(WorkerError) as caught:
            notebook_launcher(sys.exit, (code,))
        assert f"sys.exit({code!r})" in str(caught.value)
        assert caught.value.run is not None
        assert caught.value.run.status == "failed"
    else:
        run = notebook_launcher(sys.exit, (code,))
        assert (run.status, run.results) == ("succeeded", (None,))


class _Odd:
    """A value whose every method raises."""

    @property
    def __class__(self) -> Any:
        raise KeyError("class")

    def __eq__(self, other: object) -> bool:
        raise KeyError("equality")

    def __repr__(self) -> str:
        raise KeyError("repr")

    __hash__ = None  # type: ignore[assignment]


class _OddError(Exception):
    @property
    def __class__(self) -> Any:
        raise KeyError("class")


@pytest.mark.parametrize(
    ("make", "headline"),
    [
        (lambda: _OddError("reason"), "_OddError: reason"),
        (lambda: SystemExit(_Odd()), r"the function called sys\.exit\(<_Odd>\)"),
    ],
    ids=["class", "code"],
)
def test_odd_classes_do_not_hide_the_error_of_the_function(make: Callable[[], BaseException], headline: str) -> None:
    error = make()

    def fail() -> None:
        raise error

    with pytest.raises(WorkerError, match=headline) as caught:
        notebook_launcher(fail)
    assert caught.value.__cause__ is error
    assert caught.value.run is not None
    assert caught.value.run.status == "failed"


def test_an_interrupt_raises_keyboard_interrupt_and_ends_the_run() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        notebook_launcher(interrupted)
    assert caught.value.run.status == "stopped"  # type: ignore[attr-defined]
    assert "RANK" not in os.environ


def test_virtual_xla_devices_use_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts the devices that the kernel's environment describes."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    machine = replace(hardware.detect(), accelerator="xla", count=4)
    monkeypatch.setattr(hardware, "detect", lambda _environment: machine)
    run = notebook_launcher(os.getpid, start_method="inline")
    assert run.results == (os.getpid(),)
    assert run.plan is not None
    assert (run.plan.accelerator, run.plan.devices) == ("xla", 4)


def test_an_interrupt_before_the_function_restores_everything(press: Callable[..., None]) -> None:
    before, streams = dict(os.environ), (sys.stdout, sys.stderr)
    press(install_sink.__code__, event="return")
    with pytest.raises(KeyboardInterrupt) as caught:
        notebook_launcher(int)
    assert caught.value.run.status == "stopped"  # type: ignore[attr-defined]
    assert (dict(os.environ), (sys.stdout, sys.stderr), current_sink()) == (before, streams, None)


_INTERRUPTED_AS_TORCH_IS_CONNECTED = """
import signal
import sys

import torch

from notebook_accelerate import notebook_launcher
from notebook_accelerate.integrations.import_hooks import when_imported

def press(frame, event, _):
    if frame.f_code is when_imported.__code__ and frame.f_locals["name"] == "torch.optim.optimizer":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)

def train():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    optimizer.step()

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.setprofile(press)
try:
    notebook_launcher(train)
except KeyboardInterrupt:
    print("interrupted")
print(*notebook_launcher(train).automatic_metrics)
"""


def test_an_interrupt_while_patching_libraries_skips_none(interpreters: InterpreterServer) -> None:
    """Use a new process, because each process patches a library only once, and this one has already patched torch."""
    done = interpreters.run("-c", _INTERRUPTED_AS_TORCH_IS_CONNECTED, env=os.environ)
    assert done.stdout == "interrupted\nauto/lr\n", done.stderr


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_end_of_the_run_is_displayed_leaves_it_finished() -> None:
    runs = []

    def body() -> int:
        run = notebook_accelerate.runs()[-1]
        add_ending_callback(run, lambda _: signal.raise_signal(signal.SIGINT))
        runs.append(run)
        return 3

    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(body)
    assert runs[0].wait(0)
    assert runs[0].results == (3,)


def test_output_is_shown_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("whole")
        print("err", file=sys.stderr)
        sys.stdout.write("part")
        sys.stdout.flush()
        assert sys.stdout.encoding

    run = notebook_launcher(talk)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("whole\npart", "err\n")
    assert sorted(run.logs(0)) == ["err", "part", "whole"]


def test_a_stream_that_the_function_replaced_is_left_alone() -> None:
    streams = sys.stdout

    def replace() -> None:
        sys.stdout = io.StringIO()
        print("lost")

    notebook_launcher(replace)
    assert sys.stdout is streams


def test_metrics_arrive_in_the_kernel() -> None:
    run = notebook_launcher(lambda: telemetry.emit(MetricEvent({"loss": 2.0}, 1)))
    assert run.metrics["loss"].values.tolist() == [2.0]


def test_launches_may_be_nested() -> None:
    def inner() -> str:
        return os.environ["WORLD_SIZE"]

    def outer() -> tuple[Any, ...]:
        nested: Run = notebook_launcher(inner, num_processes=2, use_port=0, start_method="fork")
        return nested.results, notebook_launcher(inner).results, os.environ["WORLD_SIZE"]

    assert notebook_launcher(outer).results == ((("2", "2"), ("1",), "1"),)


def test_shared_state_of_the_kernel_is_set_aside_and_restored() -> None:
    state = pytest.importorskip("notebook_accelerate.state")
    before = dict(state.PartialState._shared_state)

    def build() -> int:
        return int(state.PartialState(cpu=True).num_processes)

    assert notebook_launcher(build).results == (1,)
    assert dict(state.PartialState._shared_state) == before


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "grouped",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
        ),
    ],
)
def test_memory_of_a_failed_run_is_free_for_the_next_launch(prepared: bool, grouped: bool) -> None:
    """After an out-of-memory error, the frames in its traceback still refer to the tensors of the failed run."""
    held: list[weakref.ref[Any]] = []

    def fail() -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        if prepared:
            model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
        block = torch.ones(1 << 10)
        held.extend(weakref.ref(each) for each in (block, model))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    group: Any = getattr(builtins, "ExceptionGroup", None)

    def fail_in_group() -> None:
        try:
            fail()
        except torch.OutOfMemoryError as error:
            failed = error
        raise group("several", [failed])

    with pytest.raises(WorkerError):
        notebook_launcher(fail_in_group if grouped else fail)
    saved = sys.stdout  # A library that is imported during a run may keep sys.stdout.
    run = notebook_launcher(lambda: [reference() is not None for reference in held])
    assert run.results == ([False, False],)
    assert runs()[-2].failures[0].exception.__traceback__ is not None, "the traceback must remain"
    del saved
