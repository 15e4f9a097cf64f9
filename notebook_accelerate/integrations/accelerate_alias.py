"""Serve this package under the name ``accelerate``: its modules and the metadata of a distribution.

Submodules are aliases: ``accelerate.utils`` is the module object ``notebook_accelerate.utils``. The top-level module is
a separate object, because libraries compare its ``__version__`` with versions of Accelerate. All its other attributes
are those of ``notebook_accelerate``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_accelerate._lazy import exports, replace_everywhere

ALIAS = "accelerate"
PACKAGE = "notebook_accelerate"
VERSION = "1.15.0"
"""The version of Accelerate whose interface this package implements."""

STARTUP_FOLDER = str(Path(__file__).resolve().parent / "startup")
"""A folder that is in PYTHONPATH while the alias is installed, so that child interpreters install the alias too."""

_PROBING_LIBRARIES = ("transformers", "diffusers")
"""Libraries that check for Accelerate only once, when they are imported, and work without it."""

_lock = threading.Lock()


class _TopLevelModule(ModuleType):
    """The module ``accelerate``, which has its own dunder names, and takes all other names from this package."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[PACKAGE], name)

    def __setattr__(self, name: str, value: object) -> None:
        if _is_dunder(name):
            super().__setattr__(name, value)
        else:
            setattr(sys.modules[PACKAGE], name, value)

    def __delattr__(self, name: str) -> None:
        if _is_dunder(name):
            super().__delattr__(name)
        else:
            delattr(sys.modules[PACKAGE], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(sys.modules[PACKAGE])})


class _PatchedModule(ModuleType):
    """A module of this package that other libraries patch as if it were Accelerate's.

    An example is ``accelerate.accelerator.fsdp2_prepare_model = patched``. If Accelerate's module imports the name but
    this one does not, the name is replaced in the modules of this package that have it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        home = sys.modules[self.__name__]
        if not _is_dunder(name) and not isinstance(value, ModuleType):
            if name not in vars(self):
                home = importlib.import_module(exports(f"{PACKAGE}.utils").homes.get(name, self.__name__))
            replace_everywhere(home, name, value)
        super().__setattr__(name, value)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _AliasLoader:
    """Loads an alias by importing the module that it refers to."""

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of this package, or a `_TopLevelModule` for the top-level name."""
        module = importlib.import_module(self._target.name)
        if spec.name == ALIAS:
            return _TopLevelModule(ALIAS, module.__doc__)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import system has replaced because it considers the module new."""
        if isinstance(module, _TopLevelModule):
            module.__version__ = VERSION
        else:
            module.__spec__ = self._own_spec
            if type(module) is ModuleType:
                module.__class__ = _PatchedModule

    # ---- for runpy, inspect, pkgutil and importlib.resources

    def get_code(self, fullname: str) -> Any:
        """Return the module's code object."""
        return self._ask("get_code")

    def get_source(self, fullname: str) -> Any:
        """Return the module's source."""
        return self._ask("get_source")

    def get_filename(self, fullname: str) -> Any:
        """Return the module's file."""
        return self._ask("get_filename")

    def is_package(self, fullname: str) -> bool:
        """Return whether the module has submodules."""
        return self._target.submodule_search_locations is not None

    def get_resource_reader(self, fullname: str) -> Any:
        """Return the reader for the files next to the module."""
        return self._ask("get_resource_reader")

    def _ask(self, method: str) -> Any:
        return getattr(self._target.loader, method)(self._target.name)


class _AliasFinder:
    """Finds ``accelerate``, its submodules and its metadata."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias, or None for other modules."""
        top, dot, rest = fullname.partition(".")
        if top != ALIAS:
            return None
        found = importlib.util.find_spec(f"{PACKAGE}{dot}{rest}")
        if found is None:
            return None
        loader: Any = _AliasLoader(found)
        spec = ModuleSpec(fullname, loader, origin=found.origin, is_package=loader.is_package(fullname))
        spec.submodule_search_locations = found.submodule_search_locations
        spec.has_location = found.has_location
        return spec

    def find_distributions(self, context: object = None) -> Iterator[Any]:
        """Yield the distribution ``accelerate`` if the search is for it or for every distribution.

        A search in given folders, such as pip's for installed distributions, does not find it.
        """
        name = getattr(context, "name", None)
        if (name is None or name.lower() == ALIAS) and "path" not in getattr(context, "__dict__", {}):
            yield AliasDistribution(ALIAS, VERSION)

    def invalidate_caches(self) -> None:
        """Do nothing, because this finder has no caches."""


_finder: Any = _AliasFinder()


def as_accelerate(enabled: bool = True) -> None:
    """Serve this package to other libraries as ``accelerate``, here and in the ranks of later launches.

    ``import accelerate`` and imports of its submodules return this package's modules, and ``importlib.metadata`` finds
    a distribution ``accelerate``. Interpreters that this process starts do the same, through PYTHONPATH. Call this
    before importing libraries that use Accelerate.

    Args:
        enabled: Whether to serve the alias. If False, it is removed, but modules that have already imported it keep
            their references.

    Raises:
        NotebookAccelerateError: The real Accelerate is imported in this process.
    """
    if not enabled:
        remove()
        return
    if not is_real_imported() and (hazard := inherited_hazard()):
        warnings.warn(
            f"{hazard}; restart the kernel and call notebook_accelerate.as_accelerate() before such imports",
            stacklevel=2,
        )
    install()


def is_installed() -> bool:
    """Return whether this process serves the alias."""
    return _finder in sys.meta_path


def is_real_imported() -> bool:
    """Return whether the real Accelerate is imported in this process."""
    return ALIAS in sys.modules and not isinstance(sys.modules[ALIAS], _TopLevelModule)


def inherited_hazard() -> str:
    """Return why a process with this process's modules cannot serve the alias to all libraries, or "" if it can."""
    if is_real_imported():
        return "the kernel has imported the real accelerate"
    probed = [name for name in _PROBING_LIBRARIES if name in sys.modules]
    if probed and not is_installed() and importlib.util.find_spec(ALIAS) is None:
        return f"the kernel has imported {' and '.join(probed)}, which found no accelerate"
    return ""


def install() -> None:
    """Install the alias in this process and the interpreters that it starts. Do nothing if it is already installed.

    Raises:
        NotebookAccelerateError: The real Accelerate is imported.
    """
    with _lock:
        if is_real_imported():
            from notebook_accelerate.errors import NotebookAccelerateError

            where = getattr(sys.modules[ALIAS], "__file__", None) or "unknown file"
            raise NotebookAccelerateError(
                f"the real accelerate ({where}) is already imported in this process, so its name is taken; restart "
                "the kernel and call notebook_accelerate.as_accelerate() before importing libraries that use accelerate"
            )
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _set_python_path([STARTUP_FOLDER, *_other_folders()])


def remove() -> None:
    """Remove the alias from this process. Do nothing if it is not installed."""
    with _lock:
        if _finder not in sys.meta_path:
            return
        sys.meta_path.remove(_finder)
        for name in [name for name in sys.modules if name == ALIAS or name.startswith(f"{ALIAS}.")]:
            del sys.modules[name]
        _set_python_path(_other_folders())


@contextmanager
def installed(wanted: bool) -> Iterator[None]:
    """Install the alias during a with block if ``wanted``, and remove it afterwards unless it was installed before.

    Raises:
        NotebookAccelerateError: The real Accelerate is imported.
    """
    before = is_installed()
    if wanted:
        install()
    try:
        yield
    finally:
        if not before:
            remove()


def _other_folders() -> list[str]:
    value = os.environ.get("PYTHONPATH")
    return [each for each in value.split(os.pathsep) if each != STARTUP_FOLDER] if value else []


def _set_python_path(folders: list[str]) -> None:
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    else:
        os.environ.pop("PYTHONPATH", None)


# ---- the metadata of Accelerate's distribution


class AliasDistribution(Distribution):
    """A distribution that has metadata but no files.

    Args:
        name: The name of the distribution and of its only module.
        version: The version of the distribution.
    """

    def __init__(self, name: str, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: notebook_accelerate\n",
            "top_level.txt": f"{name}\n",
            "INSTALLER": "notebook_accelerate\n",
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return the text of a metadata file, or None if there is no such file."""
        return self._files.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Return a path relative to the folder that contains this package."""
        return Path(__file__).resolve().parents[2] / path
