"""Exits of ranks that are being stopped count as failures only if the stop does not explain them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from notebook_accelerate.errors import RunTimeoutError, WorkerError
from notebook_accelerate.launch.state.prompts import PromptQueue
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank
from notebook_accelerate.telemetry import ExceptionInfo, FrameInfo, RankFailure
from tests.support.runs import make_run

LOST = ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:23")
LATE = StopReason(RunTimeoutError, "the run reached its timeout of 1 s")
MAKES_ROOM = StopReason(WorkerError, "a late node joins")


def failed(rank: int, kind: str, message: str) -> RankFailure:
    frames = (FrameInfo("train.py", 3, "train", "x"),)
    return RankFailure(rank, "exception", 1.0, f"{kind}: {message}", (ExceptionInfo(kind, message, frames),))


class Attempt:
    """An attempt with two ranks that have no processes, and the sequence that stops them."""

    def __init__(self) -> None:
        self.journal = make_run()._internals.journal
        self.stops = StopSequence(self.journal, PromptQueue(), hold=False)
        self.ranks = [
            SupervisedRank(cast("Any", SimpleNamespace(rank=rank, host="")), cast("Any", None)) for rank in (0, 1)
        ]

    def state(self, rank: int) -> str:
        return self.journal.state.rank(rank).state


@pytest.fixture
def attempt() -> Attempt:
    return Attempt()


@pytest.mark.parametrize("reason", [USER_STOP, LATE])
def test_a_rank_that_lost_a_stopped_peer_before_its_own_signal_arrived_counts_as_stopped(
    attempt: Attempt, reason: StopReason
) -> None:
    attempt.stops.stop(5.0, reason)
    attempt.stops.fail(failed(1, *LOST), attempt.ranks[1])
    assert attempt.state(1) == "stopped"
    assert attempt.stops.failures == []


def test_an_error_that_a_rank_raises_itself_while_it_is_stopped_is_a_failure(attempt: Attempt) -> None:
    attempt.stops.stop(5.0, USER_STOP)
    attempt.stops.fail(failed(1, "OSError", "no space left on device"), attempt.ranks[1])
    assert attempt.state(1) == "failed"
    assert [failure.rank for failure in attempt.stops.failures] == [1]


def test_ranks_that_are_stopped_because_of_a_late_host_lose_each_other(attempt: Attempt) -> None:
    assert attempt.stops.make_room(MAKES_ROOM)
    assert not attempt.stops.make_room(MAKES_ROOM), "the stop sequence has started"
    attempt.stops.fail(failed(1, *LOST), attempt.ranks[1])
    assert attempt.state(1) == "failed"
    assert attempt.stops.reason is MAKES_ROOM


def begun(stops: StopSequence) -> None:
    """Let the other ranks' grace period pass. During it, they may still fail by themselves."""
    while (due := stops.next_due()) is not None and due > time.monotonic():
        time.sleep(due - time.monotonic())
    stops.signal_when_due([])


def test_a_machine_that_disappears_while_others_are_stopped_for_their_failure_was_lost(attempt: Attempt) -> None:
    attempt.stops.fail(failed(0, *LOST), attempt.ranks[0])
    begun(attempt.stops)
    attempt.stops.rank_exited(attempt.ranks[1], Exit(lost="node 1 (there) was lost"))
    assert [failure.kind for failure in attempt.stops.failures] == ["exception", "lost"]


@pytest.mark.parametrize("end", [Exit(signal=2), Exit(signal=9), Exit(code=1)])
def test_a_rank_that_exits_because_of_the_stop_signal_is_not_a_failure(attempt: Attempt, end: Exit) -> None:
    attempt.stops.fail(failed(0, "KeyError", "'x'"), attempt.ranks[0])
    begun(attempt.stops)
    attempt.stops.rank_exited(attempt.ranks[1], end)
    assert attempt.state(1) == "stopped"
    assert [failure.rank for failure in attempt.stops.failures] == [0]
