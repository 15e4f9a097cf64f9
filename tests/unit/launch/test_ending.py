"""What a rank's end means when it comes while the ranks are stopped."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notebook_accelerate.errors import RunTimeoutError, WorkerError
from notebook_accelerate.launch.processes.rank_process import Exit
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank
from notebook_accelerate.telemetry import ExceptionInfo, FrameInfo, RankFailure
from tests.support.runs import make_run

LOST = ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:23")
LATE = StopReason(RunTimeoutError, "the run reached its timeout of 1 s")
ELSEWHERE = StopReason(WorkerError, "rank 0: KeyError")


def failed(rank: int, kind: str, message: str) -> RankFailure:
    frames = (FrameInfo("train.py", 3, "train", "x"),)
    return RankFailure(rank, "exception", 1.0, f"{kind}: {message}", (ExceptionInfo(kind, message, frames),))


def ending_of_two() -> tuple[StopSequence, list[SupervisedRank]]:
    run = make_run()
    nobody: Any = None  # no rank has a process here
    return StopSequence(run), [SupervisedRank(nobody, info, {}) for info in run.ranks]


@pytest.mark.parametrize("reason", [USER_STOP, LATE])
def test_a_rank_that_lost_a_stopped_one_before_its_own_signal_came_is_stopped_too(reason: StopReason) -> None:
    ending, ranks = ending_of_two()
    ending.stop(5.0, reason)
    ending.fail(failed(1, *LOST), ranks[1])
    assert ranks[1].info.state == "stopped"
    assert ending.failures == []


def test_what_a_rank_does_itself_while_it_is_stopped_is_a_failure() -> None:
    ending, ranks = ending_of_two()
    ending.stop(5.0, USER_STOP)
    ending.fail(failed(1, "OSError", "no space left on device"), ranks[1])
    assert ranks[1].info.state == "failed"
    assert [failure.rank for failure in ending.failures] == [1]


def test_what_followed_the_failure_of_another_notebooks_rank_is_told() -> None:
    ending, ranks = ending_of_two()
    ending.follow(ELSEWHERE)
    ending.fail(failed(1, *LOST), ranks[1])
    assert ranks[1].info.state == "failed"


def begun(ending: StopSequence) -> None:
    """Let the others' time to fail by themselves pass."""
    while (due := ending.next_due()) is not None and due > time.monotonic():
        time.sleep(due - time.monotonic())
    ending.climb([])


def test_a_machine_that_goes_while_others_are_stopped_for_their_failure_was_lost() -> None:
    ending, ranks = ending_of_two()
    ending.fail(failed(0, *LOST), ranks[0])
    begun(ending)
    ending.judge(ranks[1], Exit(lost="node 1 (there) was lost"))
    assert [failure.kind for failure in ending.failures] == ["exception", "lost"]


@pytest.mark.parametrize("end", [Exit(signal=2), Exit(signal=9), Exit(code=1)])
def test_a_rank_that_ends_of_what_stops_it_has_not_failed(end: Exit) -> None:
    ending, ranks = ending_of_two()
    ending.fail(failed(0, "KeyError", "'x'"), ranks[0])
    begun(ending)
    ending.judge(ranks[1], end)
    assert ranks[1].info.state == "stopped"
    assert [failure.rank for failure in ending.failures] == [0]
