"""What a form needs to know of a dataclass's fields: kind of value, allowed values, help, text in and text out."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_SECTIONS = re.compile(r"^(Args|Arguments|Attributes|Parameters):\s*$")
_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s+(.*)$")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a dataclass, as a form sees it."""

    name: str
    """Its name, which is also its label: what is written in code."""
    kind: str
    """A row of ``KINDS``, or flag, choice, nested or code."""
    optional: bool
    """Whether None is allowed."""
    default: Any
    """The default, made anew where there is a factory; ``dataclasses.MISSING`` where a value is required."""
    help: str
    """What the field is for."""
    choices: tuple[Any, ...] = ()
    """The allowed values, where they are known."""
    nested: type[Any] | None = None
    """The dataclass of a nested field."""
    scalars: tuple[type[Any], ...] = ()
    """For scalar: the types a text may stand for."""


class FieldError(ValueError):
    """A text that is no value of its field."""


# ---- from a dataclass to its fields


def fields_of(
    cls: type[Any], choices: Mapping[str, Sequence[Any]] | None = None, names: Iterable[str] | None = None
) -> tuple[Field, ...]:
    """Return the fields of a dataclass that its constructor takes.

    Args:
        cls: The dataclass.
        choices: Allowed values of fields whose type does not tell them, by name; ``metadata={"choices": ...}`` of the
            field itself is read too.
        names: Only these; None: all.

    Raises:
        ValueError: It is no dataclass, or has no such field.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{cls!r} is not a dataclass; pass the class itself, as Form(LaunchConfig)")
    known = {entry.name: entry for entry in dataclasses.fields(cls) if entry.init}
    wanted = list(known) if names is None else list(names)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")
    return tuple(_field(cls, known[name], (choices or {}).get(name)) for name in wanted)


def _field(cls: type[Any], entry: dataclasses.Field[Any], choices: Sequence[Any] | None) -> Field:
    members = _members(cls, entry.name)
    optional = type(None) in members or entry.default is None
    allowed = choices or entry.metadata.get("choices") or ()
    kind = _kind([member for member in members if member is not type(None)], allowed)
    return Field(
        name=entry.name,
        optional=optional,
        default=entry.default_factory() if entry.default_factory is not MISSING else entry.default,
        help=help_texts(cls).get(entry.name, ""),
        **kind,
    )


def _kind(members: list[Any], allowed: Sequence[Any]) -> dict[str, Any]:
    """Return kind and what belongs to it for the types of a union (without None)."""
    members = [member for member in members if member is not _UNKNOWN] or members
    if allowed:
        return {"kind": "choice", "choices": tuple(allowed)}
    if found := [value for member in members for value in _closed_set(member)]:
        return {"kind": "choice", "choices": tuple(found)}
    if len(members) == 1:
        member = members[0]
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return {"kind": "nested", "nested": member}
        return {"kind": _SINGLE.get(member) or _container(member)}
    if members and all(member in _SCALARS for member in members):
        return {"kind": "scalar", "scalars": tuple(members)}
    return {"kind": "code" if all(_is_code(member) for member in members) else "literal"}


def _closed_set(member: Any) -> tuple[Any, ...]:
    if get_origin(member) is Literal:
        return get_args(member)
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return tuple(member)
    return ()


def _container(member: Any) -> str:
    origin, arguments = get_origin(member), get_args(member)
    if origin is list and arguments in {(str,), (Any,)}:
        return "lines"
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[:1] == (str,):
        return "variables" if arguments[1] is str else "mapping"
    return "code" if _is_code(member) else "literal"


def _is_code(member: Any) -> bool:
    """Whether values of this type are only made in code: functions, and classes the form knows nothing of."""
    if member is _UNKNOWN or get_origin(member) is Callable:
        return True
    return isinstance(member, type) and member.__module__ != "builtins"


# ---- annotations, also those that name what is only imported for type checkers

_UNKNOWN = object()
_SCALARS = (bool, int, float, str)
_SINGLE: dict[Any, str] = {
    bool: "flag", int: "whole", float: "number", str: "text", Path: "path", timedelta: "seconds", Any: "literal",
}  # fmt: skip


def _members(cls: type[Any], name: str) -> list[Any]:
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    annotation = vars(owner)["__annotations__"][name]
    if isinstance(annotation, str):
        scope = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
        parts = _union_parts(ast.parse(annotation.strip(), mode="eval").body)
        return [kind for part in parts for kind in _flat(_evaluated(part, {**scope, owner.__name__: owner}))]
    return _flat(annotation)


def _union_parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union_parts(node.left) + _union_parts(node.right)
    return [node]


def _evaluated(node: ast.expr, scope: dict[str, Any]) -> Any:
    try:
        return eval(ast.unparse(node), scope)  # noqa: S307 - the class's own annotation, as typing does it
    except Exception:  # noqa: BLE001 - named only for type checkers, or from a package that is not installed
        return _UNKNOWN


def _flat(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _flat(part)]
    return [type(None)] if annotation is None else [annotation]


# ---- help


def help_texts(cls: type[Any]) -> dict[str, str]:
    """Return what the class says of its fields: string literals after them, else its docstring's Args."""
    if cls in _HELP:
        return _HELP[cls]
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _docstring_entries(inspect.getdoc(base) or "") | _literals_after_fields(base)
    return _HELP.setdefault(cls, texts)


_HELP: weakref.WeakKeyDictionary[type[Any], dict[str, str]] = weakref.WeakKeyDictionary()


def summary(cls: type[Any]) -> str:
    """Return the first paragraph of a class's docstring; "" for the one that dataclasses makes up."""
    text = (vars(cls).get("__doc__") or "").strip()
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split("\n\n")[0].split())


def _docstring_entries(docstring: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    inside, name = False, ""
    for line in docstring.splitlines():
        if not line.startswith(" ") and line.strip():
            inside, name = bool(_SECTIONS.match(line)), ""
        elif inside and (found := _ENTRY.match(line.strip())) and len(line) - len(line.lstrip()) <= 4:
            name = found[1]
            texts[name] = found[2]
        elif inside and name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts


def _literals_after_fields(cls: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made in code, or typed where no source is kept
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for entry, after in itertools.pairwise(body):
        if not (isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[entry.target.id] = " ".join(str(after.value.value).split())
    return texts


# ---- texts


class Kind:
    """How values of one kind are written in a text box."""

    many_lines = False
    hint = ""

    def parse(self, text: str, field: Field) -> Any:
        """Return the value of a text that is not empty.

        Raises:
            FieldError: It is none.
        """
        return text

    def format(self, value: Any) -> str:
        """Return the text of a value that is not None."""
        return str(value)


class _Whole(Kind):
    hint = "a whole number"

    def parse(self, text: str, field: Field) -> int:
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise FieldError(f"{field.name}={text!r} is not a whole number") from None


class _Number(Kind):
    hint = "a number"

    def parse(self, text: str, field: Field) -> float:
        try:
            return float(text.replace("_", ""))
        except ValueError:
            raise FieldError(f"{field.name}={text!r} is not a number") from None


class _Path(Kind):
    hint = "a path"

    def parse(self, text: str, field: Field) -> Path:
        return Path(text).expanduser()


class _Seconds(Kind):
    hint = "seconds"

    def parse(self, text: str, field: Field) -> timedelta:
        try:
            return timedelta(seconds=float(text))
        except (ValueError, OverflowError):
            raise FieldError(f"{field.name}={text!r} is not a number of seconds") from None

    def format(self, value: Any) -> str:
        return f"{value.total_seconds():g}" if isinstance(value, timedelta) else str(value)


class _Lines(Kind):
    many_lines = True
    hint = "one per line"

    def parse(self, text: str, field: Field) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip()]

    def format(self, value: Any) -> str:
        return "\n".join(map(str, value))


class _Variables(Kind):
    many_lines = True
    hint = "NAME=value, one per line"

    def parse(self, text: str, field: Field) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for line in _Lines().parse(text, field):
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise FieldError(f"{field.name}: {line!r} is not NAME=value")
            values[name.strip()] = self.value(value.strip())
        return values

    def value(self, text: str) -> Any:
        return text

    def format(self, value: Any) -> str:
        return "\n".join(f"{name}={entry}" for name, entry in value.items())


class _Mapping(_Variables):
    def value(self, text: str) -> Any:
        return literal(text)

    def format(self, value: Any) -> str:
        return "\n".join(f"{name}={_as_literal(entry)}" for name, entry in value.items())


class _Scalar(Kind):
    def parse(self, text: str, field: Field) -> Any:
        for kind in (bool, int, float):
            if kind in field.scalars and isinstance(value := literal(text), kind):
                return value
        if str not in field.scalars:
            raise FieldError(f"{field.name}={text!r} is not one of: {', '.join(k.__name__ for k in field.scalars)}")
        return text


class _Literal(Kind):
    hint = "a Python literal, or a text"

    def parse(self, text: str, field: Field) -> Any:
        return literal(text)

    def format(self, value: Any) -> str:
        return _as_literal(value)


def literal(text: str) -> Any:
    """Return the Python literal that a text is, or the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _as_literal(value: Any) -> str:
    """Return the text that ``literal`` reads as ``value``: a string stays bare where it can."""
    return value if isinstance(value, str) and literal(value) == value else repr(value)


KINDS: dict[str, Kind] = {
    "text": Kind(),
    "whole": _Whole(),
    "number": _Number(),
    "path": _Path(),
    "seconds": _Seconds(),
    "lines": _Lines(),
    "variables": _Variables(),
    "mapping": _Mapping(),
    "scalar": _Scalar(),
    "literal": _Literal(),
}
"""The kinds of value that are written as text."""


def parse(field: Field, text: str) -> Any:
    """Return the value that ``text`` stands for; an empty one means None, or the default where None is not allowed.

    Raises:
        FieldError: It stands for none.
    """
    if not text.strip():
        return _empty(field)
    if field.default is not None and field.default is not MISSING and text == KINDS[field.kind].format(field.default):
        return field.default  # "29500" stays a string where the default is one
    return KINDS[field.kind].parse(text.strip(), field)


def _empty(field: Field) -> Any:
    if field.optional:
        return None
    if field.default is MISSING:
        raise FieldError(f"{field.name} is required: write {KINDS[field.kind].hint or 'a value'}")
    if field.kind in {"text", "scalar"} and (field.kind == "text" or str in field.scalars):
        return ""
    if field.kind in {"lines", "variables", "mapping"}:
        return [] if field.kind == "lines" else {}
    raise FieldError(f"{field.name} is required: write {KINDS[field.kind].hint or 'a value'}")


def text_of(field: Field, value: Any) -> str:
    """Return ``value`` as the text that ``parse`` reads; "" for None and for a value that is still missing."""
    return "" if value is None or value is MISSING else KINDS[field.kind].format(value)


__all__ = ["KINDS", "Field", "FieldError", "Kind", "fields_of", "help_texts", "literal", "parse", "summary", "text_of"]
