"""The memory of a rank as text: for the notebook, and for the note of an out-of-memory error in the rank itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("parameters", "gradients", "optimizer state")


def size(nbytes: float) -> str:
    """Return a number of bytes as "64.0 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def part_rows(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return what a rank's memory holds, as names and bytes; what is nothing is left out."""
    rows = [(str(name), int(nbytes)) for name, nbytes in report["parts"].items()]
    if peak := report.get("activations at the peak"):
        rows.append(("activations at the peak", int(peak)))
    for device, counters in report["devices"].items():
        names = {"peak": "peak", "cache": "cache", "fragmented": "fragmented cache"}
        rows += [(f"{device} {text}", int(counters[name])) for name, text in names.items()]
    names = {"resident": "process, resident", "peak": "process, peak", "python": "Python's own objects"}
    rows += [(names[name], int(nbytes)) for name, nbytes in report["process"].items()]
    return [(name, nbytes) for name, nbytes in rows if nbytes]


def table(report: Mapping[str, Any]) -> str:
    """Return the report as aligned lines."""
    lines = ["memory of this rank when it failed:"]
    lines += _aligned(part_rows(report))
    if report["modules"]:
        lines += ["by module:", *_aligned([(row[0], sum(row[1:])) for row in report["modules"][:8]])]
    if report["variables"]:
        rows = [(f"{name} in {function}", nbytes) for name, function, nbytes in report["variables"][:8]]
        lines += ["by variable:", *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, int]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {size(nbytes):>10}" for name, nbytes in rows]
