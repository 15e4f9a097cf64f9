"""The example notebooks import only public names."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accelerate import _lazy

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").rglob("*.ipynb"))
PACKAGE = "notebook_accelerate"
PUBLIC = {PACKAGE, *(f"{PACKAGE}.{name}" for name in ("big_modeling", "utils", "widgets", "tracking"))}


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from this package in a notebook's cells."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        lines = "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else []
        python = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)
        if lines and lines[0].startswith("%%"):  # Below the line with the magic, the cell is Python.
            python = "\n".join(lines[1:])
        for node in ast.walk(ast.parse(python)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == PACKAGE)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_public_names(path: Path) -> None:
    found = list(_imports(path))
    assert found, f"{path.name} does not import the package"
    for module, name in found:
        assert module in PUBLIC, f"{path.name} imports {module}"
        assert not name or name in _lazy.exports(module).homes, f"{path.name} imports {module}.{name}"
