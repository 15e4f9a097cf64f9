"""A fixture for the SIGCHLD handler that torch installs, for good, when a process starts its first loader worker."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader


@pytest.fixture(scope="session", autouse=True)
def _torch_watches_its_workers() -> None:
    """Let torch install its permanent SIGCHLD handler before the first leak check."""
    list(DataLoader(range(1), num_workers=1))
