"""Numbers as panels and reports show them."""

from __future__ import annotations

import math


def number(value: float, digits: int = 4) -> str:
    """Return a number without trailing zeros.

    Args:
        value: Any float.
        digits: The most significant digits.
    """
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size and (size >= 1e6 or size < 1e-3):
        mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{digits}g}"


def byte_size(count: int | None, unknown: str = "–") -> str:
    """Return bytes as "312 B", "2.6 KiB" or "340 GiB".

    Args:
        count: Bytes; None: not known.
        unknown: Returned for None.
    """
    if count is None:
        return unknown
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:,.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"


def percent(share: float | None) -> str:
    """Return a share as "50 %", small ones with two significant digits; "" for None.

    Args:
        share: From 0 to 1, more with padding; None: not known.
    """
    if share is None:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"
