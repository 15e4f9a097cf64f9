"""Execute notebooks in real Jupyter kernels, save the results as notebooks and HTML pages, and print the last outputs.

python examples/run_headless.py examples/01_quickstart.ipynb ...
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from traitlets.config import Config

BUILD = Path(__file__).resolve().parents[1] / ".build" / "examples"
SECONDS_PER_CELL = 1200


def main(paths: list[str]) -> int:
    """Execute each notebook. Return 1 if any of them failed, and 0 otherwise."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jupyter-") as folder:
        # Use temporary folders, so that the user's Jupyter configuration is neither read nor changed.
        os.environ.pop("XDG_RUNTIME_DIR", None)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "XDG_STATE_HOME"):
            os.environ[name] = str(Path(folder) / name.lower())
        return max(execute(Path(path), Path(folder)) for path in paths)


def execute(path: Path, folder: Path) -> int:
    """Execute one notebook and print the output of its last cell. Return 1 if a cell failed, and 0 otherwise.

    Args:
        path: The notebook to execute.
        folder: The folder for the kernel's sockets.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        store_widget_state=False,  # save the static reports, not the state of live panels
        # Use sockets that only this user can open.
        config=Config(KernelManager={"transport": "ipc", "connection_file": str(folder / f"{path.stem}.json")}),
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )
    begin = time.monotonic()
    failure = None
    try:
        client.execute()
    except CellExecutionError as error:
        failure = error
    nbformat.write(notebook, BUILD / path.name)
    page = BUILD / path.with_suffix(".html").name
    page.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    print(f"{path}: {time.monotonic() - begin:.1f} s in a kernel; with all outputs and reports in {page}")
    if failure:
        print(failure)
        return 1
    print("\n".join(f"    {line}" for line in last_text(notebook).splitlines()), flush=True)
    return 0


def last_text(notebook: nbformat.NotebookNode) -> str:
    """Return the text of the last cell with output: its streams or, without streams, its displays and result."""
    for cell in reversed(notebook.cells):
        outputs = cell.get("outputs", [])
        printed = "".join(output.text for output in outputs if output.output_type == "stream")
        shown = "\n".join(output.data.get("text/plain", "") for output in outputs if "data" in output)
        if text := printed.strip() or shown.strip():
            return text
    return "(no cell printed anything)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
