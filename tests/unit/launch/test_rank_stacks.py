"""The stack frames of a rank's threads."""

from __future__ import annotations

import sys

import pytest

from notebook_accelerate import notebook_launcher
from notebook_accelerate.worker import stacks

pytestmark = pytest.mark.usefixtures("zygote")


def _functions_on_the_stack() -> list[str]:
    return [frame.function for frame in stacks.stack(sys._getframe())]


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_a_stack_starts_with_the_launched_function(method: str) -> None:
    run = notebook_launcher(_functions_on_the_stack, (), 1, start_method=method, panel=False)
    assert run.results == (["_functions_on_the_stack"],)


def test_a_stack_of_a_warm_rank_starts_with_the_cell() -> None:
    from notebook_accelerate.worker import warm_cells

    names: dict[str, object] = {"look": lambda: stacks.stack(sys._getframe(1))}
    frames = warm_cells.run_cell("look()", "<a cell>", names)
    assert [frame.filename for frame in frames] == ["<a cell>"]
