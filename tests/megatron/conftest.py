from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.fresh import fresh_state

# Otherwise, each rank would import it again, which takes longer than the test. If it is not installed, nothing happens.
ranks._PRELOAD += [
    f"megatron.core.{name}"
    for name in ("dist_checkpointing", "distributed", "models.T5", "models.bert", "models.gpt", "optimizer")
]
SECONDS = 900
"""Time limit in seconds for one test. The first test may wait minutes for the imports of the rank server."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


__all__ = ["fresh_state", "pytest_collection_modifyitems"]
