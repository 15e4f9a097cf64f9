"""A kernel that the fault tests of a file share, and that must be unchanged after each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import children, ready_kernel


class SharedKernel:
    """A kernel with torch imported and its zygote running. If a test ends it, the next test gets a new one."""

    def __init__(self, kernels: ExitStack) -> None:
        self._kernels = kernels
        self._current: Kernel | None = None

    def get(self) -> Kernel:
        """Return the current kernel, or a new one if it is no longer alive."""
        if self._current is None or not self._current.alive():
            self._current = self._kernels.enter_context(ready_kernel())
        return self._current


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """Yield the object that holds the file's kernel."""
    with ExitStack() as kernels:
        shared = SharedKernel(kernels)
        shared.get()
        yield shared


@pytest.fixture
def kernel(shared_kernel: SharedKernel) -> Iterator[Kernel]:
    """Yield the file's kernel. Check afterwards that it has no child processes and that the next launch works."""
    kernel = shared_kernel.get()
    yield kernel
    kernel.expect_answer()
    assert children(kernel) == []
    assert kernel.check("launch(rank).results").result_text == "(0, 1)"
