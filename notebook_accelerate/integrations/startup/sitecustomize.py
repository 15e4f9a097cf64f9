"""Serves this package as ``accelerate`` in every interpreter that a process with the alias starts."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def _serve() -> None:
    root = str(FOLDER.parents[2])
    if PathFinder.find_spec("notebook_accelerate") is None:
        sys.path.append(root)  # the parent has extended its own sys.path, which this interpreter does not inherit
    from notebook_accelerate.integrations.accelerate_alias import install

    install()


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides: a distribution's, or that of a coverage tool."""
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if Path(each or ".").resolve() != FOLDER])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_serve()
_run_next()
