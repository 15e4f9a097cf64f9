"""A server process shared by the tests of a file, so that the leak check sees it before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import notebook_accelerate
from notebook_accelerate.launch.processes.zygote import ensure_zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[int]:
    """Return the process id of the zygote, which has imported what it needs and forked once."""
    notebook_accelerate.notebook_launcher(print, num_processes=1, start_method="zygote")
    yield ensure_zygote().pid
    notebook_accelerate.shutdown()
