"""This package under the name `accelerate`, for libraries that import that."""

from __future__ import annotations

from pathlib import Path

_VERSION = "1.15.0"
_PACKAGE = '''\
"""notebook_accelerate, its modules too, under another name."""

import importlib
import importlib.abc
import importlib.util
import sys

import notebook_accelerate


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("accelerate."):
            return None
        real = f"notebook_{name}"
        try:
            module = importlib.import_module(real)
        except ModuleNotFoundError as error:
            if error.name and real.startswith(error.name):
                return None
            raise
        return importlib.util.spec_from_loader(name, self, is_package=hasattr(module, "__path__"))

    def create_module(self, spec):
        return sys.modules[f"notebook_{spec.name}"]

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
__version__ = "VERSION"


def __getattr__(name):
    return getattr(notebook_accelerate, name)
'''


def serve(folder: Path) -> Path:
    """Write a package `accelerate`, installed as far as importlib.metadata can tell, that is this one.

    Args:
        folder: Where to; it is to be put into PYTHONPATH.

    Returns:
        The folder.
    """
    (folder / "accelerate").mkdir(parents=True)
    (folder / "accelerate" / "__init__.py").write_text(_PACKAGE.replace("VERSION", _VERSION))
    metadata = folder / f"accelerate-{_VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelerate\nVersion: {_VERSION}\n")
    return folder
