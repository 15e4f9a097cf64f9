"""The names, parameters, defaults, members and methods in all areas of the table exist in this package."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from tests.parity.surface import compare


@pytest.mark.parametrize(
    ("module", "name", "row"), [pytest.param(*entry, id=".".join(entry[:2])) for entry in compare.rows(compare.AREAS)]
)
def test_a_name_matches_the_table(module: str, name: str, row: dict[str, Any]) -> None:
    assert compare.gaps(module, name, row) == []


def test_the_table_lists_each_area() -> None:
    assert {row["area"] for _, _, row in compare.rows(compare.AREAS)} == set(compare.AREAS)


def test_differences_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colour(enum.Enum):
        RED = "red"

    def paint(colour: Colour = Colour.RED, width: int = 2) -> None: ...

    import notebook_accelerate.errors

    monkeypatch.setattr(notebook_accelerate.errors, "paint", paint, raising=False)
    monkeypatch.setattr(notebook_accelerate.errors, "Colour", Colour, raising=False)
    row = {"kind": "function", "signature": "(colour='red', width: 'int | None' = 3, *, depth=<object object>)"}
    found = compare.gaps("errors", "paint", row)
    assert [line.partition(": ")[2] for line in found] == ["width=2, the table says 3", "parameter depth missing"]
    members = {"kind": "enum", "members": {"RED": "red", "BLUE": "blue"}, "methods": {"mix": "(self)"}}
    found = compare.gaps("errors", "Colour", members)
    assert [line.partition("Colour")[2] for line in found] == [": member BLUE='blue' missing", ".mix: method missing"]
    assert "no attribute 'absent'" in compare.gaps("errors", "absent", {"kind": "function"})[0]
