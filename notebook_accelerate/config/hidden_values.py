"""Texts without secrets: values of environment variables, and credentials in URLs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HIDDEN = "***"
VARIABLES = ("env", "env_vars", "runtime_env", "rdzv_conf")
"""Fields whose values may be secrets: only their names are shown."""
_USER = re.compile(r"(?<=://)(?:[^\s'\"/@:]*:[^\s'\"]*|[^\s'\"/@]*)@")
"""user:password@ or token@; a password may contain / and @."""
_PARAMETER = re.compile(
    r"([?&][^=&\s'\"]*(?:token|key|secret|password|signature|credential)[^=&\s'\"]*=)[^&#\s'\"]*", re.IGNORECASE
)
_SHORT = 4
"""Shorter values are not looked for in a text: they would hide parts of ordinary words."""


def hide_credentials(text: str) -> str:
    """Return a text with the user, password and secret parameters of its URLs replaced."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def shown_value(name: str, value: object) -> Any:
    """Return the value of a field as it may be shown.

    Args:
        name: The field.
        value: A plain value, or containers of them.
    """
    if name in VARIABLES and value is not None:
        return names_only(value)
    if isinstance(value, str):
        return hide_credentials(value)
    if isinstance(value, Mapping):
        return {entry: shown_value(str(entry), inner) for entry, inner in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(shown_value(name, inner) for inner in value)
    return value


def names_only(value: object) -> Any:
    """Return nested dicts with the names that they have, and `HIDDEN` for each value."""
    if isinstance(value, Mapping):
        return {name: names_only(entry) for name, entry in value.items()}
    return _Hidden()


class _Hidden:
    def __repr__(self) -> str:
        return HIDDEN


def shown_repr(settings: DataclassInstance) -> str:
    """Return the ``repr`` of a dataclass without its secrets.

    Args:
        settings: The dataclass.
    """
    shown = {
        entry.name: shown_value(entry.name, getattr(settings, entry.name)) for entry in dataclasses.fields(settings)
    }
    return f"{type(settings).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def redact(text: str, settings: DataclassInstance) -> str:
    """Return a text from another program, such as an error of Ray, without the secrets of a dataclass.

    Args:
        text: Any text.
        settings: The dataclass whose values must not be in it.
    """
    text = hide_credentials(text)
    for entry in dataclasses.fields(settings):
        if entry.name in VARIABLES:
            for value in _values(getattr(settings, entry.name)):
                text = text.replace(value, HIDDEN) if len(value) >= _SHORT else text
    return text


def _values(value: object, name: str = "") -> list[str]:
    """Return the values of environment variables in nested containers."""
    if isinstance(value, Mapping):
        return [
            found for key, entry in value.items() for found in _values(entry, name or (key if key in VARIABLES else ""))
        ]
    return [str(value)] if name else []


__all__ = ["HIDDEN", "VARIABLES", "hide_credentials", "names_only", "redact", "shown_repr", "shown_value"]
