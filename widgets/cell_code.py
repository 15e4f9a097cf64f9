"""The cell that launches what a form says, as a user would have written it."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.widgets.form_draft import FormDraft, code_of

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

_WIDTH = 88
# What LaunchConfig has and notebook_launcher has no parameter for.
ONLY_IN_CONFIG = ("cpu", "accelerator")


def launch_cell(function: str, arguments: str, config: LaunchConfig) -> str:
    """Return the code of a cell.

    Args:
        function: Name of the training function.
        arguments: The code of its arguments, such as ``(model, 3)``; "" for none.
        config: The launch.
    """
    imports = ["from notebook_accelerate import notebook_launcher"]
    given = config.non_default()
    if isinstance(given.get("on"), RayCluster):
        imports[0] = "from notebook_accelerate import RayCluster, notebook_launcher"
    apart = {name: given.pop(name) for name in ONLY_IN_CONFIG if name in given}
    if apart:
        imports[0] = imports[0].replace("import ", "import LaunchConfig, ")
    call = [function, *([arguments] if arguments and arguments != "()" else [])]
    call += [f"{name}={code_of(value)}" for name, value in given.items()]
    if apart:
        values = [f"{name}={_laid_out(value)}" for name, value in apart.items()]
        call.append(f"config=LaunchConfig({', '.join(values)})")
    return "\n".join([*imports, *_imports(apart), "", _call("run = notebook_launcher", call)])


def _laid_out(value: Any) -> str:
    """Return the code of a value, arguments of `Accelerator` on a line each."""
    if not isinstance(value, dict):
        return code_of(value)
    entries = "".join(f"        {code_of(name)}: {code_of(entry)},\n" for name, entry in value.items())
    return f"{{\n{entries}    }}"


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def _imports(values: dict[str, Any]) -> list[str]:
    classes = _classes(values)
    lines = ["from datetime import timedelta"] if timedelta in classes else []
    names = sorted(cls.__name__ for cls in classes if cls is not timedelta)
    return lines + ([f"from notebook_accelerate.utils import {', '.join(names)}"] if names else [])


def _classes(value: Any) -> set[type[Any]]:
    """Return the classes that the code of ``value`` names."""
    if isinstance(value, dict):
        return {cls for entry in value.values() for cls in _classes(entry)}
    if isinstance(value, list | tuple):
        return {cls for entry in value for cls in _classes(entry)}
    if isinstance(value, timedelta):
        return {timedelta}
    if is_dataclass(value) and not isinstance(value, type | Enum):
        return {type(value)} | _classes(FormDraft(type(value), value).changed())
    return set()


def name_of(function: Any) -> str:
    """Return how a function is called in code; "train" where it has no name that could be written."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "train"


def training_functions(namespace: dict[str, Any]) -> list[str]:
    """Return the names of the functions that a notebook itself has defined, the last one first."""
    own = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == namespace.get("__name__")
    ]
    return own[::-1]


__all__ = ["launch_cell", "name_of", "training_functions"]
