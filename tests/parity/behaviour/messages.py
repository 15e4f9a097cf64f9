"""Records the warnings of the package, and what it logs through Accelerate's loggers."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = ("accelerate", "notebook_accelerate")
# Modules that are between the statement and the recorder.
_PASSED = ("warnings", "logging", "tests.parity.behaviour.programs._parts", *(f"{name}.logging" for name in _PACKAGES))


class _Recorder(logging.Handler):
    """Records messages of the package: the level or the category, and the position of the statement.

    Warnings of torch that the package causes are not recorded.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.levelname)

    def showwarning(self, message: Warning | str, category: type[Warning], *place: object) -> None:
        self._add(category.__name__)

    def _add(self, kind: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED:
            frame = frame.f_back
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES:
            self.messages.append((kind, f"{frame.f_code.co_filename.rpartition('accelerate/')[2]}:{frame.f_lineno}"))


@contextmanager
def recorded_messages() -> Iterator[list[tuple[str, str]]]:
    """Record the kinds and positions of messages, in their order, even of those that filters would hide."""
    recorder = _Recorder()
    logger = logging.getLogger("accelerate")
    logger.addHandler(recorder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = recorder.showwarning
            yield recorder.messages
    finally:
        logger.removeHandler(recorder)
