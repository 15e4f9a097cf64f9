"""Every code block on the site and in the README runs. Each page has its own kernel, with real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import pages
from tests.support.kernel import Cell, Kernel

pytestmark = [pytest.mark.notebook]

SECONDS_PER_BLOCK = 300.0
PAGES = [path for path in (*pages.pages(), pages.README) if pages.blocks(path.read_text())]


def _shown(cell: Cell) -> str:
    """Return everything that a reader sees under a cell, as text."""
    displays = [str(data.get("text/plain", "")) for data in cell.displays]
    return "\n".join([cell.plain, *displays, cell.result_text or "", cell.error.text if cell.error else ""])


def _run(kernel: Kernel, block: pages.Block, where: str) -> None:
    kernel.types(*(line.strip() for line in block.options.get("types", "").split(";")))
    cell = kernel.run(block.source, SECONDS_PER_BLOCK)
    expected = block.options.get("raises")
    if expected is None:
        cell.expect_ok()
    else:
        assert cell.error is not None, f"{where}: the block must fail"
        assert cell.error.ename == expected, f"{where}: {cell.error.text}"
    if block.output:
        kernel.pump(0.2)
    shown = _shown(cell)
    assert not (missing := block.missing_from(shown)), f"{where}: not in the output: {missing}\nit was:\n{shown[:4000]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(pages.README.parent).with_suffix("")))
def test_every_block_of_a_page_runs(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    if missing := pages.missing_packages(pages.packages_needed(text)):
        pytest.skip(f"needs {', '.join(missing)}: make test-docs installs it")
    with Kernel(env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path) as kernel:
        for block in pages.blocks(text):
            if block.is_executed:
                _run(kernel, block, f"{path.name}:{block.line}")
        kernel.check("import notebook_accelerate; notebook_accelerate.shutdown()")
