"""This machine's addresses and network interfaces, and sockets that listen on them."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct

BACKLOG = 4096


def own_address(target: str, port: int) -> str:
    """Return this machine's address on the route to another machine, or "" if there is no route."""
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(target, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # A datagram socket sends nothing when it is connected.
            probe.connect(endpoint)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """Return the name of the network interface that has ``address``, or "" if it cannot be determined."""
    import psutil

    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback):
                return name
    return ""


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on one address of this machine only. "" and "::" mean all addresses."""
    flags = 0 if address else socket.AI_PASSIVE
    found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, endpoint = found[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(endpoint, family=family, backlog=BACKLOG, dualstack_ipv6=both)


_LOOPBACK_SECONDS = 1.0
_NOT_LOOPBACK = (errno.EADDRINUSE, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Connection errors that are not caused by the interface: this machine has run out of ports or descriptors."""


def loopback_problem() -> str:
    """Return why processes cannot connect to 127.0.0.1, as a phrase, or "" if they can or if it cannot be tested."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(_LOOPBACK_SECONDS)
            # With this option, closing the socket frees its port immediately.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.connect(server.getsockname())
        except OSError as error:
            return "" if error.errno in _NOT_LOOPBACK else str(error)
    return ""


def get_free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
