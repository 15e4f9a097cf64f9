"""The shard reports of all ranks as a table, in text, and as a drawing."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.launch.report import mesh_diagram
from notebook_accelerate.launch.report.run_report import Report
from notebook_accelerate.telemetry.sharding import KINDS, ShardReport, ShardSizes
from tests.support.runs import feed, make_run
from tests.support.shard_reports import MB, hybrid, megatron, mesh_reports, zero


def test_ranks_with_equal_reports_are_one_group() -> None:
    rows = mesh_diagram.sharding_rows(hybrid())
    assert [row.ranks for row in rows] == ["each rank", "", "", ""]
    assert [(row.kind, row.total, row.per_rank) for row in rows] == [
        ("parameters", "64.0 MB", "32.0 MB"),
        ("gradients", "64.0 MB", "32.0 MB"),
        ("optimizer state", "128 MB", "64.0 MB"),
        ("all", "256 MB", "128 MB"),
    ]
    assert {row.share for row in rows} == {0.5}
    assert rows[0].layout == "sharded over dp_shard, replicated on 2 ranks"


def test_pipeline_stages_are_separate_groups() -> None:
    rows = mesh_diagram.sharding_rows(megatron())
    assert [row.ranks for row in rows if row.ranks] == ["ranks 0–3 (pp 0)", "ranks 4–7 (pp 1)"]
    assert rows[2].layout == "sharded over dp × tp, layers over pp"
    assert (rows[0].total, rows[4].total) == ("64.0 MB", "128 MB")


@pytest.mark.parametrize(
    ("stage", "shares"), [(0, [1, 1, 1]), (1, [1, 1, 0.25]), (2, [1, 0.25, 0.25]), (3, [0.25] * 3)]
)
def test_the_stages_of_zero_are_named(stage: int, shares: list[float]) -> None:
    rows = mesh_diagram.sharding_rows(zero(stage))
    assert [row.share for row in rows[:3]] == shares
    assert rows[2].layout.endswith("offloaded to CPU memory")


def _uneven(count: int) -> dict[int, ShardReport]:
    """Return reports in which each rank holds slightly more than the one before."""
    ranks = mesh_reports({"dp_shard": count}, (1, ("dp_shard",)), (1, ("dp_shard",)), (2, ("dp_shard",)))
    return {
        rank: replace(one, held={kind: replace(held, here=MB + rank) for kind, held in one.held.items()})
        for rank, one in ranks.items()
    }


def test_ranks_of_too_many_sizes_are_merged() -> None:
    assert len(mesh_diagram.groups(_uneven(mesh_diagram.MAX_GROUPS))) == mesh_diagram.MAX_GROUPS
    many = {
        rank: replace(one, held={**one.held, KINDS[0]: ShardSizes(64 * MB, (1 + rank) * MB, ("dp_shard",))})
        for rank, one in _uneven(9).items()
    }
    (group,) = mesh_diagram.groups(many)
    assert group.ranks == list(range(9))
    assert mesh_diagram.sharding_rows(many)[0].per_rank == "1.00 MB – 9.00 MB"


def test_the_summary_names_strategy_mesh_and_units() -> None:
    assert mesh_diagram.summary(hybrid()) == "fsdp2 HYBRID_SHARD · dp_replicate 2 × dp_shard 2 · 3 units"
    assert (
        mesh_diagram.summary(mesh_reports({}, (1, ()), (1, ()), (2, ()), strategy="single"))
        == "single · one rank holds everything"
    )
    assert mesh_diagram.summary({}) == ""


def test_unknown_facts_are_reported_as_unknown() -> None:
    (one,) = mesh_reports({}, (1, ()), (1, ()), (2, ()), strategy="single").values()
    unknown = {0: replace(one, held={**one.held, KINDS[2]: ShardSizes(None, None)})}
    rows = mesh_diagram.sharding_rows(unknown)
    _, table = mesh_diagram.sharding(unknown, inline=False)
    assert [table.rows[index].cells[4] for index in (2, 3)] == ["", ""]
    assert (rows[2].total, rows[2].per_rank, rows[2].share) == ("unknown", "unknown", None)
    assert (rows[3].total, rows[3].share) == ("unknown", None)
    ET.fromstring(mesh_diagram.svg(unknown, mesh_diagram.PAPER))


def test_the_mesh_is_shown_as_text() -> None:
    assert mesh_diagram.mesh_rows(hybrid()) == [
        ["mesh", "dp_shard 0", "dp_shard 1"],
        ["dp_replicate 0", "rank 0", "rank 1"],
        ["dp_replicate 1", "rank 2", "rank 3"],
    ]
    assert [row[0] for row in mesh_diagram.mesh_rows(megatron())[1:]] == [
        f"pp {p} · dp {d}" for p in (0, 1) for d in (0, 1)
    ]
    assert len(mesh_diagram.mesh_rows(zero(1))) == 1, "a single axis needs no drawing"
    assert len(mesh_diagram.mesh_rows({})) == 1


def test_slices_belong_to_the_ranks_and_cover_the_model() -> None:
    ranks = megatron()
    for kind in KINDS:
        wholes = [ranks[0].held[kind].whole, ranks[7].held[kind].whole]
        slices = {mesh_diagram.slice_of(one, kind, wholes) for one in ranks.values()}
        covered = 0.0
        for begin, length in sorted(part for part in slices if part is not None):
            assert begin == pytest.approx(covered)
            covered = begin + length
        assert covered == pytest.approx(1.0)
    parameters = mesh_diagram.slice_of(ranks[1], KINDS[0], [64 * MB, 128 * MB])
    state = mesh_diagram.slice_of(ranks[1], KINDS[2], [128 * MB, 256 * MB])
    assert parameters is not None
    assert state is not None
    assert parameters[0] <= state[0] < parameters[0] + parameters[1], (
        "the optimizer state belongs to the rank's own parameters"
    )


_CELL = re.compile(r"<g><title>rank (\d+): (.*?)</title>")


@pytest.mark.parametrize("ranks", [hybrid(), megatron(), zero(2), mesh_reports({}, (1, ()), (1, ()), (2, ()))])
def test_the_drawing_has_a_cell_for_each_rank(ranks: dict[int, ShardReport]) -> None:
    drawing = mesh_diagram.svg(ranks)
    ET.fromstring(drawing)
    assert [int(rank) for rank, _ in _CELL.findall(drawing)] == list(ranks)
    held = ranks[0].held[KINDS[0]]
    assert held.here is not None
    assert f"parameters {size_text(held.here)} of 64.0 MB" in _CELL.findall(drawing)[0][1]
    assert ("offloaded" in drawing) == (ranks[0].strategy == "deepspeed")


@pytest.mark.parametrize("axes", [{"dp_shard": 500}, {"dp_replicate": 50, "dp_shard": 8}, {"a": 5, "b": 5, "c": 20}])
def test_only_the_first_of_hundreds_of_ranks_are_drawn(axes: dict[str, int]) -> None:
    inner = list(axes)[-1:]
    ranks = mesh_reports(axes, (1, (*inner,)), (1, (*inner,)), (2, (*inner,)))
    drawing = mesh_diagram.svg(ranks)
    cells = _CELL.findall(drawing)
    assert 0 < len(cells) <= mesh_diagram.MAX_DRAWN
    assert f"and {len(ranks) - len(cells):,} more ranks" in drawing
    assert len(mesh_diagram.sharding_rows(ranks)) == 4


def test_names_are_escaped() -> None:
    evil = "<script>&"
    ranks = mesh_reports({evil: 2}, (1, (evil,)), (1, (evil,)), (2, (evil,)), strategy=evil)
    assert "<script>" not in mesh_diagram.svg(ranks)
    assert "<script>" not in mesh_diagram.image(ranks)
    ET.fromstring(mesh_diagram.svg(ranks, mesh_diagram.PAPER))


def test_the_report_contains_the_table_and_the_drawing() -> None:
    run = make_run(4)
    assert "optimizer state" not in Report(run).text
    for rank, one in hybrid().items():
        feed(run, one.event(), rank=rank)
    feed(run, hybrid()[0].event(), rank=9)
    text, html = Report(run).text, Report(run).html
    assert "fsdp2 HYBRID_SHARD · dp_replicate 2 × dp_shard 2 · 3 units" in text
    assert "dp_replicate 1  rank 2      rank 3" in text
    assert "each rank  parameters" in text
    assert "Sharding: fsdp2 HYBRID_SHARD" in html
    (picture,) = re.findall(r'<img alt="fsdp2 [^"]*" [^>]*base64,([^"]+)"', html)
    assert base64.b64decode(picture).startswith(b"<svg ")
