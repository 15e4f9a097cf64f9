"""The verdicts of diagnoses, computed from facts that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from notebook_accelerate.debugging.diagnosis import RankPosition, diagnose, rank_condition
from notebook_accelerate.telemetry import FrameInfo
from notebook_accelerate.telemetry.debug_protocol import Collective

NOW = 1000.0


def _name(frame: FrameInfo) -> str:
    return f"{frame.filename}, line {frame.lineno}"


def _at(line: int, source: str = "", file: str = "cell") -> tuple[FrameInfo, ...]:
    library = FrameInfo("/venv/lib/python3.11/site-packages/torch/distributed.py", 9, "wait", "work.wait()")
    return FrameInfo(file, line, "train", source), library


def _call(number: int, operation: str = "all_reduce", size: int = 128, waited: float = 31.0, group: str = "0") -> Any:
    return Collective(group, number, operation, ((size,),), ("f32",), NOW - waited)


FOURTH = "all_reduce, the 4th collective (float32 [128])"


def _waiting(rank: int, call: Collective, line: int = 13) -> RankPosition:
    return RankPosition(rank, "running", _at(line, "dist.all_reduce(x)"), NOW - 31, (call,), {call.group: call.number})


def _verdict(*places: RankPosition) -> str:
    return diagnose(places, _name, NOW).verdict


def _cause(*places: RankPosition) -> str:
    return diagnose(places, _name, NOW).cause


def test_a_rank_that_never_arrived_is_named_with_its_line() -> None:
    absent = RankPosition(1, "running", _at(12, "time.sleep(60)"), NOW - 31, (), {"0": 3})
    verdict = _verdict(_waiting(0, _call(4)), absent, _waiting(2, _call(4)), _waiting(3, _call(4)))
    assert verdict == (
        f"rank 1 never reached {FOURTH}; it is at cell, line 12: time.sleep(60); ranks 0, 2, 3 have waited 31 s"
    )


def test_several_absent_ranks_are_each_named() -> None:
    absent = [RankPosition(rank, "running", _at(10 + rank), NOW, (), {"0": 3}) for rank in (1, 2)]
    assert _verdict(_waiting(0, _call(4)), *absent) == (
        f"ranks 1, 2 never reached {FOURTH}; rank 1 is at cell, line 11; rank 2 is at cell, line 12; "
        "rank 0 has waited 31 s"
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (_call(4, size=64), "rank 1 called all_reduce (float32 [64])"),
        (_call(4, "broadcast"), "rank 1 called broadcast (float32 [128])"),
        (_call(4)._replace(dtypes=("bf16",)), "rank 1 called all_reduce (bfloat16 [128])"),
    ],
)
def test_disagreeing_ranks_are_listed_together(other: Collective, text: str) -> None:
    assert _verdict(_waiting(0, _call(4)), _waiting(1, other), _waiting(2, _call(4))) == (
        f"the ranks disagree at the 4th collective: ranks 0, 2 called all_reduce (float32 [128]), {text}"
    )


@pytest.mark.parametrize(
    ("number", "dtypes", "shapes", "text"),
    [
        (1, ("u8",), ((1024,),), "all_gather, the 1st collective (1,024 bytes)"),
        (2, ("f16", "i64"), ((2, 3), ()), "all_gather, the 2nd collective (float16 [2, 3], int64 [])"),
        (3, ("bool",), ((4,),), "all_gather, the 3rd collective (bool [4])"),
        (11, ("float8_e4m3fn",), ((8,),), "all_gather, the 11th collective (float8_e4m3fn [8])"),
        (112, (), (), "all_gather, the 112th collective"),
        (22, ("u8", "u8"), ((), (7,)), "all_gather, the 22nd collective (8 bytes)"),
    ],
)
def test_a_collective_is_described_in_words(
    number: int, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], text: str
) -> None:
    assert Collective("0", number, "all_gather", shapes, dtypes, NOW).text() == text


def test_a_rank_that_ended_early_is_named() -> None:
    assert _verdict(_waiting(0, _call(2)), RankPosition(1, "succeeded")) == (
        "rank 1 never reached all_reduce, the 2nd collective (float32 [128]); it has already ended (succeeded); "
        "rank 0 has waited 31 s"
    )


def test_a_common_collective_is_reported_for_all_ranks() -> None:
    verdict = _verdict(_waiting(0, _call(4)), _waiting(1, _call(4)))
    assert verdict.startswith(f"all ranks wait in {FOURTH}, for 31 s")


def test_a_rank_left_behind_in_a_collective_is_named() -> None:
    ahead = RankPosition(1, "running", _at(20), NOW, (), {"0": 9})
    assert _verdict(_waiting(0, _call(4)), ahead) == (f"rank 0 has waited 31 s in {FOURTH}, which rank 1 already left")


def test_the_cause_is_the_verdict_without_its_times() -> None:
    absent = RankPosition(1, "running", _at(12, "time.sleep(60)"), NOW - 31, (), {"0": 3})
    assert _cause(_waiting(0, _call(4)), absent, _waiting(2, _call(4, waited=1.5))).endswith(
        "line 12: time.sleep(60); ranks 0, 2 wait"
    )
    ahead = RankPosition(1, "running", _at(20), NOW, (), {"0": 9})
    assert _cause(_waiting(0, _call(4)), ahead) == f"rank 0 waits in {FOURTH}, which rank 1 already left"
    together = _cause(_waiting(0, _call(4)), _waiting(1, _call(4)))
    assert together.startswith(f"all ranks wait in {FOURTH}: the network")


def test_without_waiting_ranks_the_verdict_says_so() -> None:
    assert _verdict(RankPosition(0, "running", _at(1), NOW)) == "no rank waits in a collective, and all are moving"
    stuck = RankPosition(1, "running", _at(5, "next(batches)"), NOW - 40)
    assert _verdict(RankPosition(0, "running", _at(1), NOW), stuck) == (
        "no rank waits in a collective; rank 1 is at cell, line 5: next(batches)"
    )


def test_a_healthy_run_is_not_reported_as_waiting() -> None:
    """Healthy ranks may spend most of their time in collectives, but each wait is short."""
    short = [
        RankPosition(rank, "running", _at(13), NOW - 0.1, (call,), {"0": call.number})
        for rank, call in enumerate([_call(4, waited=0.1), _call(5, waited=0.0)])
    ]
    assert _verdict(*short) == "no rank is stuck: all are moving"
    assert _verdict(short[0], RankPosition(1, "running", _at(20), NOW - 0.1, (), {"0": 9})).endswith("all are moving")
    stuck = RankPosition(1, "running", _at(20, "sleep()"), NOW - 9, (), {"0": 3})
    assert "rank 1 never reached" in _verdict(short[0], stuck)
    assert "it has already ended" in _verdict(short[0], RankPosition(1, "succeeded"))
    assert "disagree" in _verdict(short[0], replace(short[0], rank=1, waiting=(_call(4, "broadcast", waited=0.1),)))


def test_paused_ranks_are_named_with_their_lines() -> None:
    paused = [
        RankPosition(rank, "running", _at(12), NOW - 60, note="paused at line 12", paused=True) for rank in (0, 1)
    ]
    assert _verdict(*paused) == "paused by you at cell, line 12; run.unpause() continues"
    other = replace(paused[1], frames=_at(14))
    assert _verdict(paused[0], other) == (
        "paused by you: rank 0 at cell, line 12, rank 1 at cell, line 14; run.unpause() continues"
    )
    assert _verdict(paused[0], _waiting(1, _call(4))) == (
        "paused by you: rank 0 at cell, line 12; run.unpause() continues"
    )


def test_a_rank_that_cannot_answer_is_inspected_from_outside() -> None:
    mute = RankPosition(1, "running", _at(7), note="it holds the GIL in native code", answered=False)
    assert _verdict(RankPosition(0, "running", _at(1), NOW), mute) == (
        "no rank waits in a collective; rank 1 is at cell, line 7 (it holds the GIL in native code)"
    )


def test_an_unseen_rank_is_reported() -> None:
    assert "it cannot be seen" in _verdict(_waiting(0, _call(1)), RankPosition(1, "running", answered=False))


def test_a_run_without_running_ranks_is_reported() -> None:
    assert _verdict(RankPosition(0, "succeeded"), RankPosition(1, "failed")) == "no rank is running"


def test_several_groups_are_distinguished() -> None:
    """Each group numbers its own collectives. The verdict is about the open collective with the lowest number."""
    verdict = _verdict(
        _waiting(0, _call(7)),
        RankPosition(1, "running", _at(30), NOW - 9, (_call(2, group="pair"),), {"0": 6, "pair": 2}),
    )
    assert verdict == (
        "rank 0 never reached all_reduce, the 2nd collective (float32 [128]); it is at cell, line 13: "
        "dist.all_reduce(x), in all_reduce, the 7th collective (float32 [128]); rank 1 has waited 31 s"
    )


def test_ranks_at_the_same_place_form_a_group_and_the_largest_is_first() -> None:
    found = diagnose(
        [RankPosition(0, "running", _at(3), NOW, (), {"0": 1}), *(_waiting(r, _call(2)) for r in (1, 2, 3))], _name, NOW
    )
    assert found.groups == ((1, 2, 3), (0,))
    assert found.text.splitlines()[1:] == [
        f"ranks 1–3: cell, line 13, in train: dist.all_reduce(x); has waited 31 s in {FOURTH}".replace("4th", "2nd"),
        "rank 0: cell, line 3, in train",
    ]
    assert "<strong>rank 0 never reached" in found._repr_html_()


def test_the_users_frame_is_the_innermost_outside_of_libraries() -> None:
    own = FrameInfo("/x/notebook_accelerate/collectives/operations.py", 3, "gather", "")
    place = RankPosition(0, "running", (*_at(4), own))
    assert place.user_frame == _at(4)[0]
    only_library = RankPosition(0, "running", (own,))
    assert only_library.user_frame == own


GUARDED = """\
def train():
    if is_first:
        start()
    if accelerator.is_main_process:
        for batch in loader:

            accelerator.gather(batch)
    accelerator.reduce(total)
    if rank == 0 and step % 10 == 0: dist.barrier()
    elif dist.get_rank() == 0:
        dist.barrier()
    with guard_rank:
        dist.barrier()
""".splitlines()


@pytest.mark.parametrize(
    ("line", "guard"),
    [
        (7, "if accelerator.is_main_process:"),
        (8, ""),
        (11, "elif dist.get_rank() == 0:"),
        (13, ""),
        (3, ""),
        (0, ""),
        (99, ""),
    ],
)
def test_a_condition_on_the_rank_is_found(line: int, guard: str) -> None:
    assert rank_condition(GUARDED, line) == guard
