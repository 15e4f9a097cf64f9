"""Each program returns, raises and writes the same with this package as with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

from tests.parity.behaviour.both_sides import compare, run_both
from tests.parity.behaviour.condition_tables import REASONS, TABLES, Table
from tests.parity.behaviour.coverage import names_without_programs
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


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_lists_every_condition_of_accelerate(table: Table) -> None:
    rows = table.read()
    assert rows.keys() == table.conditions().keys(), "run: python -m tests.parity.behaviour.condition_tables"
    assert {row for row in rows.values() if row not in REASONS} <= PROGRAMS.keys()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_programs_reach_the_conditions_of_their_rows(table: Table, outcomes: Outcomes) -> None:
    reached, rows = table.programs_by_position(outcomes[0]), table.read()
    wrong = []
    for key, condition in table.conditions().items():
        row = rows[key]
        skipped = row in PROGRAMS and "skipped" in outcomes[0][row]
        if row not in REASONS and not skipped and not any(row in reached[position] for position in condition.positions):
            wrong.append(f"{key}: not reached by {row}")
    assert not wrong, "\n".join(wrong)


def test_every_public_name_has_a_program() -> None:
    assert not names_without_programs()
