"""Fewer points of a curve that look the same: M4.

M4 keeps of every group of neighbours the first, the last, the smallest and the largest value, so that a line drawn
through what is left has the same extremes and the same joints as the whole (Jugel, Jerzak, Hackenbroich and Markl,
"M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014). A group with NaN keeps one NaN besides: that is
what the reader looks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def m4(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices that M4 keeps.

    Args:
        values: float64, shape (n,), in the order they are drawn.
        points: About how many to keep, at least 4; NaN may add a quarter.

    Returns:
        Ascending indices, int64; all of them where n is at most ``points``.
    """
    import numpy as np

    count = len(values)
    if count <= points:
        return np.arange(count)
    size = -(-count // max(1, points // 4))
    whole = count // size * size
    groups = values[:whole].reshape(-1, size)
    base = np.arange(0, whole, size)
    missing = np.isnan(groups)
    kept = [
        base,
        base + size - 1,
        base + np.where(missing, np.inf, groups).argmin(axis=1),
        base + np.where(missing, -np.inf, groups).argmax(axis=1),
    ]
    rows = missing.any(axis=1)
    kept.append(base[rows] + missing[rows].argmax(axis=1))
    if whole < count:  # the last, shorter group
        kept.append(whole + m4(values[whole:], 4) if count - whole > 4 else np.arange(whole, count))
    return np.unique(np.concatenate(kept))


__all__ = ["m4"]
