"""Every "works" in the table of docs/environments.md names existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "environments.md").read_text()
SESSIONS = (ROOT / "noxfile.py").read_text()
UNTESTED = ("unknown", "not available")
STATUSES = ("works", "works (kernel)", "HTML display", "HTML display (kernel)", *UNTESTED)


def _rows(heading: str) -> list[list[str]]:
    """Return the rows of a section's table, starting with the header."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _named() -> dict[tuple[str, str], list[str]]:
    """Return the tests that prove each cell of the table, by environment and column."""
    found: dict[tuple[str, str], list[str]] = {}
    for environments, column, test in _rows("The tests behind the table")[1:]:
        names = [environments] if environments.startswith("nbclient") else environments.split(", ")
        for name in names:
            found.setdefault((name, column), []).append(test)
    return found


def _cells() -> dict[tuple[str, str], str]:
    head, *rows = _rows("What works where")
    return {(row[0], column): status for row in rows for column, status in zip(head[1:], row[1:], strict=True)}


def test_each_status_is_explained() -> None:
    assert set(_cells().values()) <= set(STATUSES)
    explained = re.findall(r"^- \*\*(.+?)\*\*:", TEXT, re.MULTILINE)
    assert {status.removesuffix(" (kernel)") for status in STATUSES} <= set(explained)


def test_everything_that_works_has_a_test() -> None:
    tested = {cell for cell, status in _cells().items() if status not in UNTESTED}
    assert tested == set(_named())


def test_the_named_tests_exist() -> None:
    for test in {test for tests in _named().values() for test in tests}:
        path, _, name = test.partition("::")
        names = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in names, test


def test_the_versions_match_the_requirements() -> None:
    versions = {row[0]: row[1] for row in _rows("Versions")[1:]}
    for service in ("colab", "kaggle"):
        lines = "\n".join((ROOT / f"requirements/{name}.txt").read_text() for name in ("hosted", service))
        pins = dict(re.findall(r"^([\w-]+)==(\S+)$", lines, re.MULTILINE))
        for name in ("IPython", "ipykernel", "ipywidgets"):
            assert f"{name} {pins[name.lower()]}" in versions[service.title()]
        python = re.search(rf'"{service}": Environment\(python="([\d.]+)"', SESSIONS)
        assert python is not None
        assert f"Python {python.group(1)}" in versions[service.title()]
        torch = re.search(r'^HOSTED_TORCH = "torch==([\d.]+)"$', SESSIONS, re.MULTILINE)
        assert torch is not None
        assert f"torch {torch.group(1)}" in versions[service.title()]
    lock = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE))
    assert versions["marimo"] == lock["marimo"]
    for name in ("JupyterLab", "Notebook"):
        assert f"{name} {lock[name.lower()]}" in versions["JupyterLab, Notebook"]
