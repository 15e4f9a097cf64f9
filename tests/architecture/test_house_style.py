"""Lengths of functions. `pytest -s tests/architecture/test_house_style.py` prints the table."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_USUAL, FUNCTION_MOST = 25, 60
SHARE = 0.95
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Length:
    """The length of a function."""

    name: str
    lines: int


def _files(tree: str) -> list[Path]:
    folders = {"library": ("notebook_accelerate", "widgets"), "tests and examples": ("tests", "examples")}[tree]
    paths = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(paths)


def functions_of(path: Path) -> list[Length]:
    """Measure each function's body in lines that hold code: no docstring, comment, blank line or signature."""
    source = path.read_text()
    code = code_lines(source)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            lines = {line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)}
            found.append(Length(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", len(lines & code)))
    return found


def code_lines(source: str, *, docstrings: bool = True) -> set[int]:
    """Return the numbers of the lines that hold code; ``docstrings`` says whether those count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines if docstrings else lines - _docstring_lines(source)


def _docstring_lines(source: str) -> set[int]:
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def _row(what: str, rows: list[Length], usual: int, most: int) -> str:
    within = sum(row.lines <= usual for row in rows) / max(len(rows), 1)
    longest = max(rows, key=lambda row: row.lines)
    share = f"{len(rows):>5}, {within:.1%} within {usual}"
    return f"{what:<32} {share:<26} longest {longest.lines} of {most}: {longest.name}"


@pytest.mark.parametrize("tree", ["library", "tests and examples"])
def test_functions_are_short(tree: str) -> None:
    rows = [length for path in _files(tree) for length in functions_of(path)]
    print("\n" + _row(f"functions, {tree}", rows, FUNCTION_USUAL, FUNCTION_MOST))
    over = [row for row in rows if row.lines > FUNCTION_MOST]
    assert over == [], f"no function has more than {FUNCTION_MOST} lines of code"
    longer = [row for row in rows if row.lines > FUNCTION_USUAL]
    assert len(longer) <= (1 - SHARE) * len(rows), f"95 in 100 functions stay within {FUNCTION_USUAL} lines: {longer}"
