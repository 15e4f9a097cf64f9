"""Makes a rank a plain process, in which libraries find no notebook and no interactive interpreter.

A rank that is forked from a kernel inherits IPython's shell, the kernel's modules and what libraries concluded from
them: tqdm would draw widgets, Lightning would refuse its strategies, and whatever sends to the front end would be
refused, because a session does not send from a fork. Ranks of other start methods inherit environment variables only.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from notebook_accelerate.errors import ipython_shell

_NOTEBOOK_PACKAGES = ("ipykernel.", "google.colab.")
"""Whose presence in ``sys.modules`` libraries take for a notebook."""

_hidden: dict[str, ModuleType] = {}
"""The modules of those packages: objects of the kernel still use them."""


def leave_notebook() -> Any:
    """Remove from this process what makes it look interactive.

    Returns:
        The shell's formatter of MIME bundles; None where there is no shell.
    """
    for name in ("ps1", "ps2"):
        vars(sys).pop(name, None)
    sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
    shell = ipython_shell()
    if shell is not None:
        _leave_shell(shell)
    _hide_modules()
    _disconnect_widgets()
    for name, correct in _CONCLUSIONS.items():
        if name in sys.modules:
            with contextlib.suppress(AttributeError):  # another version, which has no such name
                correct(sys.modules[name])
    return getattr(shell, "display_formatter", None)


def _leave_shell(shell: Any) -> None:
    """Make ``IPython.get_ipython`` return None.

    ``get_ipython`` among the names of the user's cells stays: a function of a cell with ``!ls`` in it calls that.
    """
    for name in ("get_ipython", "__IPYTHON__"):
        vars(builtins).pop(name, None)
    # IPython's asks its shell to end the kernel.
    for names in (vars(builtins), shell.user_ns):
        for name in ("exit", "quit"):
            if type(names.get(name)).__module__.startswith(("IPython", "ipykernel")):
                names[name] = sys.exit
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        kernel.session.send = lambda *_, **__: None
    for instance in (shell, kernel, getattr(kernel, "parent", None)):
        kind: Any = type(instance)
        if hasattr(kind, "clear_instance"):
            kind.clear_instance()


_of_notebook: list[str] | None = None
"""The names of modules to hide; None: not looked for."""


def look_for_notebook() -> None:
    """List the modules to hide, before ranks are forked: in a rank each name that is read copies a page of memory."""
    global _of_notebook  # noqa: PLW0603 - the modules of a process
    _of_notebook = [name for name in list(sys.modules) if f"{name}.".startswith(_NOTEBOOK_PACKAGES)]


def _hide_modules() -> None:
    if _of_notebook is None:
        look_for_notebook()
    for name in _of_notebook or ():
        if name in sys.modules:
            _hidden[name] = sys.modules.pop(name)


def _disconnect_widgets() -> None:
    """Give widgets that are made in this rank connections which go nowhere."""
    comm: Any = sys.modules.get("comm")
    if comm is not None:
        comm.create_comm = comm.DummyComm
        comm.get_comm_manager = functools.cache(comm.base_comm.CommManager)


# ---- what libraries concluded when the kernel imported them


def _plain_tqdm(module: Any) -> None:
    kind = module.tqdm_notebook
    for name in ("__init__", "__iter__", "display", "update", "close", "clear", "reset", "status_printer", "colour"):
        if name in vars(kind):  # those of the standard bar, its base class, remain: copies would miss later hooks
            delattr(kind, name)


def _plain_lightning(module: Any) -> None:
    package = module.__name__.partition(".")[0]
    for each in _modules_of(package):
        if "_IS_INTERACTIVE" in vars(each):
            each._IS_INTERACTIVE = False


def _plain_rich(module: Any) -> None:
    if module._console is not None:
        module._console.is_jupyter = False


def _plain_transformers(module: Any) -> None:
    module.DEFAULT_PROGRESS_CALLBACK = sys.modules["transformers.trainer_callback"].ProgressCallback


def _ask_transformers_again(module: Any) -> None:
    module.is_in_notebook.cache_clear()


def _modules_of(package: str) -> Iterator[Any]:
    return (module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package)


_CONCLUSIONS: dict[str, Callable[[Any], None]] = {
    "tqdm.notebook": _plain_tqdm,
    "lightning.fabric.utilities.imports": _plain_lightning,
    "lightning_fabric.utilities.imports": _plain_lightning,
    "rich": _plain_rich,
    "transformers.utils.import_utils": _ask_transformers_again,
    "transformers.trainer": _plain_transformers,
}
"""By module that has found a notebook when it was imported: what corrects that."""
