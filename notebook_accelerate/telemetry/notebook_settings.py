"""The notebook's warning filters and logging setup, for ranks that are not forked from the kernel.

They are applied before the rank loads its function, whose imports may warn, and again afterwards, because libraries set
up their loggers and filters when they are imported.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import SerializationError
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes

_NOT_CARRIED = ("lock", "stream")
"""Attributes of handlers that belong to one process."""
_STREAMS = ("stdout", "stderr")
_MAX_HANDLER_BYTES = 1 << 20
"""Larger handlers, such as those that keep records in memory, are sent without their own attributes."""


@dataclass
class LoggerSettings:
    """The settings of a logger.

    Attributes:
        level: Its level.
        propagate: Whether its records reach the loggers above it.
        disabled: Whether it drops its records.
        handlers: Its handlers, each pickled.
        imported: Whether it has the name of a module that the kernel has imported, which may add its handlers itself.
    """

    level: int
    propagate: bool
    disabled: bool
    handlers: list[bytes] = field(default_factory=list)
    imported: bool = False


@dataclass
class NotebookSettings:
    """What the cells of a notebook have set for all modules.

    Attributes:
        filters: Action, message, category by module and name, module and line of each warning filter, in their order.
        warnings_logged: Whether warnings are written to the log.
        disabled_level: The level up to which all logging is disabled.
        loggers: By name; "" for the root logger.
    """

    filters: list[tuple[str, str, tuple[str, str], str, int]]
    warnings_logged: bool
    disabled_level: int
    loggers: dict[str, LoggerSettings]


# ---- in the kernel


def capture() -> bytes:
    """Return the settings of this process, pickled. Handlers that cannot be pickled write to standard error instead."""
    loggers: dict[str, LoggerSettings] = {"": _logger_settings("", logging.root)}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            settings = _logger_settings(name, logger)
            if settings != LoggerSettings(logging.NOTSET, propagate=True, disabled=False, imported=settings.imported):
                loggers[name] = settings
    logged = getattr(warnings.showwarning, "__module__", "") == "logging"
    found = NotebookSettings(_filters(), logged, logging.root.manager.disable, loggers)
    return dump_bytes(found, "the logging setup", "launch")


def _logger_settings(name: str, logger: logging.Logger) -> LoggerSettings:
    return LoggerSettings(
        logger.level,
        bool(logger.propagate),
        logger.disabled,
        [_pickled_or_plain(handler) for handler in logger.handlers if _writes(handler)],
        name.partition(".")[0] in sys.modules,
    )


def _writes(handler: logging.Handler) -> bool:
    """Return whether a handler's output is visible outside the rank. A StringIO's is not."""
    stream = getattr(handler, "__dict__", {}).get("stream")
    return type(handler) is not logging.NullHandler and (not isinstance(stream, StringIO) or bool(_stream_name(stream)))


def _pickled_or_plain(handler: logging.Handler) -> bytes:
    try:
        return _pickled_handler(handler)
    except Exception:  # noqa: BLE001 - handlers and streams of the user, which may lack the usual attributes
        plain: dict[str, Any] = {"_name": None, "level": logging.NOTSET, "formatter": None, "filters": []}
        return dump_bytes((logging.StreamHandler, plain, "stderr"), "a logging handler", "launch")


def _pickled_handler(handler: logging.Handler) -> bytes:
    stream = _stream_name(vars(handler).get("stream"))
    kept = {name: value for name, value in vars(handler).items() if name not in _NOT_CARRIED}
    common = {name: kept.get(name) for name in ("_name", "level", "formatter", "filters")}
    plain: dict[str, Any] = {"_name": None, "level": handler.level, "formatter": None, "filters": []}
    ours = isinstance(handler, logging.FileHandler) or stream or "stream" not in vars(handler)
    choices = [(type(handler), kept, stream)] if ours else []
    choices += [(logging.StreamHandler, common, stream or "stderr"), (logging.StreamHandler, plain, stream or "stderr")]
    for choice in choices:
        with suppress(SerializationError):
            data = dump_bytes(choice, "a logging handler", "launch")
            if len(data) <= _MAX_HANDLER_BYTES:
                return data
    raise AssertionError("levels can be pickled")


def _stream_name(stream: Any) -> str:
    """Return "stdout" or "stderr" for a standard stream of this process, or of its notebook; "" for others."""
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


def apply(data: bytes) -> None:
    """Set up this process as ``capture`` found another one; calling it again keeps handlers that exist."""
    settings: NotebookSettings = load_bytes(data)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(settings.filters):
        warnings.filterwarnings(action, message, _category(*category), module, line)  # type: ignore[arg-type]
    logging.captureWarnings(settings.warnings_logged)
    logging.disable(settings.disabled_level)
    for name, found in settings.loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(found.level)
        logger.propagate, logger.disabled = found.propagate, found.disabled
        if not name or not found.imported or name.partition(".")[0] in sys.modules:
            _set_handlers(logger, found)


class _CategoryByName(type):
    """A warning category whose module is not imported: importing IPython's and torch's takes a quarter of a second."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        name = cls.__module__, cls.__qualname__
        return any((base.__module__, base.__qualname__) == name for base in subclass.__mro__)


def _category(module: str, name: str) -> type[Warning]:
    """Return a category, or a placeholder if its module has not been imported."""
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


def _handler(data: bytes) -> logging.Handler:
    try:
        kind, attributes, stream = load_bytes(data)
    except Exception:  # noqa: BLE001 - its class needs a module that this machine does not have
        return logging.StreamHandler()
    file = attributes.get("baseFilename")
    if file is not None and not Path(file).parent.is_dir():  # on another machine
        return logging.StreamHandler()
    handler: Any = kind.__new__(kind)
    vars(handler).update(attributes)
    handler.createLock()
    if file is not None:
        handler.stream, handler.mode = None, "a"  # opened with the first record
    elif stream:
        handler.stream = getattr(sys, stream)
    return handler  # type: ignore[no-any-return]


__all__ = ["apply", "capture"]
