"""Serve this package as ``accelerate`` in every interpreter started by a process that has the alias."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def _serve() -> None:
    root = str(FOLDER.parents[2])
    if PathFinder.find_spec("notebook_accelerate") is None:
        # Add the package's folder, because this interpreter does not inherit changes to the parent's sys.path.
        sys.path.append(root)
    from notebook_accelerate.integrations.accelerate_alias import install

    install()


def _run_next() -> None:
    """Run the ``sitecustomize`` that this module hides, such as a Linux distribution's or a coverage tool's."""
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if Path(each or ".").resolve() != FOLDER])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_serve()
_run_next()
