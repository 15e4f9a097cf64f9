"""Tables of cases, some of which are tested daily, and all of which are tested nightly (`make test-nightly`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rest_nightly(cells: Iterable[tuple[Any, ...]], daily: Callable[..., bool]) -> list[Any]:
    """Mark the cells of a table as nightly, except those whose values ``daily`` accepts."""
    return [pytest.param(*cell, marks=() if daily(*cell) else pytest.mark.nightly) for cell in cells]
