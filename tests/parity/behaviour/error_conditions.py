"""The table of Accelerate's error conditions: `python -m tests.parity.behaviour.error_conditions` updates it.

Each `raise` in Accelerate's source is a condition. Its row in `error_conditions.json` names a program that provokes it
on Accelerate, and that must raise here, too. If there is no such program, the row is a key of `REASONS`.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.parity.behaviour.both_sides import run_both
from tests.parity.behaviour.known_differences import KNOWN_DIFFERENCES

TABLE = Path(__file__).with_suffix(".json")
NOT_PROVOKED = "not provoked so far"
REASONS = {
    NOT_PROVOKED: "no program provokes it so far",
    "other device": "it needs a device that the test machine lacks (a GPU, a TPU, an HPU and so on)",
    "other package": "it depends on a package, or a version of one, that the comparison lacks or has",
    "installs": "install_xla works outside Colab here, and would change the environment of the comparison",
    "private": "it is an error of a private method that has no counterpart, or of an object that was not initialized",
    "unreachable": "Accelerate fails with another error first, or handles the case elsewhere",
    "command": "it is an error of a command; tests/parity/commands compares some of the commands",
    "passed on": "it raises an exception again that it has caught",
}
_MESSAGE = 90
"""The number of characters of a message that identify a condition."""


@dataclass(frozen=True)
class Condition:
    """One `raise` statement.

    Attributes:
        file: The file, relative to the package.
        line: The line in the file.
        function: The qualified name of the function that contains it, or an empty string for the module.
        error: The name of the exception's class.
        message: The start of the message, in which each value is replaced by ``{}``.
    """

    file: str
    line: int
    function: str
    error: str
    message: str

    @property
    def key(self) -> str:
        """The name of the row in the table, which does not depend on the line."""
        return f"{self.file} {self.function}: {self.error}: {self.message}"


def error_conditions() -> dict[str, Condition]:
    """Return the conditions of the installed Accelerate by key. Equal keys of one function are numbered."""
    spec = find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    found: dict[str, Condition] = {}
    times: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        if file.startswith("test_utils/"):
            continue
        for condition in _conditions_in(ast.parse(path.read_text()), file, ""):
            times[condition.key] += 1
            number = times[condition.key]
            found[condition.key if number == 1 else f"{condition.key} (number {number})"] = condition
    return found


def _conditions_in(tree: ast.AST, file: str, inside: str) -> Iterator[Condition]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _conditions_in(node, file, f"{inside}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.Raise):
            yield Condition(file, node.lineno, inside, *_error_and_message(node.exc))
        yield from _conditions_in(node, file, inside)


def _error_and_message(raised: ast.expr | None) -> tuple[str, str]:
    if not isinstance(raised, ast.Call):
        return ("", "") if raised is None else (ast.unparse(raised), "")
    text = "".join(_text(argument) for argument in raised.args[:1])
    return ast.unparse(raised.func), " ".join(text.split())[:_MESSAGE]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


# ---- the programs that reach conditions


def programs_by_position(outcomes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the programs that raise at each position in Accelerate's source.

    Args:
        outcomes: The outcomes of the programs on Accelerate, by name.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name, outcome in outcomes.items():
        for position in {position for rank in outcome.get("ranks", ()) for position in _positions(rank["result"])}:
            found[position].append(name)
    return found


def _positions(description: Any) -> Iterator[str]:
    if isinstance(description, dict):
        if description.get("raised at"):
            yield description["raised at"]
        for value in description.values():
            yield from _positions(value)
    elif isinstance(description, list):
        for value in description:
            yield from _positions(value)


def updated(rows: Mapping[str, str], outcomes: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows with a program for each condition that a program reaches, and without vanished conditions.

    Args:
        rows: The rows of the table so far.
        outcomes: The outcomes of the programs on Accelerate, by name.
    """
    reached = programs_by_position(outcomes)
    new = {}
    for key, condition in error_conditions().items():
        # Keep the row's program if it still reaches the condition, or else prefer one that behaves alike on both sides.
        names = sorted(
            reached[f"{condition.file}:{condition.line}"], key=lambda name: (name in KNOWN_DIFFERENCES, name)
        )
        old = rows.get(key, NOT_PROVOKED)
        skipped = "skipped" in outcomes.get(old, ())
        kept = old in names or skipped or (old in REASONS and not names)
        new[key] = old if kept else next(iter(names), NOT_PROVOKED)
    return new


def read_table() -> dict[str, str]:
    """Return the rows of the table."""
    rows: dict[str, str] = json.loads(TABLE.read_text())
    return rows


def summary(rows: Mapping[str, str]) -> str:
    """Return the number of conditions by state.

    Args:
        rows: The rows of the table.
    """
    states = Counter(
        row if row in REASONS else "known difference" if row in KNOWN_DIFFERENCES else "equal" for row in rows.values()
    )
    return f"{len(rows)} error conditions: " + ", ".join(f"{number} {state}" for state, number in states.most_common())


def main() -> int:
    """Run all programs on both packages, write the table, and print the number of conditions by state."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, _ = run_both(Path(folder))
    rows = updated(read_table() if TABLE.exists() else {}, theirs)
    TABLE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
