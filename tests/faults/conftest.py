"""A kernel shared by the fault tests of a file. Each test also checks that the kernel is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import children, ready_kernel


class SharedKernel:
    """A kernel with torch imported and its zygote running, replaced after a test has lost it."""

    def __init__(self, kernels: ExitStack) -> None:
        self._kernels = kernels
        self._current: Kernel | None = None

    def get(self) -> Kernel:
        """Return the living kernel."""
        if self._current is None or not self._current.alive():
            self._current = self._kernels.enter_context(ready_kernel())
        return self._current


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """Return the kernel of the file."""
    with ExitStack() as kernels:
        shared = SharedKernel(kernels)
        shared.get()
        yield shared


@pytest.fixture
def kernel(shared_kernel: SharedKernel) -> Iterator[Kernel]:
    """Return the kernel of the file. Check afterwards that no process is left and that the next launch works."""
    kernel = shared_kernel.get()
    yield kernel
    kernel.expect_answer()
    assert children(kernel) == []
    assert kernel.check("launch(rank).results").result_text == "(0, 1)"
