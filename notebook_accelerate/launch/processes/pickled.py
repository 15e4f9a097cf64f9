"""Pickle a launch's function and arguments once for all ranks that do not inherit the kernel's memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.launch.processes.interpreters import (
    working_directory,
)
from notebook_accelerate.launch.processes.orphan_guard import own_mark
from notebook_accelerate.launch.processes.rank_process import ProcessBackend
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.notebook_settings import capture_notebook_settings
from notebook_accelerate.telemetry.pickling import dump, dump_bytes, load_file
from notebook_accelerate.telemetry.tracebacks import cell_sources

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.call_arguments import Plain
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class PickledFunction:
    """A function and its arguments that another process has pickled. Only the ranks load them.

    Args:
        name: The function's name, as the run shows it.
        payload: The descriptor of the file with the pickled data.
        arguments: The function's arguments by name, as plain values.
        settings: The settings of the other process, from ``capture_notebook_settings``.
        trains: Whether the function probably trains a model; see ``shared_imports.trains``.
    """

    def __init__(
        self, name: str, payload: int, arguments: Mapping[str, Plain], settings: bytes, *, trains: bool
    ) -> None:
        self.__name__ = name
        self.payload, self.plain_arguments, self.settings, self.trains = payload, arguments, settings, trains

    def __call__(self) -> Any:
        """Load the function and call it."""
        function, arguments = load_file(os.dup(self.payload))
        return function(*arguments)


def to_file(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Pickle a function and its arguments. Return the descriptor of the file, which the caller owns.

    Raises:
        SerializationError: The function or its arguments cannot be pickled.
    """
    if isinstance(function, PickledFunction):
        return os.dup(function.payload)
    return dump((function, arguments), "the function or its arguments").to_file()


class PickledBackend(ProcessBackend):
    """Base of the start methods that do not fork the kernel. Ranks read the function and its arguments from a file."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(function, arguments)
        self._payload = to_file(function, arguments)
        self._sources = cell_sources()
        self._settings = function.settings if isinstance(function, PickledFunction) else capture_notebook_settings()

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Add to an order what a rank forked from the kernel would inherit."""
        order.base_environment = inheritable()
        folder = working_directory()
        order.cwd = None if folder is None else str(folder)
        order.sys_path = list(sys.path)
        order.time_offset = steady_time.offset()
        order.sources = self._sources
        order.notebook_settings = self._settings
        order.mark = own_mark()
        if order.accelerator:
            order.accelerator = dump_bytes(order.accelerator, "LaunchConfig's accelerator", "launch")
        return order

    def close(self) -> None:
        super().close()
        os.close(self._payload)
