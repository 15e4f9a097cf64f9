"""The failures that the notebooks of a run exchange."""

from __future__ import annotations

import json

from notebook_accelerate.launch.hosts.rendezvous.membership import Node, ranks_of
from notebook_accelerate.launch.hosts.rendezvous.peer_failures import from_json, lost_failures, merged, to_json
from notebook_accelerate.telemetry import ExceptionInfo, RankFailure

NODES = [
    Node(name="a", host="left", pid=1, node_rank=0, processes=2),
    Node(name="b", host="right", pid=2, node_rank=1, processes=2),
]
KEY_ERROR = (ExceptionInfo("KeyError", "'x'", ()),)


def test_each_node_has_its_ranks() -> None:
    assert [list(ranks_of(NODES, index)) for index in range(2)] == [[0, 1], [2, 3]]


def test_a_failure_is_converted_without_its_exception() -> None:
    failure = RankFailure(3, "exception", 12.5, "KeyError: 'x'", KEY_ERROR, KeyError("x"), signal=9)
    found = from_json(json.loads(json.dumps(to_json([failure], 1))))
    assert found == [RankFailure(3, "exception", 12.5, "KeyError: 'x'", KEY_ERROR, signal=9)]


def test_a_failure_in_the_format_of_another_version_is_skipped() -> None:
    reported = to_json([RankFailure(0, "exit", 1.0, "exit status 3")], 0)
    assert from_json([{"rank": 1}, {**reported[0], "chain": 7}, *reported]) == [
        RankFailure(0, "exit", 1.0, "exit status 3")
    ]


def test_every_rank_of_a_lost_node_is_lost() -> None:
    lost = lost_failures(NODES, {"1": "its kernel ended"})
    assert [(failure.rank, failure.kind, failure.message) for failure in lost] == [
        (rank, "lost", "node 1 (right) was lost: its kernel ended") for rank in (2, 3)
    ]


def test_own_failures_keep_their_exceptions_and_the_others_have_the_names_of_their_cells() -> None:
    error = KeyError("x")
    own = RankFailure(0, "exception", 2.0, "KeyError: 'x'", KEY_ERROR, error)
    seen = RankFailure(2, "exception", 1.0, "KeyError: 'x'", (ExceptionInfo("KeyError", "seen here", ()),), error)
    named = (ExceptionInfo("KeyError", "reported there", ()),)
    reported = [RankFailure(2, "exception", 1.0, "KeyError: 'x'", named), RankFailure(3, "exit", 3.0, "exit status 1")]
    found = merged([own, seen], range(2), reported, ())
    assert [failure.rank for failure in found] == [2, 0, 3]
    assert found[0].chain == named
    assert found[0].exception is error
    assert found[1].chain == KEY_ERROR


def test_failures_after_a_lost_node_are_its_consequences() -> None:
    lost = lost_failures(NODES, {"1": "its kernel ended"})
    reported = [RankFailure(2, "exit", 1.0, "exit status 1")]
    found = merged([RankFailure(0, "exit", 2.0, "exit status 1")], range(2), reported, lost)
    assert [(failure.rank, failure.kind, failure.consequence) for failure in found] == [
        (2, "lost", False), (3, "lost", False), (0, "exit", True),
    ]  # fmt: skip
