"""Each program returns, raises and writes the same with this package as with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

from tests.parity.behaviour.both_sides import compare, run_both
from tests.parity.behaviour.coverage import names_without_programs
from tests.parity.behaviour.error_conditions import REASONS, error_conditions, programs_by_position, read_table
from tests.parity.behaviour.known_differences import KNOWN_DIFFERENCES
from tests.parity.behaviour.program_table import Program, programs

PROGRAMS = {each.name: each for each in programs()}
Outcomes = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_both(Path(tmp_path_factory.mktemp("behaviour")))


@pytest.mark.parametrize("each", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_behaves_as_on_accelerate(each: Program, outcomes: Outcomes) -> None:
    theirs, ours = (side[each.name] for side in outcomes)
    if "skipped" in theirs:
        pytest.skip(theirs["skipped"])
    lines = compare(each, theirs, ours)
    if each.name in KNOWN_DIFFERENCES:
        assert lines, f"this known difference no longer exists: {KNOWN_DIFFERENCES[each.name]}"
    else:
        assert not lines, "\n".join([*lines, "here:", ours["ranks"][0]["output"]])


def test_known_differences_name_existing_programs() -> None:
    assert KNOWN_DIFFERENCES.keys() <= PROGRAMS.keys()


def test_the_table_lists_every_error_condition_of_accelerate() -> None:
    rows = read_table()
    assert rows.keys() == error_conditions().keys(), "run: python -m tests.parity.behaviour.error_conditions"
    assert {row for row in rows.values() if row not in REASONS} <= PROGRAMS.keys()


def test_programs_provoke_the_error_conditions_of_their_rows(outcomes: Outcomes) -> None:
    reached, rows = programs_by_position(outcomes[0]), read_table()
    wrong = []
    for key, condition in error_conditions().items():
        row = rows[key]
        skipped = row in PROGRAMS and "skipped" in outcomes[0][row]
        if row not in REASONS and not skipped and row not in reached[f"{condition.file}:{condition.line}"]:
            wrong.append(f"{key}: not provoked by {row}")
    assert not wrong, "\n".join(wrong)


def test_every_public_name_has_a_program() -> None:
    assert not names_without_programs()
