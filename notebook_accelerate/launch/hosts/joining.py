"""What hosts do that join a run: connect to the first notebook, and run the ranks that it orders."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.errors import AuthenticationError, LaunchError, RunStoppedError
from notebook_accelerate.hardware.addresses import interface_of, own_address
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_protocol import COMMAND, FunctionEvent, HelloEvent, StartOrder
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel
from notebook_accelerate.launch.processes.placed import PlacedBackend, adapt_to_machine
from notebook_accelerate.telemetry.pickling import anonymous_file

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.stream import Stream
    from notebook_accelerate.telemetry import Event
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

RETRY_SECONDS = 0.3
"""Seconds between two tries to reach the first notebook, which may not have begun to listen."""
SURE_SECONDS = 2.0
"""Seconds after which an error that another try has not changed is final: a wrong secret, which an earlier run at the
same port has too until it ends, and an unknown name. A first notebook that is killed refuses only once."""
UNKNOWN_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}
"""Errors of the resolver that are no temporary failures, as `EAI_AGAIN` is."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def connect(
    where: tuple[str, int],
    secret: str,
    hello: HelloEvent,
    seconds: float,
    keep_alive: tuple[float, float],
    stopping: Callable[[], bool] = lambda: False,
) -> Stream:
    """Connect to the first notebook, trying again until it listens.

    Args:
        where: Address and port of its listener.
        secret: The run's secret.
        hello: What this host tells about itself.
        seconds: How long to try.
        keep_alive: Seconds between two keep-alives, and those without one after which the other end is lost.
        stopping: Returns whether to give up.

    Raises:
        LaunchError: The first notebook has another secret, has no known address, or does not listen.
        RunStoppedError: The run is ``stopping``.
    """
    address, port = where
    begin = time.monotonic()
    deadline = begin + seconds
    final = ""
    while True:
        problem: Exception = ConnectionResetError("it ended")
        try:
            stream = connect_to_kernel(address, port, secret.encode(), hello, keep_alive, stopping)
            if _answers(stream, deadline, stopping):
                return stream
        except (AuthenticationError, OSError, UnicodeError) as error:  # UnicodeError: not a name
            before, final = final, _final_text(error, where, hello)
            if final and final == before and time.monotonic() > begin + SURE_SECONDS:
                raise LaunchError(final) from None
            problem = error
        if stopping():
            raise RunStoppedError("the run was stopped before all nodes had joined")
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 did not join within {seconds:g} s: no run answers at {address}:{port} ({problem})"
            )
        time.sleep(RETRY_SECONDS)


def _final_text(error: Exception, where: tuple[str, int], hello: HelloEvent) -> str:
    """Return the message of an error that another try is unlikely to change; "" for others."""
    address, port = where
    if isinstance(error, AuthenticationError):
        return f"the run at {address}:{port} has another secret, or is none; pass the secret of the first notebook"
    if isinstance(error, UnicodeError) or (isinstance(error, socket.gaierror) and error.errno in UNKNOWN_NAME):
        example = f"10.0.0.1:{port}" if hello.kind == COMMAND else "master_addr='10.0.0.1' (or rdzv_endpoint)"
        return (
            f"this machine knows no address of {address!r}, where the first notebook is to listen ({error}); "
            f"pass the address, as {example}"
        )
    return ""


def _answers(stream: Stream, deadline: float, stopping: Callable[[], bool]) -> bool:
    """Wait for the first message; return False where there is none: an earlier run at the port has just ended."""
    while time.monotonic() < deadline and not stopping():
        if stream.wait(RETRY_SECONDS):
            return True
        if stream.ended and not stream.wait(0.0):
            break
    stream.close()
    return False


def adapt_orders(orders: Sequence[WorkerOrder], address: str, threads: int) -> None:
    """Add what belongs to this machine to the orders of this host's ranks.

    Args:
        orders: The orders, as the first notebook has sent them.
        address: Its address, to find the network interface on which the ranks reach each other.
        threads: CPU threads of each rank at most.
    """
    interface = interface_to(address)
    for order in orders:
        order.environment.update(dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {})
        order.threads = min(order.threads or threads, threads)
        order.environment["OMP_NUM_THREADS"] = str(order.threads)


def interface_to(address: str) -> str:
    """Return the name of the interface on the way to an address; "" leaves the choice to the back end."""
    own = own_address(address, 9)
    return interface_of(own.partition("%")[0]) if own and INTERFACE_VARIABLES[0] not in os.environ else ""


class FunctionHost(Host):
    """A host without a notebook, which receives the function: a command, or the actor of a node of a Ray cluster.

    Args:
        stream: The stream to the kernel.
        environment: This machine's variables for ranks; those of an order replace them.
    """

    def __init__(self, stream: Stream, environment: Mapping[str, str] | None = None) -> None:
        self._function, self._environment = anonymous_file(), environment or {}
        super().__init__(stream)

    def handle_message(self, message: Event) -> None:
        """Handle a message of the kernel that is not for a rank; returns when the ranks that it starts have ended."""
        if isinstance(message, FunctionEvent):
            os.write(self._function, message.payload)
        elif isinstance(message, StartOrder):
            self.run_function(pickle.loads(message.payload))

    def run_function(self, orders: Sequence[WorkerOrder]) -> None:
        """Run ranks with the function that was received; see `run_ranks`."""
        for order in orders:
            order.environment = {**self._environment, **order.environment}
            adapt_to_machine(order)
        function, self._function = self._function, anonymous_file()
        self.run_ranks(PlacedBackend(function), orders)

    def close(self) -> None:
        """See ``Host.close``."""
        super().close()
        os.close(self._function)
