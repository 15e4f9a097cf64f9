"""The fields of a dataclass as a form needs them: kind of value, allowed values, help text, and text formats."""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from notebook_accelerate.config.settings import labels_of, settings_of, short_help


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a dataclass."""

    name: str
    """The name of the field."""
    label: str
    """The words next to the input."""
    kind: str
    """A key of ``TEXT_FORMATS``, or flag, choice, nested or code."""
    optional: bool
    """Whether None is allowed."""
    default: Any
    """The default, a new value of its factory, or ``dataclasses.MISSING`` if a value is required."""
    help: str
    """The first paragraph of the field's help text, followed by the variable that sets the field."""
    choices: tuple[Any, ...] = ()
    """The allowed values, if they are known."""
    nested: type[Any] | None = None
    """The dataclass of a nested field."""
    scalars: tuple[type[Any], ...] = ()
    """The possible types of the value, if the kind is scalar."""
    placeholder: str = ""
    """Text to show as an example, or "" to show the default."""

    @property
    def is_choice(self) -> bool:
        """Whether the form shows a list of choices."""
        return self.kind == "choice" or (self.kind == "flag" and self.optional)

    def by_label(self) -> dict[str, Any]:
        """Return the choices, keyed by the labels that the list shows."""
        values = (True, False) if self.kind == "flag" else self.choices
        return {self.label_of(value): value for value in values}

    def member(self, given: Any) -> Any:
        """Return the choice that equals ``given``, such as an enum's member for its value, or else ``given``."""
        return next((choice for choice in self.choices if choice == given), given)

    def label_of(self, value: Any) -> str:
        """Return the text of a choice, or "" for None."""
        if value is None or value is MISSING:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return str(getattr(value, "value", value))


class FieldError(ValueError):
    """Raised when the text that was entered is not a valid value of a field."""


# ---- from a dataclass to its fields


def fields_of(
    cls: type[Any], choices: Mapping[str, Sequence[Any]] | None = None, names: Iterable[str] | None = None
) -> tuple[Field, ...]:
    """Return the fields of a dataclass that its constructor takes.

    Args:
        cls: The dataclass.
        choices: Allowed values by field name, for types that do not list them. If None, those in the class's settings
            are used. The ``metadata`` of other fields may have "choices", a "label" and a "placeholder".
        names: The fields to return. If None, all fields are returned.

    Raises:
        ValueError: ``cls`` is not a dataclass, or has no such field.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{cls!r} is not a dataclass; pass the class itself: Form(LaunchConfig)")
    known = {entry.name: entry for entry in dataclasses.fields(cls) if entry.init}
    wanted = list(known) if names is None else list(names)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; its fields are: {', '.join(known)}")
    labels = labels_of(cls)
    return tuple(_field(cls, known[name], (choices or {}).get(name), labels) for name in wanted)


def groups_of(cls: type[Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the titles and the fields of the groups of a class's settings, or nothing if there is only one group.

    Args:
        cls: The dataclass. Its class attribute ``form_groups`` can set the order of the titles. By default, it is the
            order of the fields.
    """
    found: dict[str, tuple[str, ...]] = dict.fromkeys(getattr(cls, "form_groups", ()), ())
    for entry in settings_of(cls).values():
        if entry.group is not None:
            found[entry.group] = (*found.get(entry.group, ()), entry.name)
    return tuple(found.items()) if len(found) > 1 else ()


def _field(
    cls: type[Any], entry: dataclasses.Field[Any], choices: Sequence[Any] | None, labels: Mapping[str, str]
) -> Field:
    members = _members(cls, entry.name)
    optional = type(None) in members or entry.default is None
    known = settings_of(cls).get(entry.name)
    allowed = choices or (known.choices if known is not None else entry.metadata.get("choices")) or ()
    kind = _kind([member for member in members if member is not type(None)], allowed)
    text = f"{short_help(cls, entry.name)}{known.source if known is not None else ''}"
    others = {name: label for name, label in labels.items() if name != entry.name}
    return Field(
        name=entry.name,
        label=labels[entry.name],
        placeholder=entry.metadata.get("placeholder", ""),
        optional=optional,
        default=entry.default_factory() if entry.default_factory is not MISSING else entry.default,
        help=with_labels(form_words(text, str(kind["kind"])), others),
        **kind,
    )


def _kind(members: list[Any], allowed: Sequence[Any]) -> dict[str, Any]:
    """Return the field's kind and the attributes that belong to it, given the types of a union without None."""
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
    if origin is Sequence and arguments == (str,):
        return "words"
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[:1] == (str,):
        return "variables" if arguments[1] is str else "mapping"
    return "code" if _is_code(member) else "literal"


def _is_code(member: Any) -> bool:
    """Return whether values of this type can only be created in code: functions and unknown classes."""
    if member is _UNKNOWN or get_origin(member) is Callable:
        return True
    return isinstance(member, type) and member.__module__ != "builtins"


# ---- annotations, including names that are only imported for type checkers

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
        return eval(ast.unparse(node), scope)  # noqa: S307 - the class's own annotation, as in typing.get_type_hints
    except Exception:  # noqa: BLE001 - imported only for type checkers, or from a missing package
        return _UNKNOWN


def _flat(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _flat(part)]
    return [type(None)] if annotation is None else [annotation]


# ---- help

_WORDS = {
    "None (": "default (",
    "True or False": "yes or no",
    "is then False": "is then off",
    "If False, ": "If unchecked, ",
    "so True only": "so it only",
    "default: True.": "default: on.",
    "default: False.": "default: off.",
}
"""The words that a form uses for values in code."""
_WITHOUT = {"nested": "If unchecked", "choice": "By default", "flag": "By default"}


def form_words(text: str, kind: str) -> str:
    """Return the help text of a field in the words of a form, which has boxes and no values such as None or True.

    Args:
        text: The text for code, such as "Whether ranks wait (True) or not (False). If None, they wait."
        kind: The kind of the field.
    """
    text = re.sub(r" \(True\),? or .*? \(False\)", "", text)
    text = re.sub(r"^Whether (?:to )?(.)", lambda found: found[1].upper(), text)
    without = _WITHOUT.get(kind, "If empty")
    text = re.sub(r"If `*None`*(,| and) ", lambda found: f"{without}{found[1]} ", text)
    text = re.sub(r"(``\w+``) is None\b", r"\1 is empty", text)
    for code, words in _WORDS.items():
        text = text.replace(code, words)
    return text


_NAME = re.compile(r"``(\w+)``|(?<![\w.$'\"])([a-z]\w*)\b(=(?!=))?")


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Return a text with labels in place of the names of fields: '"Number of processes" = 0' for "num_processes=0".

    A name that may also be an English word, such as "output", is replaced only at the start, before "=", or in double
    backquotes.

    Args:
        text: A help text or an error of a dataclass.
        labels: The labels of the dataclass's fields by name.
    """

    def labelled(found: re.Match[str]) -> str:
        quoted, name, equals = found.groups()
        is_name = quoted or equals or "_" in name or not found.start()
        label = labels.get(quoted or name) if is_name else None
        return found[0] if label is None else f'"{label}"{" = " if equals else ""}'

    return _NAME.sub(labelled, text)


def summary(cls: type[Any]) -> str:
    """Return the first paragraph of a class's docstring, or "" if ``dataclasses`` generated it."""
    text = (vars(cls).get("__doc__") or "").strip()
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split("\n\n")[0].split())


# ---- text formats


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The conversion of values of one kind to and from the text in a text box."""

    parse: Callable[[str, Field], Any] = lambda text, _: text
    """Converts non-empty text to a value; raises FieldError if the text is not allowed."""
    format: Callable[[Any], str] = str
    """Converts a value other than None to text."""
    hint: str = ""
    """A description of the allowed text."""
    many_lines: bool = False
    """Whether the box has several lines."""


def _converter(convert: Callable[[str], Any], what: str, example: str) -> Callable[[str, Field], Any]:
    """Return a ``parse`` function that calls ``convert``. Its error message contains ``what`` and an ``example``."""

    def parse(text: str, field: Field) -> Any:
        try:
            return convert(text)
        except (ValueError, OverflowError):
            raise FieldError(f"{field.name}={text!r} is not {what}; write one, such as {example}") from None

    return parse


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _assignments(value_of: Callable[[str], Any], text_of_value: Callable[[Any], str]) -> TextFormat:
    """Return the format of a dict, which has one NAME=value on each line."""

    def parse(text: str, field: Field) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for number, line in enumerate(_lines(text), 1):
            name, equals, value = line.partition("=")
            if not equals or not name.strip():  # Don't show the line, because it may contain a secret.
                raise FieldError(f"{field.name}: line {number} is not NAME=value; write one such line per entry")
            values[name.strip()] = value_of(value.strip())
        return values

    def format_values(values: Mapping[str, Any]) -> str:
        return "\n".join(f"{name}={text_of_value(value)}" for name, value in values.items())

    return TextFormat(parse=parse, format=format_values, hint="NAME=value, one per line", many_lines=True)


def _parse_scalar(text: str, field: Field) -> Any:
    for kind in (bool, int, float):
        if kind in field.scalars and isinstance(value := literal(text), kind):
            return value
    if str not in field.scalars:
        kinds = ", ".join(kind.__name__ for kind in field.scalars)
        raise FieldError(f"{field.name}={text!r} is not allowed; write a value of one of these types: {kinds}")
    return text


def literal(text: str) -> Any:
    """Return the value of a Python literal, or any other text unchanged."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _as_literal(value: Any) -> str:
    """Return the text that ``literal`` converts to ``value``, without quotes if possible."""
    return value if isinstance(value, str) and literal(value) == value else repr(value)


def _format_seconds(value: Any) -> str:
    return f"{value.total_seconds():g}" if isinstance(value, timedelta) else str(value)


TEXT_FORMATS: dict[str, TextFormat] = {
    "text": TextFormat(),
    "whole": TextFormat(parse=_converter(int, "a whole number", "4"), hint="a whole number"),
    "number": TextFormat(parse=_converter(float, "a number", "0.5"), hint="a number"),
    "path": TextFormat(parse=lambda text, _: Path(text).expanduser(), hint="a path"),
    "seconds": TextFormat(
        parse=_converter(lambda text: timedelta(seconds=float(text)), "a number of seconds", "90"),
        format=_format_seconds,
        hint="seconds",
    ),
    "lines": TextFormat(
        parse=lambda text, _: _lines(text),
        format=lambda value: "\n".join(map(str, value)),
        hint="one per line",
        many_lines=True,
    ),
    "words": TextFormat(
        parse=lambda text, _: tuple(word.strip() for word in text.split(",") if word.strip()),
        format=lambda value: ", ".join(map(str, value)),
        hint="separated by commas",
    ),
    "variables": _assignments(str, str),
    "mapping": _assignments(literal, _as_literal),
    "scalar": TextFormat(parse=_parse_scalar),
    "literal": TextFormat(parse=lambda text, _: literal(text), format=_as_literal, hint="text or a Python value"),
}
"""The text formats of the kinds of values that are entered as text."""
_EMPTY: dict[str, Callable[[], Any]] = {"text": str, "lines": list, "words": tuple, "variables": dict, "mapping": dict}


def parse(field: Field, text: str) -> Any:
    """Return the value of ``text``. Empty text means None, or an empty value if None is not allowed.

    Raises:
        FieldError: The text is not allowed.
    """
    text_format = TEXT_FORMATS[field.kind]
    if text.strip():
        # The default's own text means the default, so "29500" remains a string if the default is a string.
        default = field.default
        is_default = default is not None and default is not MISSING and text == text_format.format(default)
        return default if is_default else text_format.parse(text.strip(), field)
    if field.optional:
        return None
    if field.default is not MISSING:
        if field.kind in _EMPTY:
            return _EMPTY[field.kind]()
        if field.kind == "scalar" and str in field.scalars:
            return ""
    raise FieldError(f"{field.name} is required: write {text_format.hint or 'a value'}")


def text_of(field: Field, value: Any) -> str:
    """Return the text that ``parse`` converts to ``value``, or "" for None and for a missing value."""
    return "" if value is None or value is MISSING else TEXT_FORMATS[field.kind].format(value)


# ---- inputs

_NOT_SET = "default"


def content_of(field: Field, entry: Any) -> str | bool:
    """Return the content of a field's input for an entry.

    Args:
        field: The field whose input is filled.
        entry: Text, a choice, whether the box is checked, or the value of a field of the kind code.
    """
    if field.kind == "code":
        return "set in code only" if entry is None else f"set in code: {entry!r}"
    if field.is_choice:
        return field.label_of(entry)
    return entry  # type: ignore[no-any-return]


def drawn(field: Field) -> dict[str, Any]:
    """Return a field as ``static/forms.js`` draws it."""
    kind, placeholder = field.kind, field.placeholder or _NOT_SET
    if field.is_choice:
        kind = "choice"
    elif (text_format := TEXT_FORMATS.get(kind)) is not None:
        kind = "area" if text_format.many_lines else "text"
        default = text_of(field, field.default).replace("\n", " ")
        hint = f"{_NOT_SET} ({text_format.hint})" if text_format.hint else _NOT_SET
        placeholder = field.placeholder or (f"{default} (default)" if default else hint)
    return {
        "name": field.name,
        "label": field.label,
        "kind": kind,
        "help": field.help or (summary(field.nested) if field.nested else ""),
        "placeholder": placeholder,
        "optional": field.optional,
        "choices": list(field.by_label()) if field.is_choice else [],
    }
