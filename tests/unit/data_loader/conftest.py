"""What torch's loaders leave in a process the first time one starts workers."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader


@pytest.fixture(scope="session", autouse=True)
def _torch_watches_its_workers() -> None:
    """Let torch install its SIGCHLD handler, which it keeps, before the first leak check."""
    list(DataLoader(range(1), num_workers=1))
