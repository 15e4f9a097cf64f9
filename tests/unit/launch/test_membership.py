"""The decisions: who takes part, who is missing, and whether all end or restart."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accelerate.launch.hosts.rendezvous.membership import (
    Node,
    decide,
    has_room,
    in_order,
    late_text,
    problem,
    ranks_of,
    timeout_text,
    version_note,
    waiting_text,
)


def _node(rank: int, **values: Any) -> Node:
    given = {"name": f"n{rank}", "host": f"host{rank}", "pid": 100 + rank, "node_rank": rank, "processes": rank + 1}
    return Node(**{**given, **values})


def test_a_node_is_converted_to_a_dict_and_back() -> None:
    node = _node(1, accelerator="cuda", hosting=True)
    assert Node.from_dict({**node.as_dict(), "of a newer version": 1}) == node


def test_ranks_are_counted_in_the_order_of_the_nodes() -> None:
    nodes = [_node(0, order=1), _node(0, name="host", order=2, hosting=True), _node(1, order=0)]
    ordered = in_order(nodes)
    assert [node.name for node in ordered] == ["host", "n0", "n1"]
    assert [ranks_of(ordered, index).start for index in range(3)] == [0, 1, 2]


def test_the_text_lists_the_missing_notebooks() -> None:
    assert waiting_text("static", 2, [_node(0)]) == "1 of 2 nodes have joined; waiting for node 1"
    assert waiting_text("static", 4, [_node(2)]) == "1 of 4 nodes have joined; waiting for nodes 0, 1, 3"
    assert waiting_text("c10d", 3, [_node(0)]) == "1 of 3 nodes have joined (host0); waiting for 2 more"
    assert waiting_text("static", 2, [_node(0), _node(1)]) == "2 of 2 nodes have joined"


def test_the_join_timeout_lists_the_missing_notebooks() -> None:
    text = timeout_text("static", 2, [_node(0)], 5)
    assert text.startswith("node 1 did not join within 5 s (rdzv_conf={'join_timeout': 5})")
    assert "1 node did not join" in timeout_text("c10d", 3, [_node(0), _node(1)], 5)
    assert "2 of 3 nodes have joined (host0, host1)" in timeout_text("c10d", 3, [_node(0), _node(1)], 5)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (
            [_node(0), _node(0, name="other")],
            "have node_rank=0: host0 (kernel 100) and host0 (kernel 100)",
        ),
        ([_node(0), _node(1, num_nodes=3)], "num_nodes=2 and 3"),
        ([_node(0), _node(1, accelerator="cuda")], "cpu and cuda"),
    ],
)
def test_notebooks_that_cannot_form_one_run(nodes: list[Node], text: str) -> None:
    assert text in problem("static", nodes)


def test_equal_node_ranks_are_allowed_with_c10d() -> None:
    assert not problem("c10d", [_node(0), _node(0, name="other")])


def test_different_versions_of_torch_are_noted() -> None:
    assert not version_note([_node(0, torch="2.13.0+cpu"), _node(1, torch="2.13.0+cu130")])
    assert "node 1 (host1) 2.9.0" in version_note([_node(0, torch="2.13.0"), _node(1, torch="2.9.0")])


DONE = {"outcome": "succeeded", "text": "", "failures": []}
FAILED = {"outcome": "failed", "text": "rank 1: KeyError", "failures": []}
FOLLOWED = {"outcome": "followed", "text": "", "failures": []}
STOPPED = {"outcome": "stopped", "text": "it was stopped", "failures": []}


def _nodes(**values: Any) -> list[Node]:
    return [_node(0, hosting=True, **values), _node(1, **values), _node(2, **values)]


def _decide(ends: dict[str, Any], lost: dict[str, str] | None = None, **values: Any) -> dict[str, Any] | None:
    attempt, backend = values.pop("attempt", 0), values.pop("backend", "c10d")
    return decide(_nodes(**values), ends, lost or {}, attempt, backend)


def test_no_decision_before_all_ends_are_known() -> None:
    assert _decide({"n0": DONE, "n1": DONE}) is None
    assert _decide({"n0": DONE, "n1": DONE, "n2": DONE}) == {
        "action": "end", "reason": "", "remaining": ["n0", "n1", "n2"],
    }  # fmt: skip


def test_a_failure_ends_or_restarts_all() -> None:
    ends = {"n0": FOLLOWED, "n1": FAILED, "n2": DONE}
    found = _decide(ends)
    assert found is not None
    assert (found["action"], found["reason"]) == ("end", "node 1 (host1): rank 1: KeyError")
    assert _action(ends, max_restarts=1) == "restart"
    assert _action(ends, max_restarts=1, backend="static") == "restart"
    assert _action(ends, max_restarts=1, attempt=1) == "end"
    assert _action({**ends, "n0": STOPPED}, max_restarts=1) == "end"


def _action(ends: dict[str, Any], lost: dict[str, str] | None = None, **values: Any) -> str:
    found = _decide(ends, lost, **values)
    assert found is not None
    return str(found["action"])


def test_a_lost_node_ends_all_unless_those_left_are_enough() -> None:
    ends, lost = {"n0": FOLLOWED, "n1": FOLLOWED}, {"n2": "its kernel ended"}
    found = _decide(ends, lost, max_restarts=1, min_nodes=2)
    assert found == {
        "action": "restart", "reason": "node 2 (host2) was lost: its kernel ended", "remaining": ["n0", "n1"],
    }  # fmt: skip
    assert _action(ends, lost, max_restarts=1, min_nodes=3) == "end"
    assert _action(ends, lost, max_restarts=0, min_nodes=2) == "end"
    assert _action(ends, lost, max_restarts=1, min_nodes=2, backend="static") == "end"
    assert _action({"n1": FOLLOWED, "n2": FOLLOWED}, {"n0": "gone"}, max_restarts=1, min_nodes=1) == "end"


def test_a_late_notebook_receives_the_members() -> None:
    members = [_node(0), _node(1)]
    who = "host0 (kernel 100), host1 (kernel 101)"
    text = late_text(members, 3)
    assert f"began without this node, with 2 of 3: {who}; it includes another by a restart" in text
    assert "max_restarts=0 leaves none" in text
    full = late_text(members, 2)
    assert full.startswith(f"the run has its 2 nodes already: {who}")
    assert full.endswith("with num_nodes=3")


def test_a_late_notebook_is_included_at_a_restart() -> None:
    members = [_node(rank, num_nodes=3, max_restarts=1) for rank in range(2)]
    late = _node(0, name="late", num_nodes=3)
    assert has_room(members, 0, "c10d")
    assert not has_room(members, 1, "c10d")
    assert not has_room(members, 0, "static")
    assert not has_room([*members, late], 0, "c10d")
    followed = {node.name: {"outcome": "followed"} for node in members}
    decision = decide(members, followed, {}, 0, "c10d", [late])
    assert decision == {"action": "restart", "reason": decision["reason"], "remaining": ["n0", "n1", "late"]}  # type: ignore[index]
    assert "host0 (kernel 100)" in decision["reason"]
    gone_again = decide(members, followed, {}, 0, "c10d")
    assert gone_again == {"action": "restart", "reason": "", "remaining": ["n0", "n1"]}
    succeeded = {node.name: {"outcome": "succeeded"} for node in members}
    assert decide(members, succeeded, {}, 0, "c10d", [late]) == {
        "action": "end",
        "reason": "",
        "remaining": ["n0", "n1"],
    }
