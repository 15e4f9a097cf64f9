"""What ``!command`` in a function of a cell calls in a rank that is not forked from the kernel."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NoReturn

from notebook_accelerate.worker.console import flush


class RankShell:
    """The part of IPython's shell that needs no kernel: commands of the system."""

    def system(self, command: str) -> None:
        """Run a command; its output is the rank's."""
        flush()
        subprocess.run(_expanded(command), shell=True, check=False)  # noqa: S602 - the user's own command

    system_piped = system_raw = system

    def getoutput(self, command: str, **_: Any) -> list[str]:
        """Return the lines that a command prints."""
        flush()
        done = subprocess.run(_expanded(command), shell=True, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S602
        return done.stdout.splitlines()

    def run_line_magic(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """Raise: magics need the kernel's shell."""
        raise RuntimeError(
            f"%{name} runs in a kernel, and this rank is a process of its own; write what it does in Python, or launch "
            "with start_method='fork'"
        )

    run_cell_magic = magic = run_line_magic


def _expanded(command: str) -> str:
    """Replace {names} and $names of the calling function, as IPython does."""
    from IPython.utils.text import DollarFormatter

    caller = sys._getframe(2)
    names = {**caller.f_globals, **caller.f_locals}
    try:
        return str(DollarFormatter().vformat(command, args=[], kwargs=names))
    except Exception:  # noqa: BLE001 - IPython, too, runs what it cannot expand as it stands
        return command


_shell = RankShell()


def get_ipython() -> RankShell:
    """Return what stands for the shell in the names of the user's cells."""
    return _shell
