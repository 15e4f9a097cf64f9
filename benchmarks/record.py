"""Record figures in ``recorded.json``, and compare later figures with them.

Every figure is printed with the change since it was recorded. Only ratios to a peer and percentages can be flagged as
worse, because times and sizes depend on the machine.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import Figure

RECORDED = Path(__file__).with_name("recorded.json")
WORSE = 1.3
"""Without quartiles, a ratio that has grown by more than this factor is worse."""
SMALLEST = 0.05
"""Smaller growth is noise, even if it is large relative to a ratio near zero."""
SHARES = ("%", "×")
"""The units of figures that do not depend on the machine."""


class Entry(NamedTuple):
    """A figure with its area and row, and the day of its measurement."""

    area: str
    row: str
    figure: Figure
    date: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The names that identify the figure."""
        return self.area, self.row, self.figure.what


class _Comparable(NamedTuple):
    """A number that can be compared between machines, with its quartiles if they are known."""

    value: float
    low: float
    high: float
    has_quartiles: bool


def recorded() -> list[Entry]:
    """Return the recorded figures, ordered by area and row."""
    if not RECORDED.exists():
        return []
    return [_decoded(**fields) for fields in json.loads(RECORDED.read_text())["figures"]]


def machine() -> str:
    """Return the machine that the figures were last recorded on."""
    return str(json.loads(RECORDED.read_text())["machine"])


def write(measured: Sequence[Entry], on_machine: str) -> None:
    """Record figures, which replace all earlier figures of their rows.

    Args:
        measured: The figures of complete rows. Those without a value could not be measured, and replace nothing.
        on_machine: The machine on which the others were measured.
    """
    kept = {entry.key for entry in measured if entry.figure.ours is None}
    measured = [entry for entry in measured if entry.key not in kept]
    if not measured:
        return
    rows = {(entry.area, entry.row) for entry in measured}
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    entries = [entry for entry in recorded() if (entry.area, entry.row) not in rows or entry.key in kept]
    entries += [entry._replace(date=today) for entry in measured]
    # One line per figure makes changes readable.
    lines = [json.dumps(_encoded(entry), ensure_ascii=False) for entry in sorted(entries, key=lambda each: each[:2])]
    head = json.dumps(on_machine, ensure_ascii=False)
    RECORDED.write_text(f'{{"machine": {head},\n"figures": [\n' + ",\n".join(lines) + "\n]}\n")


def _encoded(entry: Entry) -> dict[str, Any]:
    figure = entry.figure
    fields = {
        "area": entry.area,
        "row": entry.row,
        "what": figure.what,
        "unit": figure.unit,
        "ours": _rounded(figure.ours),
        "peer": _rounded(figure.peer),
        "ratio": _rounded(figure.ratio),
        "spread": [_rounded(bound) for bound in figure.spread] if figure.spread else None,
        "goal": figure.goal,
        "date": entry.date,
    }
    return {**fields, "note": figure.note} if figure.note else fields


def _rounded(value: float | None) -> float | None:
    """Return a value rounded to the digits that are recorded."""
    if value is None:
        return None
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded.is_integer() else rounded


def _decoded(area: str, row: str, date: str, spread: Sequence[float] | None, **fields: Any) -> Entry:
    bounds = None if spread is None else (spread[0], spread[1])
    return Entry(area, row, Figure(spread=bounds, **fields), date)


# ---- comparing


def is_worse(then: Figure, now: Figure) -> bool:
    """Return whether a figure is worse than the recorded one.

    A figure is worse if it has changed for the worse and each median is outside the quartiles of the other. Without
    recorded quartiles, the change must exceed the factor `WORSE` instead.
    """
    before, after = _comparable(then), _comparable(now)
    if before is None or after is None or abs(after.value - before.value) <= SMALLEST:
        return False
    # If higher is better, swap the two.
    small, large = (after, before) if then.goal.startswith("≥") else (before, after)
    if not before.has_quartiles:
        return large.value > WORSE * small.value
    return large.value > small.high and large.low > small.value


def _comparable(figure: Figure) -> _Comparable | None:
    is_share = figure.unit in SHARES
    value = figure.ours if is_share else figure.ratio
    if value is None:
        return None
    # If a share has a peer, its quartiles are those of the ratio.
    spread = None if is_share and figure.peer is not None else figure.spread
    low, high = spread or (value, value)
    return _Comparable(value, low, high, spread is not None)


def change(then: Figure, now: Figure) -> str:
    """Return the change of a figure, such as "0.5 s → 0.7 s, ratio 0.9 → 1.1"."""
    text = f"{number(then.ours, then.unit)} → {number(now.ours, now.unit)}"
    if then.ratio is None and now.ratio is None:
        return text
    return f"{text}, ratio {number(then.ratio)} → {number(now.ratio)}"


def changes(measured: Iterable[Entry]) -> list[tuple[Entry, Entry]]:
    """Return each figure that has been recorded before, as recorded and as measured."""
    known = {entry.key: entry for entry in recorded()}
    return [(known[entry.key], entry) for entry in measured if entry.key in known]


def number(value: float | None, unit: str = "") -> str:
    """Return a number with three digits and its unit, or a dash if there is no number."""
    if value is None:
        return "–"
    digits = f"{float(f'{value:.3g}'):g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"
    return f"{digits} {unit}".strip()
