"""Write the committed table of benchmarks, docs/benchmarks.md, and compare later runs with it.

Only ratios to a peer and percentages are compared, because they hardly depend on the machine.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.bench import Figure

TABLE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
WORSE = 1.3
"""A ratio that has grown by more than this factor is a regression."""
SMALLEST = 0.05
"""Smaller growth is noise, even if it is large relative to a ratio near zero."""
SHARES = ("%", "×")
"""The units of figures that do not depend on the machine."""

_HEAD = """\
# Benchmarks

Times and memory of this package and of Accelerate, or of the peer that the figure names, measured alternately. Each
figure is a median. The quartiles belong to the ratio, or to the figure itself if there is no peer. A ratio below 1 is
faster or smaller. The goal is the value that the project aims at; not every goal is met.

`make bench` measures all rows, and `make bench ROWS=launch` measures one area or row. Both list every ratio that is
more than 1.3 times the ratio in this table. `make bench-record` also writes the table.

The machine on which a row was last measured: {machine}

| area | row | figure | here | peer | ratio | quartiles | goal | date |
|---|---|---|---|---|---|---|---|---|
"""
_LINE = re.compile(r"\| (?P<area>[^|]+) \| (?P<row>[^|]+) \| (?P<what>[^|]+) \| (?P<cells>.*) \|")


class Entry(NamedTuple):
    """A figure with its area and row."""

    area: str
    row: str
    figure: Figure

    @property
    def key(self) -> tuple[str, str, str]:
        """The cells that identify the figure in the table."""
        return self.area, self.row, _cell(self.figure.what)

    @property
    def comparable(self) -> float | None:
        """The number to compare between machines, or None if the figure has no such number."""
        return self.figure.ratio if self.figure.unit not in SHARES else self.figure.ours


def regressions(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a message for each figure that is worse than in the committed table."""
    before = _committed()
    for entry in entries:
        now, then = entry.comparable, before.get(entry.key)
        if now is None or then is None or now <= WORSE * then or now - then <= SMALLEST:
            continue
        yield f"{entry.area}, {entry.row}, {entry.figure.what}: {now:.3g}, was {then:.3g} in {TABLE.name}"


def write(entries: Sequence[Entry], machine: str) -> None:
    """Replace the measured rows of the table and keep the others."""
    measured = {(entry.area, entry.row) for entry in entries}
    kept = [line for line in _lines() if (line["area"], line["row"]) not in measured]
    lines = [line.string for line in kept] + [_row(entry) for entry in entries if entry.figure.ours is not None]
    order = {line: index for index, line in enumerate(sorted(lines, key=lambda line: line.split(" | ")[:2]))}
    TABLE.write_text(_HEAD.format(machine=machine) + "\n".join(sorted(lines, key=order.__getitem__)) + "\n")


def _row(entry: Entry) -> str:
    figure = entry.figure
    spread = " – ".join(_number(bound, "") for bound in figure.spread) if figure.spread else ""
    cells = (_number(figure.ours, figure.unit), _number(figure.peer, figure.unit), _number(figure.ratio, ""), spread)
    date = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    return f"| {' | '.join((*entry.key, *cells, _cell(figure.goal), date))} |"


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{float(f'{value:.3g}'):g} {unit}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "/").strip() or " "


def _lines() -> list[re.Match[str]]:
    text = TABLE.read_text() if TABLE.exists() else ""
    return [found for line in text.splitlines() if (found := _LINE.fullmatch(line)) and found["area"] != "area"]


def _committed() -> dict[tuple[str, str, str], float]:
    found = {}
    for line in _lines():
        here, _, ratio, *_ = [cell.strip() for cell in line["cells"].split("|")]
        share = any(here.endswith(f" {unit}") for unit in SHARES)
        if number := here.split()[0] if share else ratio:
            found[line["area"], line["row"], line["what"]] = float(number)
    return found
