"""Execute the example notebooks cell by cell in a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.kernel import Cell, Kernel


def code_cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the source and the tags of each code cell."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


def run_all(kernel: Kernel, path: Path, changes: Mapping[str, str] | None = None) -> list[Cell]:
    """Execute the cells in order. Cells tagged raises-exception must fail, and all others must succeed.

    Args:
        kernel: The kernel.
        path: The notebook.
        changes: Pieces of code that each occur once in the notebook, and what to execute instead, to save time.
    """
    cells = []
    sources = list(code_cells(path))
    for old, new in (changes or {}).items():
        assert sum(source.count(old) for source, _ in sources) == 1, f"not once in {path.name}: {old}"
        sources = [(source.replace(old, new), tags) for source, tags in sources]
    for source, tags in sources:
        cell = kernel.run(source, timeout=300.0)
        if "raises-exception" in tags:
            assert not cell.ok, f"this cell must fail:\n{source}"
        else:
            cell.expect_ok()
        cells.append(cell)
    return cells


def find(cells: list[Cell], part: str) -> Cell:
    """Return the first cell whose source contains ``part``."""
    return next(cell for cell in cells if part in cell.code)
