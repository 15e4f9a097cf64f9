"""The process of a detached run, which launches the run and exits after its ranks have ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config import environ
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_service import ControlService
from notebook_accelerate.launch.kept.opened_run import open_run
from notebook_accelerate.launch.processes.pickled import PickledFunction
from notebook_accelerate.launch.starting import start_here
from notebook_accelerate.launch.state.interrupts import wait_for
from notebook_accelerate.telemetry import cells, tracebacks
from notebook_accelerate.telemetry.pickling import load_file
from notebook_accelerate.telemetry.tracebacks import install_sources

if TYPE_CHECKING:
    from notebook_accelerate.launch.detached_launch import DetachedOrder
    from notebook_accelerate.launch.run import Run

HELD_SECONDS = 3600
"""How many seconds the ranks of a failed run are held for the debugger while no kernel is attached."""
HELD_VARIABLE = "NOTEBOOK_ACCELERATE_HELD_SECONDS"
"""The environment variable that overrides `HELD_SECONDS`. It is inherited from the launching kernel."""


def main(order: int, payload: int, answer: int, claimed: int) -> None:
    """Launch a run and return when its ranks have finished.

    Args:
        order: The file descriptor of the `DetachedOrder`.
        payload: The file descriptor of the pickled function and arguments.
        answer: The descriptor of the socket to the launching kernel.
        claimed: The descriptor of the claim on the run's name.
    """
    if os.fork():
        os._exit(0)  # The kernel waits only for this process, so the forked one can outlive the kernel.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(claimed, False)
    cells.renew_main()
    DetachedRun(load_file(order), payload, socket.socket(fileno=answer), claimed).main()


class DetachedRun:
    """Launches and supervises one run.

    Args:
        order: What to launch, and how.
        payload: The file descriptor of the pickled function and arguments.
        kernel: The connection to the launching kernel.
        claimed: The descriptor of the claim on the run's name.
    """

    def __init__(self, order: DetachedOrder, payload: int, kernel: socket.socket, claimed: int) -> None:
        self._order, self._payload, self._kernel = order, payload, kernel
        self._claimed: int | None = claimed
        self._service: ControlService | None = None
        self._path, self._held_seconds = Path(), HELD_SECONDS
        self._over = threading.Event()

    def main(self) -> None:
        """Launch the run and wait for it to end."""
        order = self._order
        install_sources(order.sources)
        tracebacks.name_foreign_cells(order.cell_names)
        try:
            self._held_seconds = held_seconds()
            self._path = run_directory.new_socket()
            function = PickledFunction(
                order.function_name, self._payload, order.arguments, order.settings, trains=order.trains
            )
            earlier = None if order.resume is None else open_run(order.resume)
            run = start_here(order.config.changed(panel=False), function, (), earlier, order.inherited, self._serve)
        except BaseException as error:  # noqa: BLE001 - the kernel raises it again
            self._answer({"error": type(error).__name__, "message": str(error)})
            self._end()
            return
        signal.signal(signal.SIGTERM, lambda *_: run.stop(wait=False))
        self._wait(run)
        self._end()

    def _serve(self, run: Run) -> None:
        """Let kernels connect to the run, and send its folder to the launching kernel.

        Raises:
            LaunchError: The run cannot be recorded in the folder that kernels search.
        """
        try:
            self._service = ControlService(run, self._path)
            run_directory.add_entry(run_registry.entry_of(run, self._path, self._order.origin, detached=True))
        except OSError as error:
            raise LaunchError(f"the detached run cannot be recorded for other kernels: {error}") from error
        threading.Thread(target=self._watch_kernel, args=(run,), daemon=True).start()
        self._answer({"folder": str(run.folder)})
        _discard_output()

    def _watch_kernel(self, run: Run) -> None:
        """Stop the run if the launching kernel cancels the launch. If that kernel exits, the run continues."""
        with suppress(OSError):
            if self._kernel.recv(16) == b"cancel":
                run.stop(grace=1.0, wait=False)

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(OSError):
            self._kernel.sendall(json.dumps(answer).encode() + b"\n")

    def _wait(self, run: Run) -> None:
        """Wait for the end of the run. Release held ranks once no kernel has been attached for `_held_seconds`."""
        run.add_done_callback(lambda _: self._over.set())
        wait_for(self._over)
        self._release_name()
        while run.held:
            time.sleep(0.5)
            if self._service is None or self._service.unattended_seconds > self._held_seconds:
                run.stop(grace=1.0)

    def _release_name(self) -> None:
        if self._claimed is not None:
            run_directory.release_name(self._order.name, self._claimed)
            self._claimed = None

    def _end(self) -> None:
        self._release_name()
        if self._service is not None:
            self._service.close()
        run_registry.shutdown()
        sys.stdout.flush()


def held_seconds() -> int:
    """Return how long the ranks of a failed run are held for the debugger while no kernel is attached.

    Raises:
        ValueError: The value of `HELD_VARIABLE` is not a number of seconds.
    """
    seconds = environ.integer(HELD_VARIABLE, HELD_SECONDS)
    if seconds is None or seconds < 0:
        raise ValueError(f"{HELD_VARIABLE}={seconds} must be at least 0 seconds, such as {HELD_SECONDS}")
    return seconds


def _discard_output() -> None:
    """Stop writing to the start-up log, which no one reads after the launch. The run's journal contains its output."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
