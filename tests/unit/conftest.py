"""Fixtures shared by all folders: the server of interpreters, and snapshots of rendered HTML."""

from __future__ import annotations

import pytest

from tests.support.interpreters import interpreters
from tests.support.snapshots import Snapshot, compare

__all__ = ["interpreters", "snapshot"]


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    """Return a function that compares HTML with a file in ``snapshots/`` next to the test."""
    folder = request.path.parent / "snapshots"
    return lambda name, html: compare(folder / f"{name}.html", html)
