"""Fixtures: one kernel for each file, with answers to its prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel
from tests.support.notebooks import Notebooks, notebooks


class Answers:
    """The lines that the user types, in order, and the prompts that were shown."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.asked: list[str] = []

    def __call__(self, prompt: str) -> str:
        """Answer a prompt with the next line."""
        self.asked.append(prompt)
        return self.waiting.pop(0) if self.waiting else ""


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Return the answers to the prompts of the file's kernel."""
    return Answers()


@pytest.fixture(scope="module")
def kernel(answers: Answers) -> Iterator[Kernel]:
    """Yield a kernel with torch imported and its zygote running."""
    with ready_kernel(answer=answers) as kernel:
        yield kernel


@pytest.fixture(scope="session")
def two_notebooks() -> Iterator[Notebooks]:
    """Yield two kernels that all files share. Tests check that they leave the kernels' state unchanged."""
    with notebooks(2) as found:
        yield found
