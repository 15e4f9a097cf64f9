"""The SIGCHLD handler that torch installs in a process with the first worker of a loader, and keeps."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader


@pytest.fixture(scope="session", autouse=True)
def _torch_watches_its_workers() -> None:
    """Let torch install its permanent SIGCHLD handler before the first leak check."""
    list(DataLoader(range(1), num_workers=1))
