"""The notebook's warning filters and logging setup, for ranks that are not forked from the kernel.

The settings are applied before the rank loads its function, because the function's imports may warn, and again
afterwards, because libraries set up their loggers and filters when they are imported.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.tracebacks import describe_error

_NOT_CARRIED = ("lock", "stream")
"""Attributes of handlers that cannot be carried to another process."""
_STREAMS = ("stdout", "stderr")
_MAX_BYTES = 1_000_000
"""Maximum size of a pickle. A larger handler, such as one that keeps records, is sent without its attributes.

A larger filter or formatter is not sent.
"""


def _set_formatwarning(value: Any) -> None:
    warnings.formatwarning = value


def _set_showwarning(value: Any) -> None:
    warnings.showwarning = value


_HOOKS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    # The logger class must come first, because applying the settings creates loggers.
    "the logger class": (logging.getLoggerClass, logging.setLoggerClass),
    "the log record factory": (logging.getLogRecordFactory, logging.setLogRecordFactory),
    "warnings.formatwarning": (lambda: warnings.formatwarning, _set_formatwarning),
    "warnings.showwarning": (lambda: warnings.showwarning, _set_showwarning),
}
"""The getter and the setter of each function or class that a notebook can replace for all modules."""


@dataclass
class LoggerSettings:
    """The settings of a logger.

    Attributes:
        level: The logger's level.
        propagate: Whether its records are passed to the loggers above it.
        disabled: Whether it drops its records.
        handlers: Its handlers, each pickled.
        filters: Its filters, each pickled, without those that its library adds.
        imported: Whether the logger is named after a module that the kernel has imported. Such a module may add the
            handlers itself.
    """

    level: int
    propagate: bool
    disabled: bool
    handlers: list[bytes] = field(default_factory=list)
    filters: list[bytes] = field(default_factory=list)
    imported: bool = False


@dataclass
class NotebookSettings:
    """Settings that the cells of a notebook have made for all modules.

    Attributes:
        filters: Action, message, category (by module and name), module and line of each warning filter, in order.
        warnings_logged: Whether warnings are written to the log (``logging.captureWarnings``).
        disabled_level: The level up to which all logging is disabled.
        raises: Whether errors in handlers are printed (``logging.raiseExceptions``).
        level_names: The name of each level.
        loggers: The settings of each logger, by name ("" for the root logger).
        hooks: The pickled values for `_HOOKS`, by name.
    """

    filters: list[tuple[str, str, tuple[str, str], str, int]]
    warnings_logged: bool
    disabled_level: int
    raises: bool
    level_names: dict[int, str]
    loggers: dict[str, LoggerSettings]
    hooks: dict[str, bytes]


# ---- in the kernel


def capture_notebook_settings() -> bytes:
    """Return the pickled settings of this process. Handlers that cannot be pickled write to standard error instead.

    A warning names the filters, formatters and hooks that cannot be pickled.
    """
    loggers: dict[str, LoggerSettings] = {"": _logger_settings("", logging.root)}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            settings = _logger_settings(name, logger)
            if settings != LoggerSettings(logging.NOTSET, propagate=True, disabled=False, imported=settings.imported):
                loggers[name] = settings
    found = NotebookSettings(
        _filters(),
        getattr(warnings.showwarning, "__module__", "") == "logging",
        logging.root.manager.disable,
        logging.raiseExceptions,
        dict(logging._levelToName),
        loggers,
        _hooks(),
    )
    return dump_bytes(found, "the logging setup", "launch")


def _hooks() -> dict[str, bytes]:
    found = {}
    for name, (get, _) in _HOOKS.items():
        value = get()
        if getattr(value, "__module__", "") not in ("logging", "warnings"):
            found[name] = _pickled(value, name)
    return {name: data for name, data in found.items() if data}


def _logger_settings(name: str, logger: logging.Logger) -> LoggerSettings:
    place = f"the logger {name!r}" if name else "the root logger"
    imported = name.partition(".")[0] in sys.modules
    return LoggerSettings(
        logger.level,
        bool(logger.propagate),
        logger.disabled,
        [_pickled_or_plain(handler, place) for handler in logger.handlers if _writes(handler)],
        _pickled_filters([each for each in logger.filters if not (imported and _root(each) == _root(logger))], place),
        imported,
    )


def _root(value: Any) -> str:
    """Return the top-level package that a logger is named after, or that defines a filter."""
    if isinstance(value, logging.Logger):
        return value.name.partition(".")[0]
    module = (value if isinstance(value, FunctionType) else type(value)).__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def _writes(handler: logging.Handler) -> bool:
    """Return whether a handler's output is visible outside the rank. Output to a StringIO, for example, is not."""
    if isinstance(handler, logging.NullHandler):
        return False
    stream = getattr(handler, "__dict__", {}).get("stream")
    return not isinstance(stream, StringIO) or bool(_stream_name(stream))


def _pickled_filters(filters: Sequence[Any], place: str) -> list[bytes]:
    found = [_pickled(each, f"the filter {_name(each)} of {place}") for each in filters]
    return [data for data in found if data]


def _name(value: Any) -> str:
    return value.__qualname__ if isinstance(value, (FunctionType, type)) else type(value).__qualname__


_warned: set[str] = set()


def _pickled(value: Any, what: str) -> bytes:
    """Return a pickled value, or b"" if it cannot be pickled. Warn about each value only once."""
    try:
        # Include the id, so that equal handlers and filters of different loggers remain separate objects.
        data = dump_bytes((id(value), value), "it", "launch")
        reason = f"it has more than {size_text(_MAX_BYTES)}" if len(data) > _MAX_BYTES else ""
    except Exception as error:  # noqa: BLE001 - the user's classes may raise any error
        data, reason = b"", str(error)
    if not reason:
        return data
    if what not in _warned:
        _warned.add(what)
        text = (
            f"ranks that are not forked from the kernel log without {what}: {reason}. Set it in the function too, or "
            "launch with start_method='fork'"
        )
        with suppress(Warning):  # If the user has turned warnings into errors, this one must not end the launch.
            warnings.warn_explicit(text, UserWarning, "notebook_accelerate", 0, registry={})
    return b""


def _pickled_or_plain(handler: logging.Handler, place: str) -> bytes:
    try:
        return _pickled_handler(handler, f"the {_name(handler)} of {place}")
    except Exception:  # noqa: BLE001 - the user's handlers and streams may lack the usual attributes
        plain: dict[str, Any] = {"_name": None, "level": logging.NOTSET, "formatter": None}
        return dump_bytes((logging.StreamHandler, plain, "stderr", [], id(handler)), "a logging handler", "launch")


def _pickled_handler(handler: logging.Handler, place: str) -> bytes:
    stream = _stream_name(vars(handler).get("stream"))
    kept = {name: value for name, value in vars(handler).items() if name not in _NOT_CARRIED}
    filters = _pickled_filters(kept.pop("filters", ()), place)
    plain: dict[str, Any] = {"_name": None, "level": handler.level, "formatter": None}
    common = {name: kept.get(name) for name in plain}
    ours = isinstance(handler, logging.FileHandler) or stream or "stream" not in vars(handler)
    choices = [(type(handler), kept, stream, filters, id(handler))] if ours else []
    choices += [(logging.StreamHandler, common, stream or "stderr", filters, id(handler))]
    for choice in choices:
        with suppress(SerializationError):
            data = dump_bytes(choice, "a logging handler", "launch")
            if len(data) <= _MAX_BYTES:
                return data
    _pickled(handler.formatter, f"the formatter {_name(handler.formatter)} of {place}")  # Only issue the warning.
    plainest = (logging.StreamHandler, plain, stream or "stderr", filters, id(handler))
    return dump_bytes(plainest, "a logging handler", "launch")


def _stream_name(stream: Any) -> str:
    """Return "stdout" or "stderr" for a standard stream of this process or its notebook, or "" for others."""
    for name in _STREAMS:
        if stream is not None and (stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__")):
            return name
    if not type(stream).__module__.startswith("ipykernel"):
        return ""
    name = getattr(stream, "name", "")
    return name if name in _STREAMS else ""


def _filters() -> list[tuple[str, str, tuple[str, str], str, int]]:
    return [
        (action, _pattern(message), (each.__module__, each.__qualname__), _pattern(module), line)
        for action, message, category, module, line in warnings.filters
        for each in (category if isinstance(category, tuple) else (category,))
    ]


def _pattern(pattern: Any) -> str:
    if pattern is None:
        return ""
    return str(pattern.pattern) if isinstance(pattern, re.Pattern) else re.escape(str(pattern)) + r"\Z"


# ---- in the rank


def apply_notebook_settings(data: bytes) -> None:
    """Apply settings that were captured in another process to this one.

    A second call keeps the handlers that already exist.
    """
    settings: NotebookSettings = load_bytes(data)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(settings.filters):
        warnings.filterwarnings(action, message, _category(*category), module, line)  # type: ignore[arg-type]
    logging.captureWarnings(settings.warnings_logged)
    logging.disable(settings.disabled_level)
    logging.raiseExceptions = settings.raises
    for level, name in settings.level_names.items():
        logging.addLevelName(level, name)
    for name, hook in settings.hooks.items():
        if (value := _loaded(hook)) is not None:
            _HOOKS[name][1](value)
    for name, found in settings.loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(found.level)
        logger.propagate, logger.disabled = found.propagate, found.disabled
        _add_filters(logger, found.filters)
        if not name or not found.imported or name.partition(".")[0] in sys.modules:
            _set_handlers(logger, found)


@cache
def _loaded(data: bytes) -> Any:
    """Load a pickled value, or return None if that fails. A second call in the same rank returns the same object."""
    try:
        return load_bytes(data)[1]
    except Exception as error:  # noqa: BLE001 - its class may need a module that this machine does not have
        sys.stderr.write(f"A part of the notebook's logging setup is missing here: {describe_error(error)}\n")
        return None


def _add_filters(owner: logging.Filterer, filters: Sequence[bytes]) -> None:
    for data in filters:
        if (value := _loaded(data)) is not None:
            owner.addFilter(value)


class _CategoryByName(type):
    """A warning category whose module is not imported, because importing IPython and torch takes 0.25 s."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        name = cls.__module__, cls.__qualname__
        return any((base.__module__, base.__qualname__) == name for base in subclass.__mro__)


def _category(module: str, name: str) -> type[Warning]:
    """Return a warning category, or a placeholder for it if its module has not been imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Warning):
        return found
    made: Any = _CategoryByName(name, (Warning,), {"__module__": module, "__qualname__": name})
    return made  # type: ignore[no-any-return]


def _set_handlers(logger: logging.Logger, found: LoggerSettings) -> None:
    if logger is logging.root or not logger.handlers:
        logger.handlers[:] = [_handler(data) for data in found.handlers]


@cache
def _handler(data: bytes) -> logging.Handler:
    try:
        kind, attributes, stream, filters, _ = load_bytes(data)
    except Exception:  # noqa: BLE001 - its class may need a module that this machine does not have
        return logging.StreamHandler()
    file = attributes.get("baseFilename")
    handler: Any = logging.StreamHandler()
    if file is None or Path(file).parent.is_dir():  # The file may be on another machine.
        handler = kind.__new__(kind)
        vars(handler).update(attributes, filters=[])
        handler.createLock()
        if file is not None:
            handler.stream, handler.mode = None, "a"  # The file is opened with the first record.
        elif stream:
            handler.stream = getattr(sys, stream)
    _add_filters(handler, filters)
    return handler  # type: ignore[no-any-return]
