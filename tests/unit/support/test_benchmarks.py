"""The framework of the benchmarks: failing rows, paired ratios, and the comparison with the recorded figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import bench, page, record, runner
from benchmarks.bench import Figure, compared

COMMITTED = record.RECORDED


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROWS", [])
    monkeypatch.setattr(runner, "OUTPUT", tmp_path / "bench.json")
    monkeypatch.setattr(record, "RECORDED", tmp_path / "recorded.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "benchmarks.md")


def row(name: str, *figures: Figure, error: Exception | None = None) -> None:
    def measure() -> Iterator[Figure]:
        yield from figures
        if error is not None:
            raise error

    bench.row("launch", name)(measure)


def ratio(value: float, what: str = "to the return") -> Figure:
    return compared(what, [value], [1.0], unit="s")


def test_a_failing_row_is_reported_and_the_others_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    row("printing", ratio(0.5), error=RuntimeError("the peer lost lines"))
    row("memory", ratio(0.7))
    assert runner.main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED: RuntimeError: the peer lost lines" in out
    assert "FAILED: printing" in out
    found = json.loads(runner.OUTPUT.read_text())["figures"]
    assert [(entry["row"], entry["ours"]) for entry in found] == [
        ("printing", 0.5),
        ("printing", None),
        ("memory", 0.7),
    ]


def test_ratios_are_computed_from_pairs_with_their_quartiles() -> None:
    # A busy moment that affects both sides of a pair changes no ratio.
    figure = compared("a launch", [1.0, 2.0, 30.0, 4.0, 5.0], [2.0, 4.0, 60.0, 8.0, 10.0], unit="s", ratio=0.5)
    assert (figure.ratio, figure.spread, figure.met) == (0.5, (0.5, 0.5), True)
    alone = compared("a stop", [1.0, 2.0, 3.0, 4.0, 5.0], unit="ms", scale=1e3)
    assert (alone.ours, alone.ratio, alone.spread) == (3000.0, None, (2000.0, 4000.0))


def test_a_larger_ratio_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    row("fork", ratio(0.5), ratio(0.9, "first line"), ratio(0.01, "close to nothing"))
    assert runner.main(["--record"]) == 0
    assert "WORSE" not in capsys.readouterr().out
    bench.ROWS.clear()
    row("fork", ratio(0.7), ratio(1.1, "first line"), ratio(0.04, "close to nothing"), ratio(9.0, "new"))
    assert runner.main([]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if "WORSE" in line] == [
        "  WORSE: launch, fork, to the return: 0.5 s → 0.7 s, ratio 0.5 → 0.7"
    ]
    assert any(line.endswith("  launch, fork, first line: 0.9 s → 1.1 s, ratio 0.9 → 1.1") for line in out)
    assert not any("launch, fork, new" in line for line in out)


def measured(*ratios: float) -> Figure:
    return compared("a launch", ratios, [1.0] * len(ratios), unit="s")


@pytest.mark.parametrize(
    ("then", "now", "worse"),
    [
        ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), True),
        ((1.0, 1.1, 1.8), (1.3, 1.4, 1.5), False),  # The new median is within the recorded quartiles.
        ((1.0, 1.1, 1.2), (0.9, 1.4, 1.5), True),
        ((1.0, 1.1, 1.2), (0.6, 1.4, 1.5), False),  # The recorded median is within the new quartiles.
        ((1.0, 1.1, 1.2), (0.3, 0.4, 0.5), False),
        ((1.0, 1.0, 1.0), (1.03, 1.03, 1.03), False),  # The growth is too small to matter.
    ],
)
def test_with_quartiles_a_figure_is_worse_if_the_medians_are_outside(
    then: tuple[float, ...], now: tuple[float, ...], worse: bool
) -> None:
    assert record.is_worse(measured(*then), measured(*now)) is worse


def test_if_more_is_better_a_smaller_ratio_is_worse() -> None:
    then = Figure(what="tokens per second", unit="tokens/s", ours=110, peer=80, ratio=1.4, goal="≥ 1.5 × peer")
    more = Figure(what="tokens per second", unit="tokens/s", ours=200, peer=80, ratio=2.5)
    less = Figure(what="tokens per second", unit="tokens/s", ours=80, peer=80, ratio=1.0)
    assert (record.is_worse(then, more), record.is_worse(then, less)) == (False, True)


def test_shares_are_compared_without_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    row("logging", compared("of a 2 ms step", [1.0], unit="%"), compared("a line", [1.0], unit="s"))
    assert runner.main(["--record"]) == 0
    bench.ROWS.clear()
    row("logging", compared("of a 2 ms step", [2.0], unit="%"), compared("a line", [2.0], unit="s"))
    assert runner.main([]) == 0
    out = capsys.readouterr().out
    assert "a line: 1 s → 2 s" in out
    assert out.count("WORSE") == 1


def test_recording_replaces_the_measured_rows_only() -> None:
    row("fork", ratio(0.5), ratio(0.6, "gone later"))
    row("memory", ratio(0.7, "a | b"))
    assert runner.main(["--record"]) == 0
    bench.ROWS.clear()
    row("fork", ratio(0.4))
    assert runner.main(["--record", "fork"]) == 0
    assert [(*entry.key[1:], entry.figure.ratio) for entry in record.recorded()] == [
        ("fork", "to the return", 0.4),
        ("memory", "a | b", 0.7),
    ]


def test_a_row_that_fails_keeps_its_recorded_figures() -> None:
    row("fork", ratio(0.5), ratio(0.6, "first line"))
    assert runner.main(["--record"]) == 0
    bench.ROWS.clear()
    row("fork", ratio(0.4), error=RuntimeError("the peer hangs"))
    assert runner.main(["--record"]) == 1
    assert [entry.figure.ratio for entry in record.recorded()] == [0.5, 0.6]


def test_a_row_that_could_not_be_measured_keeps_its_recorded_figures() -> None:
    row("panel", ratio(0.5), ratio(0.6, "first line"))
    assert runner.main(["--record"]) == 0
    bench.ROWS.clear()
    row("panel", Figure(what="to the return", unit="s", ours=None, note="playwright is not installed"))
    assert runner.main(["--record"]) == 0
    assert [entry.figure.ratio for entry in record.recorded()] == [0.5, 0.6]
    row("panel", ratio(0.7, "first line"))
    assert runner.main(["--record"]) == 0
    assert [entry.figure.ratio for entry in record.recorded()] == [0.5, 0.7]


def test_a_figure_is_recorded_with_all_its_fields() -> None:
    figure = compared("a launch", [1.0, 2.0, 4.0], [2.0, 3.0, 4.0], unit="ms", scale=1e3, ratio=0.9, note="see there")
    row("fork", figure, compared("a rate", [110.4], unit="tokens/s"))
    assert runner.main(["--record"]) == 0
    first, second = record.recorded()
    assert (first.area, first.row, len(first.date)) == ("launch", "fork", len("2026-11-27"))
    assert first.figure == Figure(
        what="a launch", unit="ms", ours=2000, peer=3000, ratio=0.667, spread=(0.583, 0.833), goal="≤ 0.9 × peer",
        note="see there",
    )  # fmt: skip
    assert second.figure == Figure(what="a rate", unit="tokens/s", ours=110)


def test_the_page_shows_recorded_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (COMMITTED.parents[1] / "docs" / "benchmarks.md").read_text()
    monkeypatch.setattr(record, "RECORDED", COMMITTED)
    assert text == page.text(), "docs/benchmarks.md is out of date: call benchmarks.page.write()"
    entries = record.recorded()
    keys = {entry.key for entry in entries}
    assert len(keys) == len(entries)
    shown = [tuple(key) for figures in page.SHOWN.values() for _, *key in figures]
    # A row that has not been measured yet has no figures.
    rows = {key[:2] for key in keys}
    assert [key for key in shown if key[:2] in rows and key not in keys] == []


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    row("fork", ratio(0.5))
    assert runner.main(["spoon"]) == 2
    assert "Unknown area or row: spoon. Known ones: fork, launch." in capsys.readouterr().out
