"""Make a rank a plain process, so that libraries do not detect a notebook or an interactive interpreter.

A rank that is forked from a kernel inherits IPython's shell, the kernel's modules and the conclusions that libraries
drew from them. Without corrections, tqdm would draw widgets, Lightning would refuse its strategies, and the kernel's
session would refuse to send messages to the front end from a forked process. With other start methods, a rank only
inherits environment variables.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from notebook_accelerate.errors import ipython_shell

_NOTEBOOK_PACKAGES = ("ipykernel.", "google.colab.")
"""Packages whose presence in ``sys.modules`` makes libraries assume a notebook."""

_hidden: dict[str, ModuleType] = {}
"""The hidden modules of the packages in ``_NOTEBOOK_PACKAGES``. The kernel's inherited objects still use them."""


def leave_notebook() -> Any:
    """Remove the signs of an interactive session from this process.

    Returns:
        The shell's formatter of MIME bundles, or None if there is no shell.
    """
    for name in ("ps1", "ps2"):
        vars(sys).pop(name, None)
    sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
    shell = ipython_shell()
    if shell is not None:
        _disconnect_shell(shell)
    _hide_modules()
    _disconnect_widgets()
    for name, correct in _CONCLUSIONS.items():
        if name in sys.modules:
            with contextlib.suppress(AttributeError):  # This version of the library may not have this name.
                correct(sys.modules[name])
    return getattr(shell, "display_formatter", None)


def fork_children() -> None:
    """Make multiprocessing fork the processes that this rank starts, such as a data loader's workers.

    Since Python 3.14, the default on Linux is forkserver, whose processes must import the classes of their arguments.
    Classes defined in cells cannot be imported. A start method that the function chooses takes precedence.
    """
    if sys.version_info >= (3, 14) and sys.platform == "linux":
        from multiprocessing import context

        chosen: Any = context._default_context
        chosen._default_context = chosen.get_context("fork")
        if chosen.get_start_method(allow_none=True) == "forkserver":  # The kernel has used the default.
            chosen.set_start_method(None, force=True)


def _disconnect_shell(shell: Any) -> None:
    """Make ``IPython.get_ipython`` return None.

    ``get_ipython`` remains in the namespace of the user's cells, whose functions call it for lines such as ``!ls``.
    """
    for name in ("get_ipython", "__IPYTHON__"):
        vars(builtins).pop(name, None)
    # With IPython's own exit functions, the shell would end the kernel.
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


_LIGHTNING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")

_of_notebook: list[str] | None = None
"""The names of the modules to hide, or None before `look_for_notebook` has run."""
_of_lightning: list[str] = []
"""The names of Lightning's modules that store whether the session is interactive."""


def look_for_notebook() -> None:
    """List the modules to hide or correct, before ranks are forked.

    If a rank read the names of all modules, it would copy their memory pages.
    """
    global _of_notebook, _of_lightning  # noqa: PLW0603 - one process has one list of modules
    names = list(sys.modules)
    _of_notebook = [name for name in names if f"{name}.".startswith(_NOTEBOOK_PACKAGES)]
    _of_lightning = [name for name in names if f"{name}.".startswith(_LIGHTNING) and _has_conclusion(name)]


def _has_conclusion(name: str) -> bool:
    """Return whether a module stores Lightning's conclusion about the session."""
    return "_IS_INTERACTIVE" in getattr(sys.modules.get(name), "__dict__", ())


def _hide_modules() -> None:
    if _of_notebook is None:
        look_for_notebook()
    for name in _of_notebook or ():
        if name in sys.modules:
            _hidden[name] = sys.modules.pop(name)


def _disconnect_widgets() -> None:
    """Connect widgets that are created in this rank to dummy connections."""
    comm: Any = sys.modules.get("comm")
    if comm is not None:
        comm.create_comm = comm.DummyComm
        comm.get_comm_manager = functools.cache(comm.base_comm.CommManager)


# ---- conclusions that libraries drew when the kernel imported them


def _plain_tqdm(module: Any) -> None:
    kind = module.tqdm_notebook
    for name in ("__init__", "__iter__", "display", "update", "close", "clear", "reset", "status_printer", "colour"):
        # Delete these methods instead of copying the base class's, so that later changes to the standard bar apply.
        if name in vars(kind):
            delattr(kind, name)


def _plain_lightning(_: Any) -> None:
    for name in _of_lightning:
        module: Any = sys.modules.get(name)
        if module is not None:
            module._IS_INTERACTIVE = False


def _plain_rich(module: Any) -> None:
    if module._console is not None:
        module._console.is_jupyter = False


def _plain_transformers(module: Any) -> None:
    module.DEFAULT_PROGRESS_CALLBACK = sys.modules["transformers.trainer_callback"].ProgressCallback


def _ask_transformers_again(module: Any) -> None:
    module.is_in_notebook.cache_clear()


_CONCLUSIONS: dict[str, Callable[[Any], None]] = {
    "tqdm.notebook": _plain_tqdm,
    "lightning.fabric.utilities.imports": _plain_lightning,
    "lightning_fabric.utilities.imports": _plain_lightning,
    "rich": _plain_rich,
    "transformers.utils.import_utils": _ask_transformers_again,
    "transformers.trainer": _plain_transformers,
}
"""The functions that correct modules which detected a notebook when they were imported, by module name."""
