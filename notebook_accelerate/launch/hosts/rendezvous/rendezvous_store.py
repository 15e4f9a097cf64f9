"""The rendezvous store, hosted by one child process and found by the others, and torch's handlers on it."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from notebook_accelerate.launch.hosts.addresses import interface_of, listen, own_address
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import MessageSigner, SignedBackend

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from notebook_accelerate.launch.hosts.rendezvous.rendezvous_protocol import RendezvousOrder

JOIN_SECONDS = 600.0
_Value = TypeVar("_Value")


def in_thread(call: Callable[[], _Value]) -> Future[_Value]:
    """Call a function on a separate daemon thread, because torch blocks in it and offers no way to cancel it."""
    future: Future[_Value] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass
class Connection:
    """A store, and whether this process hosts it."""

    store: Any
    hosting: bool


class PortTakenError(Exception):
    """The rendezvous port is in use on the machine that must listen on it."""


def join_seconds(order: RendezvousOrder) -> float:
    """Return the join timeout in seconds."""
    settings = order.settings
    return float(settings.get("join_timeout", settings.get("timeout", JOIN_SECONDS)))


def keep_alive(order: RendezvousOrder) -> tuple[float, float]:
    """Return the seconds between two keep-alives, and those without one after which a node is lost."""
    interval = float(order.settings.get("keep_alive_interval", 5))
    return interval, interval * float(order.settings.get("keep_alive_max_attempt", 3))


def connect(order: RendezvousOrder) -> Connection:
    """Host the store or find it, waiting up to the join timeout.

    Raises:
        PortTakenError: This notebook must host it, and its port is in use.
    """
    listener = _listener(order)
    if listener is not None:
        store = host(order.address, listener, order)
        return Connection(store, hosting=True)
    timeout = timedelta(seconds=join_seconds(order))
    store = TCPStore(order.address, order.port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timedelta(seconds=max(1.0, keep_alive(order)[1])))
    return Connection(store, hosting=False)


def host(address: str, listener: socket.socket, order: RendezvousOrder) -> Any:
    """Return a store that listens on ``listener``; by default torch listens on every interface."""
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=max(1.0, keep_alive(order)[1])),
    )  # fmt: skip


def _listener(order: RendezvousOrder) -> socket.socket | None:
    """Return a socket that listens on the rendezvous address; None when another notebook listens there."""
    is_host = order.settings.get("is_host")
    must = order.backend == "static" and order.node["node_rank"] == 0
    if (order.backend == "static" and not must) or is_host is False:
        return None
    try:
        return listen(order.address, order.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not must and not is_host:
            return None
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"port {order.port} is taken on this machine; pass another everywhere") from None
        if error.errno == errno.EADDRNOTAVAIL and (must or is_host):  # a router translates the address (NAT)
            return listen("", order.port)
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def handler(
    order: RendezvousOrder, signer: MessageSigner, run_id: str, least: int, most: int, *, hosting: bool
) -> RendezvousHandler:
    """Return torch's handler for one rendezvous of at least ``least`` and at most ``most`` nodes."""
    conf: dict[str, Any] = {k: int(float(v)) for k, v in order.settings.items() if k.endswith(("_timeout", "_attempt"))}
    conf["join_timeout"] = int(join_seconds(order)) + 60  # the child's own timeout, which lists the missing, is shorter
    conf["keep_alive_interval"] = max(1, int(keep_alive(order)[0]))
    endpoint = f"[{order.address}]:{order.port}" if ":" in order.address else f"{order.address}:{order.port}"
    # Machines may share a name, and processes in containers a process id.
    own = order.settings.get("local_addr") or f"{order.node['host']}-{order.node['name']}"
    parameters = RendezvousParameters(order.backend, endpoint, run_id, least, most, own)
    if order.backend == "static":
        parameters.config.update(rank=order.node["node_rank"], timeout=conf["join_timeout"])
        return get_rendezvous_handler(parameters)
    parameters.config.update(conf, is_host=hosting, store_type="tcp")
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    return dynamic_rendezvous.create_handler(store, SignedBackend(backend, signer), parameters)


def route_to(address: str, port: int) -> tuple[str, str]:
    """Return the network interface through which this machine reaches an address, and its own address there.

    Both are "" when unknown.
    """
    own = own_address(address, port)
    return (interface_of(own.partition("%")[0]) if own else ""), own
