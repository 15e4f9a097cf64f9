"""Downsampling of curves by M4.

M4 keeps the first, the last, the smallest and the largest value of every group of neighbours, so that a line through
the kept points has the same extremes and the same joints as the complete line (Jugel, Jerzak, Hackenbroich and Markl,
"M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014). A group with NaN keeps one NaN too, because
readers look for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def m4(values: np.ndarray, points: int) -> np.ndarray:
    """Return the indices that M4 keeps.

    Args:
        values: float64, shape (n,), in drawing order.
        points: Approximate number of points to keep, at least 4; NaN may add a quarter.

    Returns:
        Ascending indices, int64; all indices where n is at most ``points``.
    """
    import numpy as np

    count = len(values)
    if count <= points:
        return np.arange(count)
    size = -(-count // max(1, points // 4))
    full = count // size * size
    base = np.arange(0, full, size)
    kept = [base, base + size - 1, *extremes(values[:full], size)]
    if full < count:  # the last, shorter group
        kept.append(full + m4(values[full:], 4) if count - full > 4 else np.arange(full, count))
    return np.unique(np.concatenate(kept))


def extremes(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the smallest and of the largest value of each group, and of one NaN of groups with NaN.

    Args:
        values: float64, shape (n,), a multiple of ``size``.
        size: Number of neighbours in a group.
    """
    import numpy as np

    groups = values.reshape(-1, size)
    first = np.arange(0, len(values), size)
    missing = np.isnan(groups)
    rows = missing.any(axis=1)
    return (
        first + np.where(missing, np.inf, groups).argmin(axis=1),
        first + np.where(missing, -np.inf, groups).argmax(axis=1),
        first[rows] + missing[rows].argmax(axis=1),
    )
