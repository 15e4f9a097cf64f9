"""Import modules into a server, for the processes that it forks.

A process that has imported torch spends 0.4 s of CPU time at exit on destroying torch's objects. In a forked process,
most of this time would be spent copying memory pages shared with the server, so these objects are not destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from collections.abc import Iterable
from importlib import import_module

_OWN = ("notebook_accelerate", "tests", "__main__")
_kept: list[str] = []
"""The installed modules that forked processes keep. Modules of the standard library and of this project are
destroyed as usual."""


def import_for_forks(names: Iterable[str]) -> None:
    """Import modules and exclude their objects from garbage collection.

    A process forked later exits as usual: it waits for its threads, runs exit handlers, flushes buffers and destroys
    its own modules. However, it does not destroy installed modules or the objects of C++ libraries.
    """
    gc.disable()  # During the imports, garbage collection would take a third of the time and find nothing.
    atexit.register(_keep)  # This is registered before the handlers of the modules below, so it runs after them.
    for name in names:
        import_module(name)
    gc.collect()
    gc.enable()
    gc.freeze()  # Otherwise, garbage collection in a forked process would copy the pages of all objects.
    _kept[:] = [name for name in sys.modules if name.partition(".")[0] not in {*sys.stdlib_module_names, *_OWN}]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # Only glibc has this function.
        libc.on_exit(libc._exit, None)  # This ends the process before the destructors of C++ libraries run.
        libc.__cxa_atexit(libc.fflush, None, None)  # This runs before `_exit`, which would discard C code's buffers.


def _keep() -> None:
    """Add a reference to each installed module, so that the interpreter does not destroy it."""
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes, keep.restype = [ctypes.py_object], None
    for name in _kept:
        keep(sys.modules.pop(name, None))


__all__ = ["import_for_forks"]
