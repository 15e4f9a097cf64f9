"""Divides a sequence into consecutive parts of about equal size."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where all parts but the first begin, with the smallest possible largest part.

    Args:
        sizes: Sizes of the items; at least as many as there are parts.
        parts: Number of parts; none is empty.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill_parts(sizes, middle, 1)) < parts:
            high = middle
        else:
            low = middle + 1
    return _fill_parts(sizes, low, parts)


def _fill_parts(sizes: Sequence[int], limit: int, parts: int) -> list[int]:
    """Return where parts begin that are filled up to a limit; none of the last `parts` - 1 is empty."""
    cuts: list[int] = []
    held = 0
    for at, size in enumerate(sizes):
        needed = parts - 1 - len(cuts)
        if at and (held + size > limit or len(sizes) - at == needed):
            cuts.append(at)
            held = 0
        held += size
    return cuts
