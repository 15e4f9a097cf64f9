"""The frame of the benchmarks: rows that measure, and the table and file that show what they found.

An area is a module that defines rows; it registers them by being imported (see `__main__.py`):

    @row("launch", "first line and return")
    def launch_times() -> Iterator[Figure]:
        ours, peer = alternate(10, launch_here, launch_there)
        yield compared("fork, 2 ranks: to the return", ours, peer, unit="ms", scale=1e3, ratio=0.5)

Every figure is a median; what is compared is measured in turns (A B A B), so that a busy moment hits both sides, and
its ratio is the median of the ratios of the pairs. Figures that do not depend on the machine are compared with those of
the committed table (see `record.py`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import record

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
        ratio: Median of the ratios of pairs; None where nothing is compared.
        spread: First and third quartile of these ratios, or of what was measured here where there is no peer.
        goal: The goal in words; "" where there is none.
        met: Whether the goal was met; None where there is none.
        note: What a reader has to know.
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
    """Return the ratio of each pair that was measured in one turn, or of the medians if there are no such pairs."""
    if len(ours) == len(peer):
        return [here / there for here, there in zip(ours, peer, strict=True)]
    return [statistics.median(ours) / statistics.median(peer)] if peer else []


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the first and third quartile; None for a single value."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


# ---- showing

_WIDTHS = (62, 12, 12, 8, 14, 18)
QUICK = (
    "fork",
    "import of the root",
    "import",
    "step",
    "loader",
    "collectives",
    "metrics",
    "logging",
    "unused",
    "hooks",
)
"""The rows of `make bench-quick`: the times that users meet most, in less than five minutes."""

OPTIONS = frozenset(("--but", "--quick", "--record"))


def main(arguments: Sequence[str]) -> int:
    """Measure the rows whose area or name the arguments name, print the table, write the file.

    Args:
        arguments: Areas or names; none means all, "--but" in front all others, "--quick" the quick rows. "--record"
            writes what was measured into the committed table.

    Returns:
        0; 1 if a row could not be measured, 2 if there is no row or option of a name.
    """
    options, words = {word for word in arguments if word.startswith("--")}, set(arguments)
    words = set(QUICK) if "--quick" in options else words - options
    if unknown := options - OPTIONS:
        print(f"there is no option {' or '.join(sorted(unknown))}; there are: {', '.join(sorted(OPTIONS))}")
        return 2
    rows = [entry for entry in ROWS if not words or bool({entry.area, entry.name} & words) != ("--but" in options)]
    if not rows:
        known = sorted({entry.area for entry in ROWS} | {entry.name for entry in ROWS})
        print(f"no row is called {' or '.join(sorted(words))}; there are: {', '.join(known)}")
        return 2
    print(f"{_machine()}\nmedians and quartiles; the peer is Accelerate where nothing else is said")
    figures: list[tuple[Row, Figure]] = []
    failed = [entry.name for entry in rows if not _measure(entry, figures)]
    _write(figures)
    entries = [record.Entry(entry.area, entry.name, figure) for entry, figure in figures]
    for line in record.regressions(entries):
        print(f"  WORSE: {line}")
    if "--record" in options:
        record.write(entries, _machine())
    if failed:
        print(f"  FAILED: {', '.join(failed)}")
    return int(bool(failed))


def _measure(entry: Row, figures: list[tuple[Row, Figure]]) -> bool:
    """Measure and print one row; return whether it came to its end."""
    begin = time.monotonic()
    print(f"\n{entry.area}: {entry.name}\n{_line('', 'here', 'peer', 'ratio', 'quartiles', 'goal')}", flush=True)
    try:
        for figure in entry.measure():
            figures.append((entry, figure))
            print(_text(figure), flush=True)
    except Exception as error:  # noqa: BLE001 - whatever a row or a peer raises: the other rows are measured
        traceback.print_exc()
        failure = Figure(what="the row", unit="", ours=None, met=False, note=f"{type(error).__name__}: {error}"[:300])
        figures.append((entry, failure))
        print(f"  FAILED: {failure.note}", flush=True)
        return False
    finally:
        print(f"  ({time.monotonic() - begin:.0f} s)", flush=True)
    return True


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
    ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
    spread = "{:.3g} – {:.3g}".format(*figure.spread) if figure.spread else ""
    mark = {True: "met", False: "SHORT", None: ""}[figure.met]
    cells = (_number(figure.ours, figure.unit), _number(figure.peer, figure.unit), ratio, spread, figure.goal)
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
