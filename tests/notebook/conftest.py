"""One kernel per file, with answers for what asks for input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel
from tests.support.notebooks import Notebooks, notebooks


class Answers:
    """What the user types, in order; what was asked is kept."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.asked: list[str] = []

    def __call__(self, prompt: str) -> str:
        """Answer one prompt."""
        self.asked.append(prompt)
        return self.waiting.pop(0) if self.waiting else ""


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the answers of the file's kernel."""
    return Answers()


@pytest.fixture(scope="module")
def kernel(answers: Answers) -> Iterator[Kernel]:
    """Return a kernel with torch imported and its zygote up."""
    with ready_kernel(answer=answers) as kernel:
        yield kernel


@pytest.fixture(scope="session")
def two_notebooks() -> Iterator[Notebooks]:
    """Return two kernels for all files: each test compares what it may not change in them."""
    with notebooks(2) as found:
        yield found
