"""Loggers that know which rank they run on, and a progress bar that is shown by one rank per machine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from importlib import import_module
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.config import environ
from notebook_accelerate.hardware.versions import is_package
from notebook_accelerate.state import PartialState

# The number of frames between the caller of `info` and the logger. Python 3.11 and later do not count the frames of the
# logging module.
_STACKLEVEL = 2 if sys.version_info >= (3, 11) else 3


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that emits records on the main process only, on all ranks, or on all ranks in order.

    Each method accepts two additional keywords: ``main_process_only`` (True by default) and ``in_order`` (False by
    default). With ``in_order``, ranks log one after the other, and every rank must call the method.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._warned: set[str] = set()

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: The level of the message.
            msg: The message, which may have placeholders.
            args: The values for the placeholders.
            kwargs: ``main_process_only``, ``in_order``, and keyword arguments for ``logging.Logger.log``.

        Raises:
            RuntimeError: No Accelerator or PartialState exists yet.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not PartialState._shared_state:
            raise RuntimeError(
                f"logger {self.logger.name!r} does not know its rank yet: create an Accelerator() or a PartialState() "
                "before logging"
            )
        if "stacklevel" not in kwargs:
            through_logging = sys._getframe(1).f_globals.get("__name__") == "logging"
            kwargs["stacklevel"] = _STACKLEVEL if through_logging else 2
        if in_order and not main_process_only:
            self._log_in_order(level, msg, args, kwargs)
        elif self.isEnabledFor(level) and self._should_log(main_process_only):
            self._log_now(level, msg, args, kwargs)

    def _log_in_order(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = PartialState()
        kwargs["stacklevel"] += 1
        for index in range(state.num_processes):
            if index == state.process_index and self.isEnabledFor(level):
                self._log_now(level, msg, args, kwargs)
            state.wait_for_everyone()

    def _log_now(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        msg, rest = self.process(msg, kwargs)
        rest["stacklevel"] += 1
        self.logger.log(level, msg, *args, **rest)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix a message with this process's rank.

        Args:
            msg: The message to prefix.
            kwargs: The keyword arguments of the call.

        Returns:
            The message with its prefix, and the keyword arguments.
        """
        msg, rest = super().process(msg, dict(kwargs))
        return f"[RANK {PartialState().process_index}] {msg}", rest

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless this logger has logged the same warning before.

        Args:
            args: Positional arguments for ``warning``.
            kwargs: Keyword arguments for ``warning``.
        """
        key = repr((args, sorted(kwargs.items())))
        if key not in self._warned:
            self._warned.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", _STACKLEVEL) + 1
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that knows which rank it runs on.

    Args:
        name: The name of the logger, usually ``__name__``.
        log_level: The level for this logger and the root logger, such as "INFO". None means the value of
            ACCELERATE_LOG_LEVEL or, if it is not set, no change.

    Returns:
        The logger, which can log once an Accelerator or a PartialState exists.
    """
    level = log_level or environ.text("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Create a tqdm progress bar that is shown by the first rank on each machine.

    Args:
        args: Positional arguments for ``tqdm.tqdm``.
        main_process_only: Whether the bar is only shown by that rank. If False, every rank shows one.
        kwargs: Keyword arguments for ``tqdm.tqdm``.

    Returns:
        The progress bar. In a launched run, its progress is also shown in the run's panels.

    Raises:
        ImportError: tqdm is not installed.
        ValueError: The first argument is a bool, which was Accelerate's old way to pass main_process_only.
    """
    if not is_package("tqdm"):
        raise ImportError("tqdm is not installed: pip install tqdm")
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...) is not allowed; pass main_process_only={args[0]} as a keyword")
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    # A rank has no front end, so it draws bars as text. Each bar that is drawn is also reported.
    module = "tqdm.auto" if telemetry.current_sink() is None else "tqdm.std"
    return import_module(module).tqdm(*args, **kwargs)
