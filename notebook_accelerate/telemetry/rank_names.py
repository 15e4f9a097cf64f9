"""Write the numbers of ranks as text for messages."""

from __future__ import annotations

from collections.abc import Iterable

MIN_RANGE = 3
"""Minimum number of consecutive ranks that are written as a range."""


def rank_names(ranks: Iterable[int]) -> str:
    """Return the names of ranks as text, such as "rank 1", "ranks 0, 2" or "ranks 0–5, 8"."""
    runs: list[list[int]] = []
    ordered = sorted(set(ranks))
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) >= MIN_RANGE else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)
