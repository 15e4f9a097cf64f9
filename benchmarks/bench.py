"""The framework of the benchmarks: it registers rows, runs them, and writes their figures to a table and a file.

An area is a module that defines rows. Importing the module registers them (see `__main__.py`):

    @row("launch", "first line and return")
    def launch_times() -> Iterator[Figure]:
        ours, peer = alternate(10, launch_here, launch_there)
        yield compared("2 ranks: call to return", ours, peer, unit="ms", scale=1e3, ratio=0.5)

Every figure is a median. The two sides of a comparison are measured alternately (A B A B), so that a busy moment of the
machine affects both, and the ratio is the median of the ratios of the pairs. Figures that do not depend on the machine
are also compared with the committed table (see `record.py`).
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
"""The number of measurements for each median, unless a row chooses another."""
OUTPUT = Path(".build") / "bench.json"

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
    """Call the sides alternately and return the values of each. A first round warms up and is discarded."""
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


# ---- running and printing

_WIDTHS = (62, 12, 12, 8, 14, 18)
QUICK = (
    "fork",
    "package import",
    "import",
    "step",
    "loader",
    "collectives",
    "metrics",
    "logging",
    "unused",
    "hooks",
)
"""The rows of `make bench-quick`: the times that users notice most, measured in less than five minutes."""

OPTIONS = frozenset(("--but", "--quick", "--record"))


def main(arguments: Sequence[str]) -> int:
    """Measure the selected rows, print the table and write the file.

    Args:
        arguments: Areas or names of rows; by default all rows. "--but" selects every row except the named ones, and
            "--quick" selects the quick rows. "--record" writes the figures to the committed table.

    Returns:
        0 on success, 1 if a row could not be measured, 2 if an argument is unknown.
    """
    options, words = {word for word in arguments if word.startswith("--")}, set(arguments)
    words = set(QUICK) if "--quick" in options else words - options
    if unknown := options - OPTIONS:
        print(f"Unknown option: {', '.join(sorted(unknown))}. Known options: {', '.join(sorted(OPTIONS))}.")
        return 2
    rows = [entry for entry in ROWS if not words or bool({entry.area, entry.name} & words) != ("--but" in options)]
    if not rows:
        known = sorted({entry.area for entry in ROWS} | {entry.name for entry in ROWS})
        print(f"Unknown area or row: {', '.join(sorted(words))}. Known ones: {', '.join(known)}.")
        return 2
    print(f"{_machine()}\nMedians and quartiles. The peer is Accelerate unless the figure says otherwise.")
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
    """Measure and print one row. Return False if it raised an error."""
    begin = time.monotonic()
    print(f"\n{entry.area}: {entry.name}\n{_line('', 'here', 'peer', 'ratio', 'quartiles', 'goal')}", flush=True)
    try:
        for figure in entry.measure():
            figures.append((entry, figure))
            print(_text(figure), flush=True)
    except Exception as error:  # noqa: BLE001 - an error of a row or a peer must not stop the other rows
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
    # `make bench` runs one process per environment, so keep the figures that other processes have written.
    before = json.loads(OUTPUT.read_text())["figures"] if OUTPUT.exists() else []
    kept = [entry for entry in before if (entry["area"], entry["row"]) not in measured]
    OUTPUT.write_text(json.dumps({"figures": kept + entries}, indent=1))
    short = [figure for _, figure in figures if figure.met is False]
    with_goal = [figure for _, figure in figures if figure.met is not None]
    print(f"\n{len(with_goal) - len(short)} of {len(with_goal)} goals met. The figures are in {OUTPUT}.")
    for figure in short:
        print(f"  SHORT: {figure.what}")
