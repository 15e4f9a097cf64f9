"""What all hosts do that join a run: connect to the first notebook, and wait for its orders."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accelerate.errors import AuthenticationError, ChannelClosedError, LaunchError, RunStoppedError
from notebook_accelerate.hardware.addresses import interface_of, own_address
from notebook_accelerate.launch.hosts.host_facts import COMMAND, HostFacts
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import connect_to_kernel

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.remote.host_protocol import StartOrder
    from notebook_accelerate.telemetry import Channel
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
    facts: HostFacts,
    seconds: float,
    keep_alive: tuple[float, float],
    stopping: Callable[[], bool] = lambda: False,
) -> Channel:
    """Connect to the first notebook, trying again until it listens.

    Args:
        where: Address and port of its listener.
        secret: The run's secret.
        facts: What this host tells about itself.
        seconds: How long to try.
        keep_alive: Seconds between two keep-alives, and those without one after which the other end is lost.
        stopping: Returns whether to give up.

    Raises:
        LaunchError: The first notebook has another secret, has no known address, or does not listen.
        RunStoppedError: The run is ``stopping``.
    """
    address, port = where
    hello = HelloEvent(facts.node_rank, facts.host, facts.as_dict())
    begin = time.monotonic()
    deadline = begin + seconds
    final = ""
    while True:
        problem: Exception = ConnectionResetError("it ended")
        try:
            channel = connect_to_kernel(address, port, secret.encode(), hello, keep_alive, stopping)
            if _answers(channel, deadline, stopping):
                return channel
        except (AuthenticationError, OSError, UnicodeError) as error:  # UnicodeError: not a name
            before, final = final, _final_text(error, where, facts)
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


def _final_text(error: Exception, where: tuple[str, int], facts: HostFacts) -> str:
    """Return the message of an error that another try is unlikely to change; "" for others."""
    address, port = where
    if isinstance(error, AuthenticationError):
        return f"the run at {address}:{port} has another secret, or is none; pass the secret of the first notebook"
    if isinstance(error, UnicodeError) or (isinstance(error, socket.gaierror) and error.errno in UNKNOWN_NAME):
        example = f"10.0.0.1:{port}" if facts.kind == COMMAND else "master_addr='10.0.0.1' (or rdzv_endpoint)"
        return (
            f"this machine knows no address of {address!r}, where the first notebook is to listen ({error}); "
            f"pass the address, as {example}"
        )
    return ""


def _answers(channel: Channel, deadline: float, stopping: Callable[[], bool]) -> bool:
    """Wait for the first message; return False where there is none: an earlier run at the port has just ended."""
    while time.monotonic() < deadline and not stopping():
        try:
            found = channel.receive(RETRY_SECONDS)
        except ChannelClosedError:
            break
        if found:
            channel.put_back(found)
            return True
    channel.close()
    return False


def own_orders(event: StartOrder, address: str, threads: int) -> list[WorkerOrder]:
    """Return the orders of this host's ranks, with what belongs to this machine.

    Args:
        event: The first notebook's message.
        address: Its address, to find the network interface on which the ranks reach each other.
        threads: CPU threads of each rank at most.
    """
    orders: list[WorkerOrder] = pickle.loads(event.payload)
    interface = interface_to(address)
    for order in orders:
        order.environment.update(dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {})
        order.threads = min(order.threads or threads, threads)
        order.environment["OMP_NUM_THREADS"] = str(order.threads)
    return orders


def interface_to(address: str) -> str:
    """Return the name of the interface on the way to an address; "" leaves the choice to the back end."""
    own = own_address(address, 9)
    return interface_of(own.partition("%")[0]) if own and INTERFACE_VARIABLES[0] not in os.environ else ""


__all__ = ["connect", "interface_to", "own_orders"]
