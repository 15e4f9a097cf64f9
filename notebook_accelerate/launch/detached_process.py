"""The process of a detached run: it launches the run, and lives as long as its ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_service import ControlService
from notebook_accelerate.launch.detached.run_directory import DetachedEntry
from notebook_accelerate.launch.kept.opened_run import open_run
from notebook_accelerate.launch.processes.pickled_start import PickledFunction
from notebook_accelerate.launch.start import start_here
from notebook_accelerate.launch.state.waits import wait_for
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.cell_sources import install_sources
from notebook_accelerate.telemetry.pickling import load_file

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.run import Run

HELD_SECONDS = 3600.0
"""Seconds that the ranks of a failed run are held for the debugger while no kernel is attached."""


def main(order: int, payload: int, answer: int) -> None:
    """Launch a run and return when its ranks have ended.

    Args:
        order: Descriptor of the file with what to launch; see ``attaching.launch_detached``.
        payload: Descriptor of the file with the function and its arguments.
        answer: Descriptor of the socket to the kernel that launches it.
    """
    if os.fork():
        os._exit(0)  # the kernel waits for this process; the other one is nobody's child
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    DetachedRun(load_file(order), payload, socket.socket(fileno=answer)).main()


class DetachedRun:
    """Supervises one run.

    Args:
        order: What to launch.
        payload: Descriptor of the function and its arguments.
        kernel: The connection to the kernel that launches it.
    """

    def __init__(self, order: dict[str, Any], payload: int, kernel: socket.socket) -> None:
        self._order, self._payload, self._kernel = order, payload, kernel
        self._service: ControlService | None = None
        self._path = Path()
        self._over = threading.Event()

    def main(self) -> None:
        """Launch the run, and wait for its end."""
        order = self._order
        config: LaunchConfig = order["config"]
        install_sources(order["sources"])
        tracebacks.name_foreign_cells(order["names"])
        run_registry.watch(self._begun)
        try:
            self._path = run_directory.new_socket()
            function = PickledFunction(order["function"], self._payload, order["arguments"])
            earlier = None if order["resume"] is None else open_run(order["resume"])
            run = start_here(config.changed(panel=False), function, (), earlier)
        except BaseException as error:  # noqa: BLE001 - the kernel raises it again
            self._tell({"error": type(error).__name__, "message": str(error)})
            self._end()
            return
        signal.signal(signal.SIGTERM, lambda *_: run.request_stop())
        self._wait(run)
        self._end()

    def _begun(self, run: Run) -> None:
        """Serve kernels from now on, and tell the one that launches the run; called before its ranks start."""
        try:
            self._service = ControlService(run, self._path)
            place, origin = (str(run.folder), str(self._path)), self._order["origin"]
            run_directory.add(DetachedEntry(run.name, *place, run.started, asdict(this_process()), origin))
        except OSError as error:
            self._tell({"error": "LaunchError", "message": f"the detached run cannot be found later: {error}"})
            run.request_stop(grace=0.0)
            return
        threading.Thread(target=self._watch_kernel, args=(run,), daemon=True).start()
        self._tell({"folder": str(run.folder)})

    def _watch_kernel(self, run: Run) -> None:
        """Stop the run where its launch is interrupted; that kernel may also end, or be done."""
        with suppress(OSError):
            if self._kernel.recv(16) == b"cancel":
                run.request_stop(grace=1.0)

    def _tell(self, answer: dict[str, Any]) -> None:
        with suppress(OSError):
            self._kernel.sendall(json.dumps(answer).encode() + b"\n")

    def _wait(self, run: Run) -> None:
        """Wait for the end of the run, and as long as a kernel uses ranks that are held after a failure."""
        run.add_done_callback(lambda _: self._over.set())
        wait_for(self._over)
        while run.held:
            time.sleep(0.5)
            if self._service is None or self._service.unattended_seconds > HELD_SECONDS:
                run.stop(grace=1.0)

    def _end(self) -> None:
        if self._service is not None:
            self._service.close()
        run_registry.shutdown()
        sys.stdout.flush()


__all__ = ["main"]
