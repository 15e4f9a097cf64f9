"""The framework of the benchmarks: failing rows, paired ratios, and the comparison with the committed table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import bench, record
from benchmarks.bench import Figure, compared


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench, "ROWS", [])
    monkeypatch.setattr(bench, "OUTPUT", tmp_path / "bench.json")
    monkeypatch.setattr(record, "TABLE", tmp_path / "benchmarks.md")
    return tmp_path / "benchmarks.md"


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
    assert bench.main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED: RuntimeError: the peer lost lines" in out
    assert "FAILED: printing" in out
    found = json.loads(bench.OUTPUT.read_text())["figures"]
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
    assert bench.main(["--record"]) == 0
    assert "WORSE" not in capsys.readouterr().out
    bench.ROWS.clear()
    row("fork", ratio(0.7), ratio(1.1, "first line"), ratio(0.04, "close to nothing"), ratio(9.0, "new"))
    assert bench.main([]) == 0
    worse = [line for line in capsys.readouterr().out.splitlines() if "WORSE" in line]
    assert worse == ["  WORSE: launch, fork, to the return: 0.7, was 0.5 in benchmarks.md"]


def test_shares_are_compared_without_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    row("logging", compared("of a 2 ms step", [1.0], unit="%"), compared("a line", [1.0], unit="s"))
    assert bench.main(["--record"]) == 0
    bench.ROWS.clear()
    row("logging", compared("of a 2 ms step", [2.0], unit="%"), compared("a line", [2.0], unit="s"))
    assert bench.main([]) == 0
    assert capsys.readouterr().out.count("WORSE") == 1


def test_recording_replaces_the_measured_rows_only(table: Path) -> None:
    row("fork", ratio(0.5), ratio(0.6, "gone later"))
    row("memory", ratio(0.7, "a | b"))
    assert bench.main(["--record"]) == 0
    bench.ROWS.clear()
    row("fork", ratio(0.4))
    assert bench.main(["--record", "fork"]) == 0
    lines = [line for line in table.read_text().splitlines() if line.startswith("| launch")]
    assert [[*line.split(" | ")[1:3], line.split(" | ")[5]] for line in lines] == [
        ["fork", "to the return", "0.4"],
        ["memory", "a / b", "0.7"],
    ]


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    row("fork", ratio(0.5))
    assert bench.main(["spoon"]) == 2
    assert "Unknown area or row: spoon. Known ones: fork, launch." in capsys.readouterr().out
