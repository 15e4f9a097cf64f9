"""A run's thread reads the messages of its ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from selectors import EVENT_READ

import pytest

from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, dispatch
from notebook_accelerate.launch.processes.rank_pipes import PIPE_BYTES, RankPipes
from notebook_accelerate.launch.processes.rank_process import OwnChild, ProcessBackend, RankProcess
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.run_events import AttemptStarted
from notebook_accelerate.launch.supervisor import rank_group
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason
from notebook_accelerate.telemetry import Channel, MetricEvent, StatusEvent
from notebook_accelerate.telemetry.channel import READ_BYTES
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from tests.support.runs import plan_run, supervisor_of
from tests.support.simulated import Received, SimulatedRank


def test_callbacks_closed_earlier_in_a_batch_are_not_called() -> None:
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []
    with DispatchSelector() as selector:

        def end_both(number: int) -> None:
            called.append(number)
            for reader, _ in pipes:
                selector.unregister(reader)
                os.close(reader)

        for number, (reader, writer) in enumerate(pipes):
            selector.register(reader, EVENT_READ, lambda n=number: end_both(n))
            os.write(writer, b"!")
        dispatch(selector, 5.0)
    for _, writer in pipes:
        os.close(writer)
    assert len(called) == 1


class _Slow(Received):
    """A rank's messages, which are read more slowly than the rank writes them."""

    heard = 0

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        self.heard += len(data)
        assert self.heard <= 4 * PIPE_BYTES, "the supervisor must not read forever"
        time.sleep(0.02)


def test_processes_that_a_rank_leaves_running_may_write_without_end() -> None:
    ends, hearing = RankPipes(), _Slow()
    write = f"import os\nwhile True: os.write({ends.rank_stdout}, bytes({READ_BYTES}))"
    command = [sys.executable, "-S", "-c", write]
    with subprocess.Popen(command, pass_fds=[ends.rank_stdout], start_new_session=True) as left:
        process = OwnChild(0, left.pid, ends, None)
        try:
            while not hearing.heard:
                process.drain(hearing, channel=False)
            hearing.heard = 0
            process.drain(hearing, channel=False)
        finally:
            ends.close_rank_side()
            process.close()  # End the processes that the rank has left running.
    assert hearing.heard
    assert not hearing.calls


class _Backend(ProcessBackend):
    """A backend that starts ranks without processes. Tests write to the ranks' channels."""

    def __init__(self) -> None:
        super().__init__(print, ())
        self.channels: list[Channel] = []
        self.outputs: list[int] = []
        self.lives: list[socket.socket] = []

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        ends, (life, theirs) = RankPipes(), socket.socketpair()
        self.channels.append(Channel(ends.rank_channel))
        self.outputs += [ends.rank_stdout, ends.rank_stderr]
        self.lives.append(theirs)
        return SimulatedRank(order.rank, os.getpid(), ends, life)

    def end(self) -> None:
        for end in (*self.channels, *self.lives):
            end.close()
        for descriptor in self.outputs:
            os.close(descriptor)


@pytest.fixture
def started() -> Iterator[tuple[Run, RankGroup, _Backend]]:
    """Yield a run of two ranks, its group, and the ranks' ends of their channels."""
    run, backend = plan_run(2, method="spawn"), _Backend()
    supervisor = supervisor_of(run)
    assert run.plan is not None
    run._internals.journal.append(AttemptStarted(0))
    group = RankGroup(supervisor, run.plan)
    group.start(backend, 0, capture_inherited_state())
    yield run, group, backend
    backend.end()
    group.abandon()
    supervisor.commands.close()


def test_messages_of_ranks_in_one_turn_are_appended_together(started: tuple[Run, RankGroup, _Backend]) -> None:
    run, group, backend = started
    batches: list[list[int]] = []
    run._internals.journal.subscribe(lambda records: batches.append([record.rank for record in records]))
    backend.channels[0].send(MetricEvent({"loss": 1.0}, 1), MetricEvent({"loss": 2.0}, 2))
    backend.channels[1].send(MetricEvent({"loss": 3.0}, 1))
    group._wait(5.0)
    assert batches == [[0, 0, 1]]
    assert run.metrics["loss"].rank(0).values.tolist() == [1.0, 2.0]


def test_a_rank_that_survives_sigkill_is_given_up(
    started: tuple[Run, RankGroup, _Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be in a system call of a driver that never returns. Its process then remains, but the run ends."""
    run, group, _ = started
    monkeypatch.setattr(rank_group, "UNKILLABLE_SECONDS", 0.3)
    group.stop(0.1, StopReason(RunStoppedError, "stopped by the test"))
    group.supervise()
    assert [info.state for info in run.ranks] == ["stopped", "stopped"]
    assert sum("has not ended 0.3 s after SIGKILL" in text for text in run.warnings) == 2


def test_changes_of_the_run_are_appended_after_earlier_messages_of_ranks(
    started: tuple[Run, RankGroup, _Backend],
) -> None:
    run, group, backend = started
    names: list[str] = []
    run._internals.journal.subscribe(lambda records: names.extend(type(record.event).__name__ for record in records))
    backend.channels[0].send(MetricEvent({"loss": 1.0}, 1))
    backend.channels[1].send(StatusEvent("running"), MetricEvent({"loss": 3.0}, 1))
    os.write(backend.outputs[2], b"a line\n")
    group._wait(5.0)
    assert names == ["MetricEvent", "StatusEvent", "MetricEvent", "RankRunning", "LogEvent"]


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(("spend", "counted"), [(time.sleep, False), (_work, True)], ids=["suspended", "busy"])
def test_time_limits_exclude_a_suspension_while_messages_are_handled(
    started: tuple[Run, RankGroup, _Backend],
    monkeypatch: pytest.MonkeyPatch,
    spend: Callable[[float], None],
    counted: bool,
) -> None:
    run, group, backend = started
    monkeypatch.setattr(rank_group, "GAP_SECONDS", 0.2)
    run._internals.journal.subscribe(lambda _: spend(0.6))
    backend.channels[0].send(MetricEvent({"loss": 1.0}, 1))
    clock = group._supervisor.clock
    before = clock.now()
    group._wait(5.0)
    group._check_limits()
    assert (clock.now() - before > 0.5) == counted
