"""The code of the cell that launches a configuration."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.cluster import RayCluster
from notebook_accelerate.widgets.form_draft import FormDraft, code_of, shown_code

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

_WIDTH = 88
RUN_VARIABLE = "run"
"""The variable that the cell assigns the run to."""
# Fields of LaunchConfig that are not parameters of notebook_launcher.
ONLY_IN_CONFIG = ("cpu", "accelerator", "as_accelerate", "report_from", "automatic_metrics")


def launch_cell(function: str, arguments: str, config: LaunchConfig, *, hidden: bool = False) -> str:
    """Return the code of a cell.

    Args:
        function: Name of the training function.
        arguments: The code of its arguments, such as ``(model, 3)``; "" for none.
        config: The launch.
        hidden: Whether to hide secrets: values of variables, and credentials in URLs.
    """
    given = config.non_default()
    in_config = {name: given.pop(name) for name in ONLY_IN_CONFIG if name in given}
    names = ["LaunchConfig"] if in_config else []
    names += ["RayCluster"] if isinstance(given.get("on"), RayCluster) else []
    imports = [f"from notebook_accelerate import {', '.join([*names, 'notebook_launcher'])}", *_imports(in_config)]
    call = [function, *([arguments] if arguments and arguments != "()" else [])]
    call += [f"{name}={shown_code(name, value) if hidden else code_of(value)}" for name, value in given.items()]
    if in_config:
        values = [f"{name}={_multiline(value)}" for name, value in in_config.items()]
        call.append(f"config=LaunchConfig({', '.join(values)})")
    return "\n".join([*imports, "", _call(f"{RUN_VARIABLE} = notebook_launcher", call)])


def arguments_code(arguments: Sequence[Any], namespace: Mapping[str, Any]) -> str:
    """Return the code of a function's arguments, such as ``(model, 3)``; "" for none, and where one has no code.

    Args:
        arguments: Plain values, or values of variables.
        namespace: The variables.
    """
    codes = [_argument_code(value, namespace) for value in arguments]
    if not all(codes):
        return ""
    return f"({', '.join(codes)}{',' if len(codes) == 1 else ''})" if codes else ""


def as_tuple(text: str) -> str:
    """Return the code of a function's arguments as a tuple: "(model,)" for "model"; "" for none.

    Args:
        text: As entered: one argument, several separated by commas, or a tuple.
    """
    code = text.strip().rstrip(",")
    try:
        given = ast.parse(f"_({code})", mode="eval").body
    except SyntaxError:  # raised again where the code is evaluated
        return code
    arguments = given.args if isinstance(given, ast.Call) else []
    if len(arguments) != 1:
        return f"({code})" if code else ""
    return code if isinstance(arguments[0], ast.Tuple) else f"({code},)"


def _argument_code(value: Any, namespace: Mapping[str, Any]) -> str:
    code = repr(value)
    try:
        if len(code) <= _WIDTH and ast.literal_eval(code) == value:
            return code
    except (ValueError, SyntaxError, TypeError):
        pass
    return next((name for name, found in namespace.items() if found is value and not name.startswith("_")), "")


def _multiline(value: Any) -> str:
    """Return the code of a value; a dict has one entry per line."""
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
    """Return the name of a function in code; "train" if its name is not an identifier."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "train"


def training_functions(namespace: dict[str, Any]) -> list[str]:
    """Return the names of the functions that the notebook itself defines, the latest first."""
    own = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == namespace.get("__name__")
    ]
    return own[::-1]
