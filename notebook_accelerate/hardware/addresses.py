"""This machine's addresses and network interfaces, and sockets that listen on them."""

from __future__ import annotations

import ipaddress
import socket

BACKLOG = 4096


def own_address(target: str, port: int) -> str:
    """Return this machine's address on the route to another machine; "" when there is no route."""
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(target, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(endpoint)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """Return the name of the network interface that has ``address``; "" when it cannot be determined."""
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
    """Return a socket that listens on one address of this machine only; "" and "::" mean all."""
    flags = 0 if address else socket.AI_PASSIVE
    found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, endpoint = found[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(endpoint, family=family, backlog=BACKLOG, dualstack_ipv6=both)
