"""The tables of Accelerate's errors and messages: `python -m tests.parity.behaviour.condition_tables` updates them.

Each `raise` in Accelerate's source is a row of `error_conditions.json`, and each statement that logs or issues a
warning is a row of `messages.json`. A row names a program that reaches the statement, and that must raise or warn here,
too. If there is no such program, the row is a key of `REASONS`.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.parity.behaviour.both_sides import run_both
from tests.parity.behaviour.known_differences import KNOWN_DIFFERENCES

NOT_PROVOKED = "not provoked so far"
REASONS = {
    NOT_PROVOKED: "no program provokes it so far",
    "other device": "it needs a device that the test machine lacks (a GPU, a TPU, an HPU and so on)",
    "other package": "it depends on a package, or a version of one, that the comparison lacks or has",
    "installs": "install_xla works outside Colab here, and would change the environment of the comparison",
    "private": "it is an error of a private method that has no counterpart, or of an object that was not initialized",
    "unreachable": "Accelerate fails with another error first, or handles the case elsewhere",
    "command": "it belongs to a command; tests/parity/commands compares some of the commands",
    "passed on": "it raises an exception again that it has caught, or logs for its caller",
}
_MESSAGE = 90
"""The number of characters of a message that identify a condition."""


@dataclass(frozen=True)
class Condition:
    """One statement that raises an error, logs a message or issues a warning.

    Attributes:
        file: The file, relative to the package.
        lines: The lines of the statement.
        function: The qualified name of the function that contains it, or an empty string for the module.
        kind: The name of the exception's class, or of the function that logs or warns.
        message: The start of the message, in which each value is replaced by ``{}``.
    """

    file: str
    lines: range
    function: str
    kind: str
    message: str

    @property
    def key(self) -> str:
        """The name of the row in the table, which does not depend on the line."""
        return f"{self.file} {self.function}: {self.kind}: {self.message}"

    @property
    def positions(self) -> list[str]:
        """The positions in Accelerate's source at which a program reaches the statement."""
        return [f"{self.file}:{line}" for line in self.lines]


@dataclass(frozen=True)
class Table:
    """A table of statements.

    Attributes:
        name: The name of the file without its suffix.
        statement: Returns the kind and the message of a node that is such a statement.
        positions: Yields the positions in Accelerate's source that a rank's outcome contains.
    """

    name: str
    statement: Callable[[ast.AST], tuple[str, str] | None]
    positions: Callable[[Mapping[str, Any]], Iterator[str]]

    @property
    def path(self) -> Path:
        """The file with the rows."""
        return Path(__file__).with_name(f"{self.name}.json")

    def read(self) -> dict[str, str]:
        """Return the rows of the table."""
        rows: dict[str, str] = json.loads(self.path.read_text())
        return rows

    def conditions(self) -> dict[str, Condition]:
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
            for condition in self._conditions_in(ast.parse(path.read_text()), file, ""):
                times[condition.key] += 1
                number = times[condition.key]
                found[condition.key if number == 1 else f"{condition.key} (number {number})"] = condition
        return found

    def _conditions_in(self, tree: ast.AST, file: str, inside: str) -> Iterator[Condition]:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from self._conditions_in(node, file, f"{inside}.{node.name}".lstrip("."))
                continue
            described = self.statement(node)
            if described is not None:
                assert isinstance(node, (ast.stmt, ast.expr))
                yield Condition(file, range(node.lineno, (node.end_lineno or 0) + 1), inside, *described)
            yield from self._conditions_in(node, file, inside)

    def programs_by_position(self, outcomes: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the programs that reach each position in Accelerate's source.

        Args:
            outcomes: The outcomes of the programs on Accelerate, by name.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for name, outcome in outcomes.items():
            for position in {position for rank in outcome.get("ranks", ()) for position in self.positions(rank)}:
                found[position].append(name)
        return found

    def updated(self, outcomes: Mapping[str, Any]) -> dict[str, str]:
        """Return the rows with a program for each condition that a program reaches, and without vanished conditions.

        Args:
            outcomes: The outcomes of the programs on Accelerate, by name.
        """
        rows = self.read() if self.path.exists() else {}
        reached = self.programs_by_position(outcomes)
        new = {}
        for key, condition in self.conditions().items():
            # Keep the row's program if it still reaches the condition, or else prefer one that behaves alike here.
            found = {name for position in condition.positions for name in reached[position]}
            names = sorted(found, key=lambda name: (name in KNOWN_DIFFERENCES, name))
            old = rows.get(key, NOT_PROVOKED)
            skipped = "skipped" in outcomes.get(old, ())
            kept = old in names or skipped or (old in REASONS and not names)
            new[key] = old if kept else next(iter(names), NOT_PROVOKED)
        return new

    def summary(self, rows: Mapping[str, str]) -> str:
        """Return the number of conditions by state.

        Args:
            rows: The rows of the table.
        """
        states = Counter(
            row if row in REASONS else "known difference" if row in KNOWN_DIFFERENCES else "equal"
            for row in rows.values()
        )
        listed = ", ".join(f"{number} {state}" for state, number in states.most_common())
        return f"{len(rows)} {self.name.replace('_', ' ')}: {listed}"


# ---- the statements, and where programs reach them


def _raise(node: ast.AST) -> tuple[str, str] | None:
    if not isinstance(node, ast.Raise):
        return None
    if not isinstance(node.exc, ast.Call):
        return ("", "") if node.exc is None else (ast.unparse(node.exc), "")
    return ast.unparse(node.exc.func), _message(node.exc)


_MESSAGES = ("warnings.warn", "logger.warning", "logger.warning_once", "logger.error")


def _log_or_warn(node: ast.AST) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in _MESSAGES:
        return None
    return ast.unparse(node.func), _message(node)


def _message(call: ast.Call) -> str:
    return " ".join("".join(_text(argument) for argument in call.args[:1]).split())[:_MESSAGE]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


def _raised_at(description: Any) -> Iterator[str]:
    if isinstance(description, dict):
        if description.get("raised at"):
            yield description["raised at"]
        for value in description.values():
            yield from _raised_at(value)
    elif isinstance(description, list):
        for value in description:
            yield from _raised_at(value)


ERRORS = Table("error_conditions", _raise, lambda rank: _raised_at(rank["result"]))
MESSAGES = Table("messages", _log_or_warn, lambda rank: (position for _, position in rank["messages"]))
TABLES = (ERRORS, MESSAGES)


def main() -> int:
    """Run all programs on both packages, write the tables, and print the number of conditions by state."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, _ = run_both(Path(folder))
    for table in TABLES:
        rows = table.updated(theirs)
        table.path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        print(table.summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
