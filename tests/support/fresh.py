"""Start tests of the worker side in the state of a process that has not created an Accelerator yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook_accelerate.state import reset_shared_state


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Forget the shared state before and after a test."""
    reset_shared_state()
    yield
    reset_shared_state()
