"""Helpers for plain values: sizes, names, folders, nested dicts and settings as text."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import numbers
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def convert_bytes(size: float) -> str:
    """Return a size in a readable unit.

    Args:
        size: The size in bytes.

    Returns:
        The size with at most two decimals, such as ``1.5 GB``. Units are powers of 1024.
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def size_text(size: float | None, unknown: str = "–") -> str:
    """Return a number of bytes as text with three significant digits, such as "312 B", "2.60 kB" or "340 GB".

    All texts that people read use this function and its units, which are powers of 1000. `convert_bytes` exists only
    for clients of Accelerate.

    Args:
        size: The number of bytes, or None if unknown.
        unknown: The text for None.
    """
    if size is None:
        return unknown
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:  # Such a number would be rounded to 1000.
        size /= 1000
        del units[0]
    if units[0] == "B":
        return f"{size:.0f} B"
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:,.{digits}f} {units[0]}"


def merge_dicts(source: MutableMapping[str, Any], destination: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Merge one nested dict into another, in place.

    Args:
        source: The dict whose values take precedence.
        destination: The dict to update.

    Returns:
        ``destination``, with the values of ``source``.
    """
    for key, value in source.items():
        if isinstance(value, MutableMapping):
            inner = destination.get(key)
            destination[key] = merge_dicts(value, inner if isinstance(inner, MutableMapping) else {})
        else:
            destination[key] = value
    return destination


def format_setting(value: Any) -> str:
    """Return a setting as readable text, with only those fields of dataclasses that differ from their defaults.

    Args:
        value: A plain value, a dataclass, or a dict of these by name.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={format_setting(shown_value(str(name), entry))}" for name, entry in value.items())
    if isinstance(value, str):
        return repr(hide_credentials(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_setting, value))}]"
    if isinstance(value, Enum) or not is_dataclass(value) or isinstance(value, type):
        return repr(getattr(value, "value", value) if isinstance(value, Enum) else value)
    changed = {entry.name: given for entry in fields(value) if (given := getattr(value, entry.name)) != entry.default}
    return f"{type(value).__name__}({format_setting(changed)})"


def value_in_words(value: Any) -> str:
    """Return a setting for people who do not read code: strings have no quotes, and booleans are yes or no.

    Args:
        value: A value that `format_setting` accepts.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return hide_credentials(value) if isinstance(value, str) else format_setting(value)


# Hiding secrets in text: values of environment variables and of keys such as api_key, and credentials in URLs.

HIDDEN = "***"
VARIABLES = ("env", "env_vars", "notify", "runtime_env", "rdzv_conf")
"""Fields with values that may be secrets. If the values have names, these are shown."""
_USER = re.compile(r"(?<=://)(?:[^\s'\"/@:]*:[^\s'\"]*|[^\s'\"/@]*)@")
"""Matches user:password@ or token@. A password may contain / and @."""
_PARAMETER = re.compile(r"([?&]([^=&\s'\"]*)=)[^&#\s'\"]*")
_SHORT = 4
"""Values shorter than this are not hidden in text, because they may also occur in ordinary words."""
_SHORT_VARIABLE = 8
"""Values of environment variables shorter than this are not hidden, because they may be words such as "true"."""
_PATHS = re.compile(r"(?:OLD)?PWD|.*_(?:DIR|FILE|PATH)")
"""Names of environment variables that contain paths, which are not secrets, as in HF_TOKEN_PATH."""


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ISSUED = re.compile(r"_(?:access|api|auth|encryption|private|refresh|secret|session|signing)_?(?:key|token)s?_")
"""Words that make a key or a token a secret, whatever else is in the name."""
_ORDINARY = re.compile(
    r"_(?:bos|cls|eos|image|mask|pad|per|sep|special|stop|unk|group|primary|sort)_(?:token|key)(?=_)"
    r"|_(?:token|key)(?=_(?:budget|count|dim|dropout|embedding|frame|head|id|len|length|limit|loss|mask|norm|padding|point|"
    r"position|size|type|value|weight)s?_)"
)
"""Names with token or key that are not secrets: tokens of text, and keys of attention, videos and tables."""
_SECRET = re.compile(r"_(?:key|signature|[a-z]*token)_|(?:credential|passphrase|passwd|password|pwd|secret)s?_")


def is_secret_name(name: str) -> bool:
    """Return whether a name denotes a secret, as ``api_key``, ``accessToken`` and ``db-password`` do.

    Plural keys and tokens, as in ``max_tokens``, are numbers or names, unless another word makes them secrets.

    Args:
        name: The name of an argument, of a key in a dict, or of a parameter in a URL.
    """
    words = f"_{'_'.join(_WORD.findall(name)).lower()}_"
    return bool(_ISSUED.search(words) or _SECRET.search(_ORDINARY.sub("", words)))


def hide_credentials(text: str) -> str:
    """Hide the user, the password and the secret parameters of URLs in text."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(_without_secret, _USER.sub(f"{HIDDEN}@", text))


def _without_secret(parameter: re.Match[str]) -> str:
    return f"{parameter[1]}{HIDDEN}" if is_secret_name(parameter[2]) else parameter[0]


def shown_value(name: str, value: object) -> Any:
    """Return the value of a field without its secrets.

    Args:
        name: The field's name.
        value: A plain value, or a container of plain values.
    """
    if value is not None and (name in VARIABLES or is_secret_name(name)):
        return names_only(value)
    if isinstance(value, str):
        return hide_credentials(value)
    if isinstance(value, Mapping):
        return {entry: shown_value(str(entry), inner) for entry, inner in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(shown_value(name, inner) for inner in value)
    return value


def names_only(value: object) -> Any:
    """Return a copy of nested dicts with `HIDDEN` in place of each value."""
    if isinstance(value, Mapping):
        return {name: names_only(entry) for name, entry in value.items()}
    return _Hidden()


class _Hidden:
    def __repr__(self) -> str:
        return HIDDEN


def shown_repr(settings: DataclassInstance) -> str:
    """Return the ``repr`` of a dataclass without its secrets.

    Args:
        settings: The dataclass to show.
    """
    shown = {
        entry.name: shown_value(entry.name, getattr(settings, entry.name)) for entry in dataclasses.fields(settings)
    }
    return f"{type(settings).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def redact(text: str, settings: DataclassInstance) -> str:
    """Hide secrets in another program's text, such as an error message from Ray or a training.

    These are the secrets in a dataclass, and the values of environment variables whose names denote secrets.

    Args:
        text: The other program's text.
        settings: The dataclass with the secrets.
    """
    secrets = [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORT_VARIABLE and is_secret_name(name) and not _PATHS.fullmatch(name)
    ]
    for entry in dataclasses.fields(settings):
        if entry.name in VARIABLES:
            # The values in a runtime environment have names one level further down.
            secrets += _values(getattr(settings, entry.name), "" if entry.name == "runtime_env" else entry.name)
    text = hide_credentials(text)
    for value in sorted(secrets, key=len, reverse=True):  # One secret may begin with another.
        text = text.replace(value, HIDDEN) if len(value) >= _SHORT else text
    return text


def _values(value: object, name: str = "") -> list[str]:
    """Return the values of environment variables in nested containers."""
    if isinstance(value, Mapping):
        return [
            found for key, entry in value.items() for found in _values(entry, name or (key if key in VARIABLES else ""))
        ]
    return [str(value)] if name and value is not None else []


# The functions below check single fields and arguments, with messages that users see.


def check_one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Check that a value is among the allowed ones.

    Args:
        name: Name of the field or argument.
        value: The value to check.
        allowed: The allowed values.

    Raises:
        ValueError: The value is not allowed. The message lists the allowed values.
    """
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not allowed; pass one of {', '.join(map(repr, choices))}")


def check_whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Check that a value is a whole number of at least ``least``.

    Args:
        name: Name of the field or argument.
        value: The value to check.
        least: The smallest number allowed.
        most: The largest number allowed. If None, there is no limit.

    Raises:
        ValueError: The value is not a whole number in this range.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        limit = "" if most is None else f", at most {most:,}"
        raise ValueError(f"{name}={short_repr(value)} is not allowed; pass a whole number of at least {least}{limit}")


def check_type(name: str, value: object, allowed: type | tuple[type, ...], what: str) -> None:
    """Check the type of an argument.

    Args:
        name: Name of the function or argument, for the message.
        value: The value to check.
        allowed: The allowed type or types.
        what: The allowed types as text, or the line to type, for the message.

    Raises:
        ValueError: The value has another type.
    """
    if not isinstance(value, allowed):
        raise ValueError(f"{name} takes {what}; got {type(value).__name__} ({value!r:.60})")


MAX_SECONDS = 10**9
"""The largest time limit allowed (31 years). Python and the operating system cannot wait for arbitrarily long."""


def check_number(
    name: str, value: object, what: str = "a number", *, most: float = sys.float_info.max, zero: bool = False
) -> None:
    """Check that a value is a finite number above 0.

    Args:
        name: Name of the field or argument.
        value: The value to check.
        what: A description of the allowed values, for the message.
        most: The largest number allowed.
        zero: Whether 0 is allowed.

    Raises:
        ValueError: The value is out of range or not a finite number. Bools and strings are not accepted as numbers.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's numbers are Real, too.
    if not (real and 0 <= value <= most and (zero or value > 0)):  # type: ignore[operator]
        limit = f", at most {most:,}" if most < sys.float_info.max else ""
        least = "of at least" if zero else "above"
        raise ValueError(f"{name}={short_repr(value)} is not allowed; pass {what} {least} 0{limit}")


def check_seconds(name: str, value: object, *, most: float = MAX_SECONDS, zero: bool = True, none: str = "") -> None:
    """Check that a value is a number of seconds that every wait accepts.

    Args:
        name: Name of the field or argument.
        value: The value to check.
        most: The largest number allowed.
        zero: Whether 0 is allowed.
        none: The meaning of None, for the message. If "", None is not allowed.

    Raises:
        ValueError: The value is not a number of seconds in this range.
    """
    if value is None and none:
        return
    try:
        check_number(name, value, "seconds", most=most, zero=zero)
    except ValueError as error:
        raise ValueError(f"{error}, or None for {none}" if none else str(error)) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" if a known name is similar to an unknown one, or ""."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def short_repr(value: object) -> str:
    """Return a shortened ``repr`` for a message, or a description of an int that is too large for ``repr``."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, but not a bool.

    Args:
        value: Any value.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_SHOWN_CHARS = 200
"""Maximum number of characters of a path in an error message."""


def given_folder(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder that the user names.

    Args:
        path: The folder; "~" is the user's home.

    Raises:
        ValueError: The path is not valid, or the user after "~" does not exist.
    """
    given = os.fspath(path)
    shown = repr(given if len(given) <= _SHOWN_CHARS else f"{given[:_SHOWN_CHARS]}…")
    try:
        found = Path(given).expanduser().absolute()
        found.lstat()
    except RuntimeError:
        raise ValueError(f"{shown} begins with the home folder of a user who does not exist") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{shown} is not a path, because it contains a name that is too long") from None
    except ValueError:
        raise ValueError(f"{shown} is not a path, because it contains a character that no path can have") from None
    return found
