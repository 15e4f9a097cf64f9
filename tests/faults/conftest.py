"""One kernel for the faults of a file: each test also shows that the kernel is as it was before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import children, ready_kernel


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[Kernel]:
    """Return a kernel with torch imported and its zygote up."""
    with ready_kernel() as kernel:
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    """Return the file's kernel, and see afterwards that no process is left and that the next launch works."""
    yield shared_kernel
    assert children(shared_kernel) == []
    assert shared_kernel.check("launch(rank).results").result_text == "(0, 1)"
