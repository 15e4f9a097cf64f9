"""One kernel for the faults of a file: each test also shows that the kernel is as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import children, ready_kernel


class SharedKernel:
    """A kernel with torch imported and its zygote up, and the next one once a test has lost it."""

    def __init__(self, kernels: ExitStack) -> None:
        self._kernels = kernels
        self._current: Kernel | None = None

    def get(self) -> Kernel:
        """Return the living one."""
        if self._current is None or not self._current.alive():
            self._current = self._kernels.enter_context(ready_kernel())
        return self._current


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[SharedKernel]:
    """Return the file's kernel."""
    with ExitStack() as kernels:
        shared = SharedKernel(kernels)
        shared.get()
        yield shared


@pytest.fixture
def kernel(shared_kernel: SharedKernel) -> Iterator[Kernel]:
    """Return the file's kernel, and see afterwards that no process is left and that the next launch works."""
    kernel = shared_kernel.get()
    yield kernel
    kernel.expect_answer()
    assert children(kernel) == []
    assert kernel.check("launch(rank).results").result_text == "(0, 1)"
