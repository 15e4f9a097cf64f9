"""Import in the server process what ranks of an earlier launch have imported, so that later ranks share it.

Otherwise, each rank that uses transformers or datasets spends seconds of every launch on the same imports. When a run
has ended, a new server process imports these modules in the background, and replaces the server once it is ready.

A shared import must not change what a rank does, so the server watches the imports. It refuses a module whose import

* loads a file of the user,
* reads an environment variable that differs between ranks or launches, such as RANK,
* sets environment variables, or changes ``sys.path``,
* writes to standard output or standard error, or starts a Python thread,

and every module that imports a refused one. Because Python cannot undo an import, the server then restarts without
them. It restarts without any of the modules if the imports have made it unsafe to fork, left a file or a socket open,
drawn random numbers, or changed other state of the process.

A launch does not use this server if an import in its ranks might have another result; see `fits`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_accelerate._collection import gc_paused
from notebook_accelerate.integrations import accelerate_alias
from notebook_accelerate.launch.processes import shared_imports

MAX_RESTARTS = 5
"""How often a server restarts without the modules that it has refused. After that, it imports none of them."""
_FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Native threads whose libraries start them again after a fork."""

ExitHandler = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


@dataclass
class ServerImports:
    """The imports of a server process, with its findings about them. The process writes both to a shared file.

    Attributes:
        modules: The names of the modules. In a rank, their imports have ended in this order.
        environment: The environment variables of that rank.
        private: The names of those variables that may differ between ranks or launches.
        as_accelerate: Whether the ranks import this package as ``accelerate``.
        installed: The kernel's import path and the times of the installed packages; see `installed_state`.
        refused: The names of the modules that the server does not import.
        restarts: How often the server has restarted.
        read: The variables that the imports have read, with their values, or None for variables that were not set.
        prefixes: The prefixes of further variables that the imports have looked for.
    """

    modules: list[str]
    environment: dict[str, str]
    private: list[str]
    as_accelerate: bool
    installed: list[list[Any]]
    refused: list[str] = field(default_factory=list)
    restarts: int = 0
    read: dict[str, str | None] = field(default_factory=dict)
    prefixes: list[str] = field(default_factory=list)

    def write(self, descriptor: int) -> None:
        """Replace the contents of the file."""
        data = json.dumps(asdict(self)).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)

    @classmethod
    def read_from(cls, descriptor: int) -> ServerImports:
        """Return the contents of the file."""
        return cls(**json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0)))


# ---- in the kernel


def installed_state() -> list[list[Any]]:
    """Return the import path, and when packages were last installed in or removed from each of its folders."""
    times = []
    for entry in sys.path:
        with suppress(OSError, TypeError):
            if shared_imports.is_installed(entry):
                times.append([entry, Path(entry).stat().st_mtime_ns])
    return [[entry for entry in sys.path if isinstance(entry, str)], times]


def fits(imports: ServerImports, variables: Mapping[str, str], *, as_accelerate: bool) -> bool:
    """Return whether the ranks of a launch may share the imports of a server.

    Args:
        imports: The imports of the server.
        variables: The environment variables of the ranks, except those that differ between them.
        as_accelerate: Whether the ranks import this package as ``accelerate``.
    """
    prefixes = tuple(imports.prefixes)
    now = {name: variables.get(name) for name in imports.read}
    now |= {name: value for name, value in variables.items() if name.startswith(prefixes)}
    return (
        now == imports.read
        and as_accelerate == imports.as_accelerate
        and installed_state() == imports.installed
        and logging.root.level >= logging.WARNING  # Below that, the ranks may show what libraries log on import.
        and not shared_imports.is_shadowed({name.partition(".")[0] for name in imports.modules})
    )


# ---- in the server process


def load(descriptor: int) -> list[ExitHandler]:
    """Import the modules, and return the exit handlers that they have registered.

    If the import of one of them is not safe, restart this process without it.

    Args:
        descriptor: The file of the `ServerImports`, which is closed.
    """
    imports = ServerImports.read_from(descriptor)
    environment = dict(os.environ)
    if imports.as_accelerate:
        accelerate_alias.install()
    else:
        accelerate_alias.remove()
    os.environ.clear()
    os.environ.update(imports.environment)
    before, threads = _lasting_state(), _native_threads()
    with gc_paused(), _Watch(imports) as watch:
        for name in imports.modules:
            watch.load(name)
    os.environ.clear()
    os.environ.update(environment)
    refused = watch.refused
    if not refused and (_lasting_state() != before or _is_unsafe(threads)):
        refused = set(imports.modules)
    if refused:
        _restart_without(refused, imports, descriptor)
    imports.write(descriptor)
    os.close(descriptor)
    return watch.exit_handlers


def _restart_without(refused: set[str], imports: ServerImports, descriptor: int) -> None:
    imports.restarts += 1
    everything = imports.restarts > MAX_RESTARTS
    imports.refused = imports.modules if everything else sorted({*imports.refused, *refused})
    imports.read, imports.prefixes = {}, []
    imports.write(descriptor)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - the same command line as before


def _is_unsafe(threads: int) -> bool:
    """Return whether this process is not safe to fork, or has more native threads than the given number.

    Threads that end when the process forks, such as OpenBLAS's, do not count: their library starts them again.
    """
    from notebook_accelerate.launch.processes.fork_probe import fork_hazard

    if fork_hazard():
        return True
    deadline = time.monotonic() + 1.0  # The thread that has forked the probe may still be ending.
    while _native_threads() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return _native_threads() > threads


def _native_threads() -> int:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # The thread may have just ended.
            names.append(task.read_text(encoding="utf-8", errors="replace").strip())
    return sum(name not in _FORK_SAFE_THREADS for name in names)


def _lasting_state() -> list[object]:
    """Return state of this process that an import of a package must not change."""
    torch: Any = sys.modules["torch"]
    finalizers: Any = weakref.finalize
    return [
        sorted(_descriptors()),
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        [signal.getsignal(number) for number in signal.valid_signals()],
        Path.cwd(),
        # Torch's finalizers only unload its libraries, which is not necessary in a process that ends.
        sum(not str(info.func.__module__).startswith("torch.") for info in finalizers._registry.values()),
    ]


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The descriptor of this listing is closed already.
            target = str(entry.readlink())
            if not target.startswith(("/dev/", "/proc/")):
                yield target


class _Watch:
    """Attributes what happens during imports to the modules that are being imported.

    Args:
        imports: The modules to import. The variables that are read are added to this object.

    Attributes:
        refused: The modules whose import is not safe.
        exit_handlers: The exit handlers that modules have registered.
    """

    def __init__(self, imports: ServerImports) -> None:
        self.refused: set[str] = set()
        self.exit_handlers: list[ExitHandler] = []
        self._imports, self._private, self._environment = imports, {*imports.private}, dict(imports.environment)
        self._listed = ""  # The name that an iteration over all variables has just returned.
        self._copied: list[str] = []  # The names of a finished iteration whose values were not read yet, from the last.
        self._skipped = {*imports.refused}
        self._stack: list[str] = []
        self._patches = ExitStack()
        self._state = _visible_state()

    def load(self, name: str) -> None:
        """Import a module, unless it or its package is among the modules that were refused before."""
        parts = name.split(".")
        parents = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if name in sys.modules or not self._skipped.isdisjoint(parents):
            return
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001 - a rank that imports the module reports the error
            self.refused.add(name)

    def __enter__(self) -> _Watch:
        kind: Any = type(os.environ)
        register = atexit.register

        def note_exit_handler(call: Any, *arguments: Any, **options: Any) -> Any:
            self.exit_handlers.append((call, arguments, options))
            return register(call, *arguments, **options)

        for loader in (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader):
            self._patch(loader, "exec_module", self._watched(loader.exec_module))
        self._patch(kind, "__getitem__", self._reading(kind.__getitem__))
        self._patch(kind, "__iter__", self._iterating(kind.__iter__))
        for name in ("__setitem__", "__delitem__"):
            self._patch(kind, name, self._changing(getattr(kind, name)))
        self._patch(atexit, "register", note_exit_handler)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patches.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _watched(self, execute: Any) -> Any:
        def exec_module(loader: Any, module: ModuleType) -> None:
            self._compare()
            self._stack.append(module.__name__)
            if shared_imports.is_of_user(loader.path):  # The user may edit the file before the next launch.
                self._refuse()
            try:
                execute(loader, module)
            finally:
                self._compare()
                if self._imports.prefixes and self._keeps_copy(module):
                    self._refuse()
                self._stack.pop()

        return exec_module

    def _compare(self) -> None:
        before, self._state = self._state, _visible_state()
        if before != self._state:
            self._refuse()

    def _refuse(self) -> None:
        self.refused.update(self._stack)

    def _reading(self, get: Any) -> Any:
        def read(environment: Any, name: Any) -> Any:
            if isinstance(name, str | bytes) and not self._is_listed(os.fsdecode(name)):
                self._note_read(os.fsdecode(name))
            return get(environment, name)

        return read

    def _is_listed(self, name: str) -> bool:
        """Return whether a variable is read by a loop over all variables, or by ``dict``, which first lists all."""
        if self._copied and self._copied[-1] == name:
            self._copied.pop()
            return True
        self._copied.clear()
        return name == self._listed

    def _note_read(self, name: str) -> None:
        if name in self._private:
            self._refuse()
        elif name != shared_imports.CACHE_FOLDER:
            self._imports.read.setdefault(name, self._environment.get(name))

    def _iterating(self, names: Any) -> Any:
        """Return a function that iterates over the names. Loops and copies read the value of each name they get."""

        def iterate(environment: Any) -> Iterator[Any]:
            if self._stack:
                self._note_search()
            found = [*names(environment)]
            for name in found:
                self._listed = os.fsdecode(name)
                yield name
            self._listed, self._copied = "", [os.fsdecode(name) for name in reversed(found)]

        return iterate

    def _note_search(self) -> None:
        """Note that the current module searches all variables, probably for its own: fsspec, for example, for FSSPEC_.

        A module that keeps a copy of all variables is refused when its import ends.
        """
        prefix = self._stack[-1].partition(".")[0].upper()
        if prefix not in self._imports.prefixes:
            self._imports.prefixes.append(prefix)
            for name in self._environment:
                if name.startswith(prefix):
                    self._note_read(name)

    def _keeps_copy(self, module: ModuleType) -> bool:
        """Return whether a module has a copy of the variables that differ between ranks."""
        copies = [value for value in vars(module).values() if type(value) is dict]
        return any(name in copy and copy[name] == self._environment[name] for copy in copies for name in self._private)

    def _changing(self, change: Any) -> Any:
        def set_or_delete(environment: Any, name: Any, *value: Any) -> None:
            if name != shared_imports.CACHE_FOLDER:
                self._refuse()
            change(environment, name, *value)

        return set_or_delete


def _visible_state() -> tuple[object, ...]:
    """Return the state that is compared before and after the import of each module."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fstat(1).st_size, os.fstat(2).st_size, threading.active_count(), tuple(sys.path)
