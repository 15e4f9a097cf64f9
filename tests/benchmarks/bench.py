"""The frame of the benchmarks: rows that measure, and the table and file that show what they found.

An area is a module that defines rows; it registers them by being imported (see `__main__.py`):

    @row("launch", "first line and return")
    def launch_times() -> Iterator[Figure]:
        ours, peer = alternate(10, launch_here, launch_there)
        yield compared("fork, 2 ranks: to the return", ours, peer, unit="ms", scale=1e3, ratio=0.5)

Every figure is a median; what is compared is measured in turns (A B A B), so that a busy moment hits both sides.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

REPEATS = 10
"""Measurements behind each median, unless a row says otherwise."""
OUTPUT = Path(".build") / "bench.json"

Measure = Callable[[], Iterator["Figure"]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        what: What was measured.
        unit: Unit of the numbers.
        ours: Median here; None when it could not be measured.
        peer: Median of what it is compared with; None where there is nothing, or where it did not finish.
        goal: The goal in words; "" where there is none.
        met: Whether the goal was met; None where there is none.
        note: What a reader has to know.
    """

    what: str
    unit: str
    ours: float | None
    peer: float | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A named measurement that gives one or more figures."""

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
    """Call the sides in turns and return what each gave; one round before that does not count."""
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
    """Return the figure of two lists of measurements.

    Args:
        what: What was measured.
        ours: Measurements here.
        peer: Measurements of what it is compared with.
        unit: Unit after scaling.
        scale: What the measurements are multiplied with.
        ratio: The goal is at most so many times the peer's median.
        limit: The goal is at most so much, in the unit.
        note: What a reader has to know.
    """
    here = statistics.median(ours) * scale
    there = statistics.median(peer) * scale if peer else None
    goals, met = [], []
    if limit is not None:
        goals.append(f"≤ {limit:g} {unit}")
        met.append(here <= limit)
    if ratio is not None and there is not None:
        goals.append(f"≤ {ratio:g} × peer")
        met.append(here <= ratio * there)
    return Figure(
        what=what, unit=unit, ours=here, peer=there, goal=", ".join(goals), met=all(met) if met else None, note=note
    )


# ---- showing

_WIDTHS = (62, 12, 12, 8, 18)


def main(arguments: Sequence[str]) -> int:
    """Measure the rows whose area or name the arguments name, print the table, write the file.

    Args:
        arguments: Areas or names; none means all, and "--but" in front all others.
    """
    but, words = arguments[:1] == ["--but"], [word for word in arguments if word != "--but"]
    rows = [entry for entry in ROWS if not words or bool({entry.area, entry.name} & set(words)) != but]
    if not rows:
        known = sorted({entry.area for entry in ROWS} | {entry.name for entry in ROWS})
        print(f"no row is called {' or '.join(words)}; there are: {', '.join(known)}")
        return 2
    print(f"{_machine()}\nmedians; the peer is Accelerate where nothing else is said")
    figures: list[tuple[Row, Figure]] = []
    for entry in rows:
        begin = time.monotonic()
        print(f"\n{entry.area}: {entry.name}\n{_line('', 'here', 'peer', 'ratio', 'goal')}", flush=True)
        for figure in entry.measure():
            figures.append((entry, figure))
            print(_text(figure), flush=True)
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
    _write(figures)
    return 0


def _machine() -> str:
    parts = [f"{len(os.sched_getaffinity(0))} cores", f"Python {platform.python_version()}"]
    parts += [f"{name} {_version(name)}" for name in ("torch", "ipykernel", "accelerate")]
    return f"{' · '.join(parts)}, load {os.getloadavg()[0]:.1f}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _text(figure: Figure) -> str:
    ratio = f"{figure.ours / figure.peer:.2f}" if figure.ours is not None and figure.peer else ""
    mark = {True: "met", False: "SHORT", None: ""}[figure.met]
    cells = (_number(figure.ours, figure.unit), _number(figure.peer, figure.unit), ratio, figure.goal)
    text = f"{_line(figure.what, *cells)}  {mark}".rstrip()
    return f"{text}\n      {figure.note}" if figure.note else text


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def _line(what: str, *cells: str) -> str:
    return f"  {what:<{_WIDTHS[0]}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True)
    )


def _write(figures: list[tuple[Row, Figure]]) -> None:
    OUTPUT.parent.mkdir(exist_ok=True)
    ran = {"machine": _machine(), "python": sys.version}
    entries = [{"area": entry.area, "row": entry.name, **asdict(figure), **ran} for entry, figure in figures]
    measured = {(entry["area"], entry["row"]) for entry in entries}
    # Rows need several environments, each with a process of its own.
    before = json.loads(OUTPUT.read_text())["figures"] if OUTPUT.exists() else []
    kept = [entry for entry in before if (entry["area"], entry["row"]) not in measured]
    OUTPUT.write_text(json.dumps({"figures": kept + entries}, indent=1))
    short = [figure for _, figure in figures if figure.met is False]
    with_goal = [figure for _, figure in figures if figure.met is not None]
    print(f"\n{len(with_goal) - len(short)} of {len(with_goal)} goals met; numbers in {OUTPUT}")
    for figure in short:
        print(f"  SHORT: {figure.what}")
