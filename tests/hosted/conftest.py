"""These tests need an environment with the versions of a notebook service."""

from __future__ import annotations

import os

import pytest

SERVICE = os.environ.get("TEST_HOSTED", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests in other environments."""
    if not SERVICE:
        for item in items:
            if item.path.parent.name == "hosted":
                item.add_marker(
                    pytest.mark.skip(reason="needs Colab's or Kaggle's versions: make test-colab test-kaggle")
                )
