"""The entries of a form over a dataclass: their values, their errors, and the instance they make."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.hidden_values import shown_value
from notebook_accelerate.launch.report.markup import Markup, element
from notebook_accelerate.launch.report.tables import LEFT, html_table
from notebook_accelerate.widgets.fields import Field, FieldError, fields_of, parse, text_of


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of checking a draft."""

    value: Any = None
    """The dataclass's instance; None: there are errors."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Errors by field, dotted for nested fields; "" for errors of no single field."""


class FormDraft:
    """The entries of a form over a dataclass, without the form.

    Args:
        cls: The dataclass.
        value: The initial instance; None: the defaults.
        choices: Allowed values by field, for types that do not list them.
        names: Only these fields; None: all.
    """

    def __init__(
        self,
        cls: type[Any],
        value: Any = None,
        *,
        choices: Mapping[str, Sequence[Any]] | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        self.cls = cls
        self.fields = fields_of(cls, choices, names)
        self.entries: dict[str, Any] = {}
        self._nested: dict[str, FormDraft] = {}
        self.load(value)

    def load(self, value: Any) -> None:
        """Set all entries from an instance; None sets the defaults.

        Raises:
            ValueError: It is an instance of another class.
        """
        if value is not None and not isinstance(value, self.cls):
            raise ValueError(f"{value!r} is not a {self.cls.__name__}; pass one: form.value = {self.cls.__name__}(...)")
        plain = self._plain_instance() if value is not None else None
        for entry in self.fields:
            given = entry.default if value is None else getattr(value, entry.name)
            if plain is not None and given == getattr(plain, entry.name):
                given = entry.default  # set by the class itself, not by the user
            self._put(entry, given)

    def _plain_instance(self) -> Any:
        """Return an instance created without arguments or environment variables; None if that is not possible."""
        with environ.ignored():
            try:
                return self.cls()
            except Exception:  # noqa: BLE001 - required fields, or a package that is not installed
                return None

    def _put(self, entry: Field, given: Any) -> None:
        if entry.kind == "nested":
            present = given is not None and given is not MISSING
            self.entries[entry.name] = present or not entry.optional
            if self.entries[entry.name]:
                self.nested(entry.name).load(given if present else None)
        elif entry.kind in {"flag", "choice", "code"}:
            self.entries[entry.name] = _member(entry, given)
        else:
            self.entries[entry.name] = text_of(entry, given)

    def nested(self, name: str) -> FormDraft:
        """Return the draft of a nested dataclass, created on first use."""
        if name not in self._nested:
            nested = next(entry.nested for entry in self.fields if entry.name == name)
            assert nested is not None, f"{name} is not a nested dataclass"
            self._nested[name] = FormDraft(nested, choices=CHOICES.get(nested.__name__))
        return self._nested[name]

    def check(self) -> Checked:
        """Create the instance, with the checks of the dataclass itself, and collect the errors by field."""
        given, errors = self._parsed()
        if any(entry.default is MISSING and entry.name not in given for entry in self.fields):
            return Checked(errors=errors)
        value = None
        for _ in range(len(given) + 1):
            try:
                value = self.cls(**given)
                break
            except Exception as error:  # noqa: BLE001 - any error of the class is shown to the user
                message = str(error) or type(error).__name__
                name = _field_in(message, given)
                errors.setdefault(name, message)
                if name not in given:
                    break
                del given[name]  # the next attempt shows further errors
        return Checked(errors=errors) if errors else Checked(value=value)

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field, without entries that are not allowed."""
        return self._parsed()[0]

    def _parsed(self) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for entry in self.fields:
            try:
                value = self._value(entry, errors)
            except FieldError as error:
                errors[entry.name] = str(error)
                continue
            if value is MISSING:
                errors.setdefault(entry.name, f"{entry.name} is required")
            elif type(value) is not type(entry.default) or value != entry.default:
                values[entry.name] = value
        return values, errors

    def _value(self, entry: Field, errors: dict[str, str]) -> Any:
        raw = self.entries[entry.name]
        if entry.kind == "nested":
            if not raw:
                return None
            checked = self.nested(entry.name).check()
            errors.update({f"{entry.name}.{name}".rstrip("."): text for name, text in checked.errors.items()})
            return entry.default if checked.errors else checked.value
        return raw if entry.kind in {"flag", "choice", "code"} else parse(entry, raw)

    # ---- the static form

    def rows(self, prefix: str = "") -> list[tuple[str, str, str]]:
        """Return name, value and help of each field whose entry differs from the default."""
        values, errors = self._parsed()
        found = []
        for entry in self.fields:
            name = prefix + entry.name
            if entry.kind == "nested" and self.entries[entry.name]:
                found += self.nested(entry.name).rows(f"{name}.") or [(name, "defaults", entry.help)]
            elif entry.name in values:
                found.append((name, shown_code(entry.name, values[entry.name]), entry.help))
            elif entry.name in errors:
                raw = shown_value(entry.name, self.entries[entry.name])
                found.append((name, f"{raw!s} (not allowed)", entry.help))
        return found

    def text(self) -> str:
        """Return the entries that differ from the defaults, as plain text."""
        rows = self.rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value, _ in rows) or "defaults"

    def html(self, caption: str) -> Markup:
        """Return the entries that differ from the defaults, as a table without scripts or style sheets.

        Args:
            caption: Its caption.
        """
        title, rows = element("strong", caption), self.rows()
        if not rows:
            return element("p", title, ": defaults")
        cells = [(name, element("code", value), help_text) for name, value, help_text in rows]
        head, columns = ("setting", "value", "description"), [LEFT] * 3
        return html_table(head, cells, caption=element("caption", title, **LEFT), columns=columns)


CHOICES: dict[str, Mapping[str, Sequence[Any]]] = {}
"""Allowed values by class name and field, for types that do not list them; panels add their own rows."""


def _member(entry: Field, given: Any) -> Any:
    """Return the choice that equals ``given``, such as an enum's member for its value."""
    return next((choice for choice in entry.choices if choice == given), given)


def _field_in(message: str, given: Mapping[str, Any]) -> str:
    """Return the changed field that a message names first, preferably as ``name=``; "" if it names none."""
    for pattern in (r"\b{}=", r"\b{}\b"):
        positions = {name: found.start() for name in given if (found := re.search(pattern.format(name), message))}
        if positions:
            return min(positions, key=lambda name: positions[name])
    return next(iter(given)) if len(given) == 1 else ""


def shown_code(name: str, value: object) -> str:
    """Return the expression of a field's value without secrets, to be shown."""
    return code_of(shown_value(name, value), field=shown_code)


def code_of(value: object, field: Callable[[str, Any], str] = lambda _, value: code_of(value)) -> str:
    """Return the expression of ``value``: dataclasses with the fields that were changed, enums by value.

    Args:
        value: Any value of a form.
        field: Returns the expression of a field of a dataclass.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        draft = FormDraft(type(value), value)
        inner = ", ".join(f"{name}={field(name, entry)}" for name, entry in draft.changed().items())
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "total_seconds"):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, list):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code_of(key)}: {code_of(entry)}" for key, entry in value.items()) + "}"
    plain = value.value if isinstance(value, Enum) else value
    # JSON's escapes are Python's too, and formatters prefer double quotes.
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else repr(plain)
