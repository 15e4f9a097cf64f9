"""Execute the example notebooks cell by cell in a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.support.kernel import Cell, Kernel


def code_cells(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the source and the tags of each code cell."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


def run_all(kernel: Kernel, path: Path) -> list[Cell]:
    """Execute the cells in order. Cells tagged raises-exception must fail, and all others must succeed."""
    cells = []
    for source, tags in code_cells(path):
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
