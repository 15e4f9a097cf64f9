"""Misbehaving peers of a detached run: suspended kernels, processes that send garbage, a suspended supervisor."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from notebook_accelerate import Run, attach, notebook_launcher, runs, shutdown
from notebook_accelerate.hardware.process_liveness import ProcessIdentity
from notebook_accelerate.launch import attaching
from notebook_accelerate.launch.detached import control_client, control_protocol as protocol, run_directory
from notebook_accelerate.launch.detached.control_protocol import short_socket_path
from notebook_accelerate.telemetry import Event, LogEvent, MetricEvent
from notebook_accelerate.telemetry.debug_protocol import AskRequest, DoneReply
from tests.support.detached import disconnect_all, processes_of, supervisor_of, user_folder
from tests.support.peers import PEERS, SENDS, frame, misbehaving_peer, raw
from tests.support.waiting import until


def _launch(name: str) -> Run:
    run = notebook_launcher(time.sleep, (600,), num_processes=1, use_port=0, detach=True, panel=False, name=name)
    until(lambda: run.status == "running", seconds=120)
    return run


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the user's detached runs, and stop them at the end of the test."""
    with user_folder(tmp_path / "state", monkeypatch) as folder:
        yield folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield one run for all peers of the table, all of which it must survive."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        user_folder(tmp_path_factory.mktemp("shared") / "state", monkeypatch),
    ):
        yield _launch("shared")


def _socket_of(run: Run) -> Path:
    return next(Path(entry.socket) for entry in run_directory.entries() if entry.name == run.name)


# ---- processes that send garbage


def _relayed(*events: Event) -> bytes:
    return frame(protocol.RelayedEvent(0, frame(*events)))


COMMANDS = {
    "a text as the grace": frame(protocol.StopCommand("soon")),  # type: ignore[arg-type]
    "a grace beyond the floats": frame(protocol.StopCommand(10**400)),
    "a grace that is no number": raw(b'[["StopCommand",1.0,NaN]]'),
    "ranks that are none": frame(protocol.InterruptCommand({"a": 1})),  # type: ignore[arg-type]
    "a rank as text": frame(protocol.ClockCommand("0", held=True)),  # type: ignore[arg-type]
    "a list as the answer": frame(protocol.AnswerCommand(0, 1, [])),  # type: ignore[arg-type]
    "a capture of nothing": frame(protocol.CaptureCommand(None, None)),  # type: ignore[arg-type]
    "garbage for a rank": frame(protocol.RelayedEvent(0, b"garbage" * 100)),
    "an event that is no request": _relayed(LogEvent("stdout", "x"), DoneReply(1)),
    "a request of another type": _relayed(AskRequest(1, 5)),  # type: ignore[arg-type]
    "an event of a rank": frame(MetricEvent({"loss": 1.0})),
}


@pytest.mark.parametrize(("sends", "then"), [*PEERS, *((sends, "silent") for sends in COMMANDS)])
def test_a_peer_that_sends_garbage_does_no_harm(shared: Run, sends: str, then: str) -> None:
    with misbehaving_peer(str(_socket_of(shared)), {**SENDS, **COMMANDS}[sends], then):
        assert shared.ask("1 + 1", timeout=10.0) == {0: 2}
        assert shared.status == "running"
    assert shared.status == "running"


ANSWERS = {
    **SENDS,
    "garbage as records": frame(protocol.RecordsEvent(1, b"garbage" * 100)),
    "garbage as the history": frame(protocol.HistoryEvent(1, b"garbage" * 100)),
    "a text as the position": frame(protocol.HistoryEvent("all", b"")),  # type: ignore[arg-type]
    "garbage of a rank": frame(protocol.RelayedEvent(0, b"garbage" * 100)),
}


@pytest.mark.parametrize("sends", ANSWERS)
def test_a_supervisor_that_sends_garbage_does_not_harm_the_kernel(
    tmp_path: Path, sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "STATE_SECONDS", 0.0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = control_client.ControlClient(tmp_path / "s")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(ANSWERS[sends])
        assert client.connected, "the run may still be running"
    until(lambda: not client.connected)


# ---- suspended kernels

_ATTACHES = """
import sys, time, notebook_accelerate
run = notebook_accelerate.attach(sys.argv[1])
assert run.ask("'asked here'", timeout=30) == {0: "asked here"}
print("attached", flush=True)
for line in sys.stdin:
    print(run.ask("6 * 7", timeout=30), flush=True)
"""


@contextmanager
def _kernel(name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _ATTACHES, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        try:
            yield process
        finally:
            process.kill()


def test_suspended_kernels_delay_no_one_and_continue_reading_later(state: Path) -> None:
    run = _launch("crowded")
    with ExitStack() as kernels:
        others = [kernels.enter_context(_kernel("crowded")) for _ in range(3)]
        for other in others:
            other.send_signal(signal.SIGSTOP)
        for _ in range(20):
            assert len(run.ask("'x' * 1_000_000", timeout=60.0)[0]) == 1_000_000
        assert not any(other.poll() for other in others), "the other kernels are still suspended"
        for other in others:
            other.send_signal(signal.SIGCONT)
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("ask\n")
            other.stdin.flush()
            assert other.stdout.readline() == "{0: 42}\n"


# ---- a suspended supervisor


def test_a_suspended_supervisor_does_not_delay_the_table_of_runs(state: Path) -> None:
    run = _launch("asleep")
    supervisor = supervisor_of(run)
    disconnect_all()
    supervisor.suspend()
    until(lambda: supervisor.status() == psutil.STATUS_STOPPED)
    with ExitStack() as connections:
        _fill_queue(_socket_of(run), connections)
        listed = runs()  # Without a timeout, connecting would block until the supervisor is resumed.
        (found,) = (each for each in listed if each.config.detach)
        assert found.name == "asleep"
        assert f"process {supervisor.pid}" in found._internals.commands.refusal
        with pytest.warns(UserWarning, match=rf"process {supervisor.pid} .*kill -CONT {supervisor.pid}"):
            shutdown(all=True)
    assert not supervisor.is_running()


def test_supervisors_that_accept_no_connection_are_killed_at_the_same_time(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If supervisors were killed one after the other, each would take a grace period."""
    supervisors = [supervisor_of(_launch(name)) for name in ("one", "two")]
    disconnect_all()
    for supervisor in supervisors:
        supervisor.suspend()
    # A supervisor that is about to stop may still accept a connection, which would leave room in its queue.
    until(lambda: all(supervisor.status() == psutil.STATUS_STOPPED for supervisor in supervisors))
    steps: list[str] = []
    kill, silence_text = ProcessIdentity.kill_tree, control_client.silence_text
    monkeypatch.setattr(ProcessIdentity, "kill_tree", lambda each: (steps.append("killed"), kill(each)))
    monkeypatch.setattr(attaching, "silence_text", lambda *each: (steps.append("named"), silence_text(*each))[1])
    with ExitStack() as connections:
        for entry in run_directory.entries():
            _fill_queue(Path(entry.socket), connections)
        with pytest.warns(UserWarning, match="is suspended"):
            attaching.stop_detached(grace=3.0)
    assert steps == ["named", "named", "killed", "killed"]
    until(lambda: not processes_of(state))


def _fill_queue(path: Path, connections: ExitStack) -> None:
    """Open connections until the queue of a process that accepts none is full."""
    while True:
        connection = connections.enter_context(socket.socket(socket.AF_UNIX))
        connection.setblocking(False)
        with short_socket_path(path) as address:
            error = connection.connect_ex(address)
        if error == errno.EAGAIN:
            return
        assert not error


@pytest.mark.parametrize("ranks_too", [False, True])
@pytest.mark.parametrize("how", ["stop", "shutdown"])
def test_a_suspended_supervisor_is_reported_and_killed(
    state: Path, how: str, ranks_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "ANSWER_SECONDS", 2.0)
    run = _launch("asleep")
    supervisor = supervisor_of(run)
    for process in [supervisor, *(supervisor.children(recursive=True) if ranks_too else ())]:
        process.suspend()
    with pytest.warns(UserWarning, match=rf"process {supervisor.pid} .*is suspended; .*kill -CONT {supervisor.pid}"):
        run.stop(grace=0.5) if how == "stop" else shutdown(all=True)
    assert run.status == "lost"
    assert any("is suspended" in text for text in run._internals.journal.state.warnings)
    until(lambda: not processes_of(state), seconds=20)


def test_a_supervisor_resumed_in_time_stops_the_run(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "ANSWER_SECONDS", 2.0)
    run = _launch("awake")
    supervisor = supervisor_of(run)
    supervisor.suspend()
    run.stop(grace=30.0, wait=False)
    time.sleep(4.0)
    supervisor.resume()
    assert run.wait(60)
    assert run.status == "stopped"


def test_attaching_works_while_the_supervisor_is_suspended(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _launch("waits")
    monkeypatch.setattr(control_client, "STATE_SECONDS", 1e6)
    supervisor = supervisor_of(run)
    disconnect_all()
    supervisor.suspend()
    again = attach("waits")
    supervisor.resume()
    until(lambda: again._internals.commands.requests.open_ranks() == [0])
    assert again.ask("'back'", timeout=20.0) == {0: "back"}
    again.stop(grace=1.0)
    assert again.status == "stopped"
