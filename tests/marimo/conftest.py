"""These tests need marimo, and a browser for its page."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM


def _missing() -> str | None:
    for name in ("marimo", "playwright"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: make test-marimo installs it"
    return None if Path(CHROMIUM).exists() else f"no chromium at {CHROMIUM}: apt-get install chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests if marimo or the browser is missing."""
    reason = _missing()
    for item in items:
        if item.path.parent.name == "marimo":
            item.add_marker(pytest.mark.leaks_ok("playwright's loop ends with its browser"))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
