"""Run the selected rows, print their figures, and compare them with the recorded ones."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from benchmarks import bench, page, record
from benchmarks.bench import Figure, Row
from benchmarks.record import number

OUTPUT = Path(".build") / "bench.json"

_WIDTHS = (62, 10, 10, 6, 12, 16)
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
            "--quick" selects the quick rows. "--record" records the figures of all rows that could be measured.

    Returns:
        0 on success, 1 if a row could not be measured, 2 if an argument is unknown.
    """
    options, words = {word for word in arguments if word.startswith("--")}, set(arguments)
    words = set(QUICK) if "--quick" in options else words - options
    if unknown := options - OPTIONS:
        print(f"Unknown option: {', '.join(sorted(unknown))}. Known options: {', '.join(sorted(OPTIONS))}.")
        return 2
    rows = [
        entry for entry in bench.ROWS if not words or bool({entry.area, entry.name} & words) != ("--but" in options)
    ]
    if not rows:
        known = sorted({entry.area for entry in bench.ROWS} | {entry.name for entry in bench.ROWS})
        print(f"Unknown area or row: {', '.join(sorted(words))}. Known ones: {', '.join(known)}.")
        return 2
    print(f"{_machine()}\nMedians and quartiles. The peer is Accelerate unless the figure says otherwise.")
    figures: list[tuple[Row, Figure]] = []
    failed = [entry for entry in rows if not _measure(entry, figures)]
    _write(figures)
    complete = [record.Entry(row.area, row.name, figure) for row, figure in figures if row not in failed]
    _print_changes(complete)
    if "--record" in options:
        record.write(complete, _machine())
        page.write()
    if failed:
        print(f"  FAILED: {', '.join(entry.name for entry in failed)}")
    return int(bool(failed))


def _measure(entry: Row, figures: list[tuple[Row, Figure]]) -> bool:
    """Measure and print one row. Return False if it raised an exception."""
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
    cells = (number(figure.ours, figure.unit), number(figure.peer, figure.unit), ratio, spread, figure.goal)
    text = f"{_line(figure.what, *cells)}  {mark}".rstrip()
    return f"{text}\n      {figure.note}" if figure.note else text


def _line(what: str, *cells: str) -> str:
    return f"  {what:<{_WIDTHS[0]}}" + "".join(
        f"  {cell:>{width}}" for cell, width in zip(cells, _WIDTHS[1:], strict=True)
    )


def _print_changes(entries: Sequence[record.Entry]) -> None:
    """Print the change of each figure since it was recorded, and at the end, repeat the figures that are worse."""
    pairs = record.changes(entries)
    if not pairs:
        return
    print(f"\nChanges since the figures were recorded in {record.RECORDED.name}:")
    lines = [
        (f"{now.area}, {now.row}, {now.figure.what}: {record.change(then.figure, now.figure)}", then, now)
        for then, now in pairs
    ]
    for text, then, _ in lines:
        print(f"  {then.date}  {text}")
    for text, then, now in lines:
        if record.is_worse(then.figure, now.figure):
            print(f"  WORSE: {text}")


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
