"""The programs of the behaviour table: functions and single expressions from the modules in `programs/`.

A program imports `accelerate`. It returns a value, raises, or leaves files in its working folder, which is empty.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

_FOLDER = Path(__file__).parent / "programs"
_Function = TypeVar("_Function", bound=Callable[[], Any])


@dataclass(frozen=True)
class Program:
    """One program of the table.

    Attributes:
        name: The module and the function, or the module and the expression.
        run: The function that runs the program.
        ranks: The number of processes that run it at the same time. 0 means one process without a launcher's variables.
        needs: The packages that it imports in addition to accelerate and torch.
        tolerance: The relative tolerance of floats. 0 requires bitwise equality.
        is_expression: Whether it is a single expression, which may share its processes with other expressions.
    """

    name: str
    run: Callable[[], Any]
    ranks: int = 0
    needs: tuple[str, ...] = ()
    tolerance: float = 0.0
    is_expression: bool = False

    @property
    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def program(*, ranks: int = 0, needs: str = "", tolerance: float = 0.0) -> Callable[[_Function], _Function]:
    """Declare the requirements of a program. Public functions need no declaration to be programs.

    Args:
        ranks: See `Program.ranks`.
        needs: The names of required packages, separated by spaces.
        tolerance: See `Program.tolerance`.
    """

    def declare(function: _Function) -> _Function:
        function.__dict__["settings"] = {"ranks": ranks, "needs": tuple(needs.split()), "tolerance": tolerance}
        return function

    return declare


def programs(pattern: str = "") -> list[Program]:
    """Import the modules of programs, and return the programs whose name contains ``pattern``, ordered by file."""
    modules = [path.stem for path in sorted(_FOLDER.glob("[!_]*.py"))]
    if "." in pattern and pattern.split(".", maxsplit=1)[0] in modules:
        modules = [pattern.split(".", maxsplit=1)[0]]
    found: list[Program] = []
    for name in modules:
        found += _programs_of(importlib.import_module(f"tests.parity.behaviour.programs.{name}"), name)
    return [each for each in found if pattern in each.name]


def _programs_of(module: ModuleType, name: str) -> Iterator[Program]:
    for key, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not key.startswith("_"):
            yield Program(f"{name}.{key}", value, **getattr(value, "settings", {}))
    for expression in getattr(module, "CALLS", ()):
        yield Program(f"{name}: {expression}", _evaluation(expression, module), is_expression=True)
    for expression in getattr(module, "CALLS_ON_TWO_RANKS", ()):
        yield Program(f"{name}, 2 ranks: {expression}", _evaluation(expression, module), ranks=2, is_expression=True)


def _evaluation(expression: str, module: ModuleType) -> Callable[[], Any]:
    return lambda: eval(expression, vars(module))
