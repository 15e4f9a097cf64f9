"""A host without a notebook: a command that runs ranks of a run on its machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate import hardware
from notebook_accelerate.errors import LaunchError, RunStoppedError, WorkerError
from notebook_accelerate.hardware.detection import cpu_count
from notebook_accelerate.launch.hosts.host_facts import own_hello
from notebook_accelerate.launch.hosts.joining import FunctionHost, adapt_orders, connect
from notebook_accelerate.launch.hosts.remote import host_protocol as protocol
from notebook_accelerate.launch.hosts.remote.curve_keys import KEEP_ALIVE
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.stream import Stream
    from notebook_accelerate.telemetry import Event
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


def join(
    where: tuple[str, int], secret: str, processes: int = 0, *, seconds: float, show: Callable[[str], None]
) -> None:
    """Run ranks on this machine for the run at an address, until the run is over.

    Args:
        where: Address and port of the run's first notebook.
        secret: The run's secret.
        processes: Ranks to start; 0: as many as the first notebook starts itself.
        seconds: How long to wait for the first notebook to listen.
        show: Called with lines for the user.

    Raises:
        LaunchError: The run refused this host, could not be reached, or was lost.
        RunStoppedError: The run was stopped.
        WorkerError: The run failed.
    """
    hello = own_hello(processes=processes, accelerator=hardware.detect().accelerator)
    show(f"joining the run at {where[0]}:{where[1]}")
    host = CommandHost(connect(where, secret, hello, seconds, KEEP_ALIVE), where[0], show)
    try:
        while (message := host.next_message()) is not None:
            if isinstance(message, protocol.RunOverEvent) and not message.held:
                return _end(message, show)
            host.handle_message(message)
    except (KeyboardInterrupt, SystemExit):
        host.leave("its command was interrupted")
        raise
    finally:
        host.close()
    raise LaunchError(host.refused or f"the first notebook was lost: {host.lost or 'it has left'}")


def _end(over: protocol.RunOverEvent, show: Callable[[str], None]) -> None:
    if over.status == "succeeded":
        show("the run succeeded")
        return
    raise (RunStoppedError if over.status == "stopped" else WorkerError)(over.message or f"the run {over.status}")


class CommandHost(FunctionHost):
    """The host of a command.

    Args:
        stream: The stream to the first notebook.
        address: The first notebook's address.
        show: Called with lines for the user.
    """

    def __init__(self, stream: Stream, address: str, show: Callable[[str], None]) -> None:
        self._address, self._show = address, show
        super().__init__(stream)

    def handle_message(self, message: Event) -> None:
        """See ``Host.handle_message``."""
        if isinstance(message, protocol.WaitingEvent):
            self._show(message.text)
        elif isinstance(message, protocol.RunOverEvent):
            self._show(
                f"{message.message or 'the run failed'}; its ranks are held for the debugger of the first notebook"
            )
        else:
            super().handle_message(message)

    def run_function(self, orders: Sequence[WorkerOrder]) -> None:
        """See ``FunctionHost.run_function``."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdigit() else cpu_count() // len(orders)
        adapt_orders(orders, self._address, max(1, threads))
        attempt = int(orders[0].environment["TORCHELASTIC_RESTART_COUNT"]) + 1
        names = rank_names([order.rank for order in orders])
        self._show(f"attempt {attempt} starts here with {names}" if attempt > 1 else f"starting {names}")
        super().run_function(orders)
        self._show("the ranks of this host have ended")
