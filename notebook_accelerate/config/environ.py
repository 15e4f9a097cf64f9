"""Reads and writes the ACCELERATE_* variables and the launchers' rank variables, for all other modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

PREFIX = "ACCELERATE_"
_TRUE = frozenset(("1", "true", "yes", "on", "y", "t"))
_FALSE = frozenset(("0", "false", "no", "off", "n", "f"))
KERNEL_ONLY = ("NOTEBOOK_ACCELERATE_SECRET", "JPY_PARENT_PID", "JPY_SESSION_NAME")
"""Variables that the kernel does not pass on to the processes that it starts."""

STORE = "NOTEBOOK_ACCELERATE_STORE"
"""Set in ranks that one launch started on one machine: the private folder for the stores of their process groups."""

CORES = "NOTEBOOK_ACCELERATE_CORES"
"""Set in ranks on the CPU that have cores of their own: the numbers of these cores, such as "0,3"."""

AFFINITY = "ACCELERATE_CPU_AFFINITY"
"""Accelerate's variable that binds each rank to the cores near its GPU."""

RESUMED = "NOTEBOOK_ACCELERATE_RESUMED"
"""Set in ranks that continue the training of an earlier run: the checkpoint to load."""

SERVED_STORE = "NOTEBOOK_ACCELERATE_SERVED_STORE"
"""Set in rank 0 of a run on several machines: the address and port at which it serves the process groups' store."""

_Value = TypeVar("_Value")
_ignored: ContextVar[bool] = ContextVar("ignored", default=False)


@contextmanager
def ignored() -> Iterator[None]:
    """Make the functions that read variables return defaults inside a with block, in this thread or task only."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def _get(name: str) -> str:
    return "" if _ignored.get() else os.environ.get(name, "").strip()


def parse_flag(value: str) -> bool:
    """Parse a truth value.

    Args:
        value: 1, true, yes, on, y or t for True, or 0, false, no, off, n or f for False, in upper or lower case.

    Returns:
        The truth value as a bool.

    Raises:
        ValueError: ``value`` is not one of these.
    """
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{value!r} is not a truth value; allowed: 1, true, yes, on, 0, false, no, off")


def flag(name: str, default: bool = False) -> bool:
    """Return the variable ``name`` as a truth value, or ``default`` if it is unset or empty.

    Raises:
        ValueError: The variable is not a truth value.
    """
    value = _get(name)
    if not value:
        return default
    try:
        return parse_flag(value)
    except ValueError as error:
        raise ValueError(f"environment variable {name}: {error}") from None


def text(name: str, default: str | None = None) -> str | None:
    """Return the variable ``name``, or ``default`` if it is unset or empty."""
    return _get(name) or default


def integer(name: str, default: int | None = None) -> int | None:
    """Return the variable ``name`` as a whole number, or ``default`` if it is unset or empty.

    Raises:
        ValueError: The variable is not a whole number.
    """
    return _converted(name, int, "a whole number", default)


def number(name: str, default: float | None = None) -> float | None:
    """Return the variable ``name`` as a number, or ``default`` if it is unset or empty.

    Raises:
        ValueError: The variable is not a number.
    """
    return _converted(name, float, "a number", default)


def _converted(name: str, convert: Callable[[str], _Value], kind: str, default: _Value | None) -> _Value | None:
    value = _get(name)
    if not value:
        return default
    try:
        return convert(value)
    except ValueError:
        raise ValueError(f"environment variable {name}={value!r} is not {kind}") from None


def choice(name: str, allowed: Sequence[str], default: str | None = None) -> str | None:
    """Return the variable ``name`` in lower case, or ``default`` if it is unset or empty.

    Raises:
        ValueError: The variable is not one of ``allowed``.
    """
    value = _get(name).lower()
    if not value:
        return default
    if value not in allowed:
        raise ValueError(f"environment variable {name}={value!r} is not allowed; allowed: {', '.join(allowed)}")
    return value


def set_variables(values: Mapping[str, Any]) -> None:
    """Set variables for this process and its children. A value of None removes the variable.

    Args:
        values: Values by exact name. Numbers and enums become text, and True and False become "true" and "false".
    """
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = as_text(value)


def as_text(value: Any) -> str:
    """Return ``value`` as the text of a variable: true and false in lower case, enums by value."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "value", value))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Parse a truth value as a number.

    Args:
        value: A string that `parse_flag` accepts, or a bool.
        to_bool: Whether to return True or False instead of 1 or 0.

    Returns:
        1 or 0, or True or False if ``to_bool`` is True.

    Raises:
        ValueError: ``value`` is not a truth value.
    """
    parsed = parse_flag(str(value))
    return parsed if to_bool else int(parsed)


def flag_text(text: str) -> str:
    """Check that ``text`` is a truth value. Return it unchanged, as Accelerate does."""
    parse_flag(text)
    return text


def flags_text(text: str) -> tuple[int, ...]:
    """Convert "true,false,true" to integers, because Accelerate passes on 1 and 0."""
    return tuple(map(str_to_bool, text.split(",")))


def assignments(text: str) -> dict[str, str]:
    """Convert "name=value,name=value" to a dict. Parts without "=" are ignored."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the number in the first of several variables that holds a number of at least 0.

    Args:
        env_keys: The names of the variables, with the preferred one first.
        default: The value if no variable holds such a number.

    Returns:
        That number, or ``default``.
    """
    names = [env_keys] if isinstance(env_keys, str) else env_keys
    for name in names:
        number = integer(name, -1)
        if number is not None and number >= 0:
            return number
    return default


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a with block, and restore the earlier values afterwards, even after an error.

    Args:
        **kwargs: Values by name. Names are converted to upper case, and values to text.

    Examples:
        >>> with patch_environment(foo="bar"):
        ...     os.environ["FOO"]
        'bar'
    """
    names = [name.upper() for name in kwargs]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def inheritable() -> dict[str, str]:
    """Return this process's environment without the variables in `KERNEL_ONLY`."""
    return {name: value for name, value in os.environ.items() if name not in KERNEL_ONLY}


def worker_variables(*, mixed_precision: str, cpu: bool) -> dict[str, str]:
    """Return the ACCELERATE_* variables that give a rank the launch's settings."""
    values = {"ACCELERATE_MIXED_PRECISION": mixed_precision, "FORK_LAUNCHED": "1"}
    if cpu:
        values["ACCELERATE_USE_CPU"] = "True"
    return values
