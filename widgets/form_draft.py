"""A dataclass being filled in: what stands in each field, what is wrong with it, and the object it makes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum
from html import escape
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.widgets.fields import Field, FieldError, fields_of, parse, text_of


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a draft is worth now."""

    value: Any = None
    """The dataclass's instance; None where there are errors."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """What is wrong, by field, dotted for nested ones; under "" what no field is to blame for."""


class FormDraft:
    """The entries of a form over a dataclass, without the form.

    Args:
        cls: The dataclass.
        value: An instance to begin with; None: the defaults.
        choices: Allowed values that types do not tell, by field.
        names: Only these fields.
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
        """Take all entries from an instance; None takes the defaults.

        Raises:
            ValueError: It is of another class.
        """
        if value is not None and not isinstance(value, self.cls):
            raise ValueError(f"{value!r} is not a {self.cls.__name__}; pass one")
        plain = self._plain_instance() if value is not None else None
        for entry in self.fields:
            given = entry.default if value is None else getattr(value, entry.name)
            if plain is not None and given == getattr(plain, entry.name):
                given = entry.default  # filled in by the class itself: not what anybody wrote
            self._put(entry, given)

    def _plain_instance(self) -> Any:
        """Return an instance made without arguments or environment variables; None where that is not possible."""
        with environ.ignored():
            try:
                return self.cls()
            except Exception:  # noqa: BLE001 - required fields, or a package that is not installed
                return None

    def _put(self, entry: Field, given: Any) -> None:
        if entry.kind == "nested":
            self.entries[entry.name] = given is not None and given is not MISSING
            if self.entries[entry.name] or not entry.optional:
                self.nested(entry.name).load(given if self.entries[entry.name] else None)
                self.entries[entry.name] = True
        elif entry.kind in {"flag", "choice", "code"}:
            self.entries[entry.name] = _member(entry, given)
        else:
            self.entries[entry.name] = text_of(entry, given)

    def field(self, name: str) -> Field:
        """Return one field by name."""
        return next(entry for entry in self.fields if entry.name == name)

    def nested(self, name: str) -> FormDraft:
        """Return the draft of a nested dataclass, made when it is first asked for."""
        if name not in self._nested:
            nested = self.field(name).nested
            assert nested is not None, f"{name} is not a nested dataclass"
            self._nested[name] = FormDraft(nested, choices=CHOICES.get(nested.__name__))
        return self._nested[name]

    def check(self) -> Checked:
        """Make the object, with the checks of the dataclass itself, and say what is wrong by field."""
        given, errors = self._parsed()
        if any(entry.default is MISSING and entry.name not in given for entry in self.fields):
            return Checked(errors=errors)
        value = None
        for _ in range(len(given) + 1):
            try:
                value = self.cls(**given)
                break
            except Exception as error:  # noqa: BLE001 - whatever the class raises is what the user is told
                message = str(error) or type(error).__name__
                name = _blamed(message, given)
                errors.setdefault(name, message)
                if name not in given:
                    break
                del given[name]  # what else is wrong shows without it
        return Checked(errors=errors) if errors else Checked(value=value)

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field; what is no value is left out."""
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

    # ---- as it stands in a saved notebook

    def rows(self, prefix: str = "") -> list[tuple[str, str, str]]:
        """Return name, value and help of every field whose entry differs from the default."""
        values, errors = self._parsed()
        found = []
        for entry in self.fields:
            inner = entry.kind == "nested" and self.entries[entry.name]
            if inner:
                found += self.nested(entry.name).rows(f"{prefix}{entry.name}.") or [
                    (prefix + entry.name, "defaults", entry.help)
                ]
            elif entry.name in values:
                found.append((prefix + entry.name, code_of(values[entry.name]), entry.help))
            elif entry.name in errors:
                found.append((prefix + entry.name, f"{self.entries[entry.name]!s} (not allowed)", errors[entry.name]))
        return found

    def text(self) -> str:
        """Return what differs from the defaults, as plain text."""
        rows = self.rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {value}" for name, value, _ in rows) or "defaults"

    def html(self, caption: str) -> str:
        """Return what differs from the defaults as a table without scripts or style sheets.

        Args:
            caption: Its caption.
        """
        rows = self.rows()
        if not rows:
            return f"<p><strong>{escape(caption)}</strong>: defaults</p>"
        left = ' style="text-align:left"'  # front ends put the cells of tables to the right
        body = "".join(
            f'<tr><th scope="row"{left}>{escape(name)}</th><td{left}><code>{escape(value)}</code></td>'
            f"<td{left}>{escape(text)}</td></tr>"
            for name, value, text in rows
        )
        head = "".join(f'<th scope="col"{left}>{name}</th>' for name in ("setting", "value", "what it is"))
        caption = f"<caption{left}><strong>{escape(caption)}</strong></caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


CHOICES: dict[str, Mapping[str, Sequence[Any]]] = {}
"""Allowed values that types do not tell, by class name and field; a panel adds its own rows."""


def _member(entry: Field, given: Any) -> Any:
    """Return the choice that equals ``given``: an enum's member for its value."""
    return next((choice for choice in entry.choices if choice == given), given)


def _blamed(message: str, given: Mapping[str, Any]) -> str:
    """Return the changed field that a message names first, best as ``name=``; "" where it names none."""
    for pattern in (r"\b{}=", r"\b{}\b"):
        places = {name: found.start() for name in given if (found := re.search(pattern.format(name), message))}
        if places:
            return min(places, key=lambda name: places[name])
    return next(iter(given)) if len(given) == 1 else ""


def code_of(value: Any) -> str:
    """Return the expression that makes ``value``: dataclasses with what differs from their defaults, enums by value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        draft = FormDraft(type(value), value)
        inner = ", ".join(f"{name}={code_of(entry)}" for name, entry in draft.changed().items())
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "total_seconds"):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, list):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{code_of(key)}: {code_of(entry)}" for key, entry in value.items()) + "}"
    plain = value.value if isinstance(value, Enum) else value
    # JSON's escapes are Python's too, and double quotes are what formatters write.
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, str) else repr(plain)


__all__ = ["CHOICES", "Checked", "FormDraft", "code_of"]
