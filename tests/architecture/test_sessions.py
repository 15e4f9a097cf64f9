"""Make targets are sessions of noxfile.py, documents name only existing targets, and sessions run all test folders."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TREE = ast.parse((ROOT / "noxfile.py").read_text())


def session_table(name: str) -> Any:
    """Return the value of a constant in noxfile.py without importing the file, which needs nox."""
    (value,) = (
        node.value
        for node in TREE.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    )
    return ast.literal_eval(value)


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = re.search(r"^TARGETS := (.*)$", text, re.MULTILINE)
    assert listed is not None
    return {*re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE), *listed.group(1).split()}


def _sessions() -> set[str]:
    found = set()
    for function in (node for node in TREE.body if isinstance(node, ast.FunctionDef)):
        for decorator in map(ast.unparse, function.decorator_list):
            if decorator.startswith("nox.session"):
                named = re.search(r"name='([^']+)'", decorator)
                found.add(named.group(1) if named else function.name)
    return found


def test_each_target_of_make_is_a_session() -> None:
    assert make_targets() - {"help", "clean"} == _sessions() - {"tests"}, "`tests` runs the parts of `make test`"


def test_every_folder_of_tests_is_part_of_a_session() -> None:
    text = (ROOT / "noxfile.py").read_text()
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in folders if not re.search(rf'["/]{folder}["/]', text)} == set()


def test_every_make_target_of_the_documents_exists() -> None:
    targets = make_targets()
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = re.findall(r"(?<![\w-])make ([a-z][a-z-]*[a-z])(?=[`\s])", _commands((ROOT / name).read_text()))
        assert set(named) <= targets, name
    assert {"demo", "test", "lint", "bench", "lab", "test-gpu"} <= targets


def _commands(text: str) -> str:
    """Return the parts of ``text`` that may be commands: code in backticks, indented code, and shell script lines."""
    code = re.findall(r"`[^`\n]+`", text)
    lines = [line for line in text.splitlines() if re.match(r"(\s{4,}|exec |\$ )?make |\s{4,}", line)]
    return "\n".join([*code, *lines]) + "\n"
