"""The framework of the benchmarks: it registers rows and computes their figures. `runner.py` runs them.

An area is a module that defines rows. Importing the module registers them (see `__main__.py`):

    @row("launch", "first line and return")
    def launch_times() -> Iterator[Figure]:
        ours, peer = alternate(10, launch_here, launch_there)
        yield compared("2 ranks: call to return", ours, peer, unit="ms", scale=1e3, ratio=0.5)

Every figure is a median. The two sides of a comparison are measured alternately (A B A B), so that a busy moment of the
machine affects both, and the ratio is the median of the ratios of the pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

REPEATS = 10
"""The number of measurements for each median, unless a row chooses another."""

Measure = Callable[[], Iterator["Figure"]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        what: What was measured.
        unit: The unit of the numbers.
        ours: The median of this package, or None if it could not be measured.
        peer: The median of the peer, or None if there is no peer or it did not finish.
        ratio: The median of the ratios of pairs, or None without a comparison.
        spread: The first and third quartiles of the ratios, or of this package's measurements if there is no peer.
        goal: The goal in words, or "" if there is no goal.
        met: Whether the goal was met, or None if there is no goal.
        note: What a reader needs to interpret the figure.
    """

    what: str
    unit: str
    ours: float | None
    peer: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.ratio is None and self.ours is not None and self.peer:
            object.__setattr__(self, "ratio", self.ours / self.peer)


@dataclass(frozen=True)
class Row:
    """A named measurement that yields one or more figures."""

    area: str
    name: str
    measure: Measure


ROWS: list[Row] = []


def row(area: str, name: str) -> Callable[[Measure], Measure]:
    """Register the decorated function, which yields figures, as a row."""

    def register(measure: Measure) -> Measure:
        ROWS.append(Row(area, name, measure))
        return measure

    return register


def alternate(repeats: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call the sides alternately, and return each side's values. The first round only warms up and does not count."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for values, side in zip(found, sides, strict=True):
            value = side()
            if turn:
                values.append(value)
    return found


def compared(
    what: str,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    *,
    unit: str,
    scale: float = 1.0,
    ratio: float | None = None,
    limit: float | None = None,
    note: str = "",
) -> Figure:
    """Return the figure that compares two lists of measurements.

    Args:
        what: What was measured.
        ours: The measurements of this package.
        peer: The measurements of the peer.
        unit: The unit after scaling.
        scale: The factor by which measurements are multiplied.
        ratio: The goal, as the largest acceptable ratio to the peer.
        limit: The goal, as the largest acceptable median in the unit.
        note: What a reader needs to interpret the figure.
    """
    here = statistics.median(ours) * scale
    there = statistics.median(peer) * scale if peer else None
    ratios = paired(ours, peer)
    goals, met = [], []
    if limit is not None:
        goals.append(f"≤ {limit:g} {unit}")
        met.append(here <= limit)
    if ratio is not None and ratios:
        goals.append(f"≤ {ratio:g} × peer")
        met.append(statistics.median(ratios) <= ratio)
    return Figure(
        what=what,
        unit=unit,
        ours=here,
        peer=there,
        ratio=statistics.median(ratios) if ratios else None,
        spread=quartiles(ratios or [value * scale for value in ours]),
        goal=", ".join(goals),
        met=all(met) if met else None,
        note=note,
    )


def paired(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Return the ratio of each pair measured in the same round, or the ratio of the medians if there are no pairs."""
    if len(ours) == len(peer):
        return [here / there for here, there in zip(ours, peer, strict=True)]
    return [statistics.median(ours) / statistics.median(peer)] if peer else []


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the first and third quartiles, or None for a single value."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
