from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.fresh import fresh_state

# Import megatron-core in the rank server if it is installed. Each rank would otherwise import it again, which takes
# longer than the test.
ranks._PRELOAD += [
    f"megatron.core.{name}"
    for name in ("dist_checkpointing", "distributed", "models.T5", "models.bert", "models.gpt", "optimizer")
]
SECONDS = 900
"""The time limit in seconds for one test. The first test may wait minutes for the rank server's imports."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


__all__ = ["fresh_state", "pytest_collection_modifyitems"]
