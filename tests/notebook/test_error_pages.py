"""In a notebook, every exception's message ends with the address of its page; in a terminal, it does not."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from notebook_accelerate import errors
from tests.support.kernel import Kernel

pytestmark = [pytest.mark.notebook]

CLASSES = sorted(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
)


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_ends_with_its_page(kernel: Kernel, name: str) -> None:
    cell = kernel.run(f"from notebook_accelerate import errors\nraise errors.{name}('what happened')")
    assert cell.error is not None
    lines = cell.error.text.splitlines()
    assert lines[-1] == f"see {errors.PAGES}{name}"
    assert lines[-2].endswith(f"{name}: what happened")


@pytest.mark.timeout(300)
def test_a_failed_run_ends_with_the_relevant_page(kernel: Kernel) -> None:
    kernel.check("from notebook_accelerate import notebook_launcher, errors")
    cell = kernel.run("def train():\n    1 / 0\n\nnotebook_launcher(train, num_processes=1)")
    assert cell.error is not None
    assert cell.error.text.splitlines()[-1] == f"see {errors.PAGES}WorkerError"
    cell = kernel.run(
        "def train():\n    raise errors.CheckpointMismatchError('other')\n\nnotebook_launcher(train, num_processes=1)"
    )
    assert cell.error is not None
    assert cell.error.text.splitlines()[-1] == f"see {errors.PAGES}CheckpointMismatchError"


def test_a_terminal_shows_the_message_alone() -> None:
    code = "from IPython.core.interactiveshell import InteractiveShell as Shell\nshell = Shell.instance()\n"
    code += "shell.run_cell('from notebook_accelerate import errors')\n"
    code += "".join(f"shell.run_cell('raise errors.{name}(\"what happened\")')\n" for name in CLASSES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("what happened") >= len(CLASSES)
    assert errors.PAGES not in done.stdout + done.stderr
