"""Random programs read, train, gather, save and resume the same on Accelerate and on this package.

`python -m tests.parity.random_programs.sides 17 --text` compares program 17 and prints it: a script for torchrun.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

from tests.parity.random_programs.plans import plan
from tests.parity.random_programs.sides import Outcomes, compare, run_both
from tests.parity.random_programs.writing import write
from tests.support.nightly import rest_nightly

DAILY, ALL = 60, 1000


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    """Return both sides' outcomes for all programs that have tests in this session."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    numbers = sorted({call.params["number"] for call in calls if call is not None and "number" in call.params})
    return run_both(Path(tmp_path_factory.mktemp("random_programs")), numbers)


@pytest.mark.timeout(3000)  # The first test runs all programs, so it takes longer.
@pytest.mark.parametrize("number", rest_nightly(((number,) for number in range(ALL)), lambda number: number < DAILY))
def test_a_random_program_behaves_as_on_accelerate(number: int, outcomes: tuple[Outcomes, Outcomes]) -> None:
    theirs, ours = (side[number] for side in outcomes)
    lines = compare(theirs, ours)
    raised = [one["output"] for one in ours if "output" in one]
    assert not lines, "\n".join([*lines, *raised, write(number).text])


def test_a_program_is_the_same_each_time() -> None:
    assert write(7) == write(7)
    assert write(7).text != write(10).text


def test_losses_after_loading_are_not_compared_if_the_last_window_of_a_pass_stays_open() -> None:
    chosen = plan(532)
    assert chosen.accumulation > 1
    assert not chosen.sync_with_dataloader
    assert not chosen.has_same_losses
    assert replace(chosen, sync_with_dataloader=True).has_same_losses
