"""Import modules into a server, for the processes that it forks.

At its exit, a process that has imported torch takes 0.4 s of CPU time to destroy torch's objects. A forked process
would spend most of this time copying memory pages that it shares with the server, so it keeps these objects instead.
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
"""The installed modules that forked processes keep. Those of the standard library and this project are destroyed."""


def import_for_forks(names: Iterable[str]) -> None:
    """Import modules and exclude their objects from garbage collection.

    A process forked later exits as usual: it waits for its threads, calls exit handlers, writes buffers and destroys
    its own modules. However, it does not destroy installed modules or the objects of C++ libraries.
    """
    gc.disable()  # During the imports, garbage collection would take a third of the time and find nothing.
    atexit.register(_keep)  # This is registered before all handlers of the modules, so it runs after them.
    for name in names:
        import_module(name)
    gc.collect()
    gc.enable()
    gc.freeze()  # Otherwise, garbage collection in a forked process would copy the pages of all objects.
    _kept[:] = [name for name in sys.modules if name.partition(".")[0] not in {*sys.stdlib_module_names, *_OWN}]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # Only glibc has this function.
        libc.on_exit(libc._exit, None)  # This ends the process, with its exit code, before libraries are unloaded.
        libc.__cxa_atexit(libc.fflush, None, None)  # This runs before `_exit`, which discards C code's buffers.


def _keep() -> None:
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes, keep.restype = [ctypes.py_object], None
    for name in _kept:
        keep(sys.modules.pop(name, None))


__all__ = ["import_for_forks"]
