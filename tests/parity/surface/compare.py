"""Compare this package's public names with the table of the API that it implements.

The table, api_surface.json, lists for each module the names that Accelerate exports: kind, signature, members of
enums, fields of dataclasses, methods and properties of classes, and the area of the API that each belongs to.
`python -m tests.parity.surface.compare [AREA ...]` prints the differences.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("api_surface.json")
PACKAGE = "notebook_accelerate"
AREAS = ("launch", "training", "big_models", "parallel")
_NO_PLAIN_VALUE = object()


def rows(areas: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the module, the name and the row of each entry in these areas. The package's root is the module ""."""
    for module, names in json.loads(TABLE.read_text())["modules"].items():
        for name, row in names.items():
            if row["area"] in areas:
                yield ("" if module == "<package>" else module), name, row


def gaps(module: str, name: str, row: dict[str, Any]) -> list[str]:
    """Return one line for each difference between the table's row and the object with that name.

    Args:
        module: The module below the package, or "" for the root.
        name: The name in the module.
        row: The entry of the table.

    Returns:
        The lines, or an empty list if everything agrees.
    """
    path = f"{PACKAGE}.{module}".rstrip(".")
    where = f"{path}.{name}"
    try:
        found = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        return [f"{where}: {error}"]
    lines = _member_gaps(where, row, found) + _attribute_gaps(where, row, found)
    if row.get("signature") and row["kind"] in ("function", "class", "dataclass"):
        lines += _signature_gaps(where, row["signature"], found)
    return lines


def _member_gaps(where: str, row: dict[str, Any], found: Any) -> list[str]:
    members = row.get("members") or {}
    if not members:
        return []
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        return [f"{where}: should be an enum"]
    have = {name: member.value for name, member in found.__members__.items()}
    return [f"{where}: member {name}={value!r} missing" for name, value in members.items() if have.get(name) != value]


def _attribute_gaps(where: str, row: dict[str, Any], found: Any) -> list[str]:
    have = getattr(found, "__dataclass_fields__", {})
    lines = [f"{where}: field {name} missing" for name in row.get("fields", {}) if name not in have]
    absent = [name for name in row.get("properties", []) if not _has_attribute(found, name)]
    lines += [f"{where}.{name}: property missing" for name in absent]
    for name, signature in row.get("methods", {}).items():
        if inspect.getattr_static(found, name, None) is None:
            lines.append(f"{where}.{name}: method missing")
        elif signature and not name.startswith("__"):
            lines += _signature_gaps(f"{where}.{name}", signature, getattr(found, name))
    return lines


def _has_attribute(found: Any, name: str) -> bool:
    return inspect.getattr_static(found, name, None) is not None or name in getattr(found, "__annotations__", {})


def _signature_gaps(where: str, signature: str, found: Callable[..., Any]) -> list[str]:
    try:
        have = inspect.signature(found).parameters
    except (TypeError, ValueError):  # Built-in functions and enums have no signature that could be compared.
        return []
    kinds = {parameter.kind for parameter in have.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    if takes_any and inspect.Parameter.VAR_POSITIONAL in kinds:
        return []
    lines = []
    for name, default in _parameters(signature).items():
        if name not in have:
            lines += [] if takes_any else [f"{where}: parameter {name} missing"]
        elif default is not _NO_PLAIN_VALUE and not _same(have[name].default, default):
            lines.append(f"{where}: {name}={have[name].default!r}, the table says {default!r}")
    return lines


def _parameters(signature: str) -> dict[str, Any]:
    """Return the name and the default of each parameter in a signature that inspect has formatted."""
    source = re.sub(r"<[^<>]*>", "...", signature)  # This replaces defaults such as <object object>.
    arguments = ast.parse(f"def _{source}: ...").body[0].args  # type: ignore[attr-defined]
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*missing, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: _plain(default) for argument, default in pairs if argument.arg not in ("self", "cls")}


def _plain(default: ast.expr | None) -> Any:
    try:
        value = ast.literal_eval(default) if default is not None else _NO_PLAIN_VALUE
    except ValueError:
        return _NO_PLAIN_VALUE
    return _NO_PLAIN_VALUE if value is ... else value


def _same(have: Any, wanted: Any) -> bool:
    value = have.value if isinstance(have, enum.Enum) else have
    if value is inspect.Parameter.empty or not isinstance(value, bool | int | float | str | type(None)):
        return True  # Other tests check what a sentinel or a factory stands for.
    return bool(value == wanted)


def main(areas: tuple[str, ...]) -> int:
    """Print every difference in the areas and the share of names that agree. Return 1 if there is a difference."""
    total = agree = 0
    for module, name, row in rows(areas):
        lines = gaps(module, name, row)
        total, agree = total + 1, agree + (not lines)
        print("".join(f"{line}\n" for line in lines), end="")
    print(f"{agree} of {total} names agree in {', '.join(areas)}")
    return int(agree < total)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or AREAS))
