"""This machine's addresses and network interfaces, and sockets that listen on them."""

from __future__ import annotations

import errno
import ipaddress
import platform
import re
import socket
import struct
import sys
import warnings

from packaging.version import parse

from notebook_accelerate.config import environ

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


# Ports, the version of the operating system's kernel, and loaded libraries.

# With older kernels, waiting for the child of several ranks hangs: https://github.com/huggingface/accelerate/issues/1929
_MIN_KERNEL = "5.5.0"
_DEFAULT_PORT = 29500
_LOOPBACK_SECONDS = 1.0
_NOT_LOOPBACK = (errno.EADDRINUSE, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Errors of a connection that do not show that the interface fails: there are no more ports or descriptors."""


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of the named libraries this process has imported.

    Args:
        library_names: Import names.
    """
    return [name for name in library_names if name in sys.modules]


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, with which several ranks may hang."""
    if platform.system() != "Linux":
        return
    found = re.match(r"\d+\.\d+(\.\d+)?", platform.release())
    if found is not None and parse(found[0]) < parse(_MIN_KERNEL):
        warnings.warn(
            f"this Linux kernel is {found[0]}, and several ranks may hang with kernels before {_MIN_KERNEL}: update it",
            stacklevel=2,
        )


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a process listens on a port of this machine.

    Args:
        port: The port; None: MASTER_PORT, or 29500.
    """
    number = int(port) if port is not None else environ.integer("MASTER_PORT", _DEFAULT_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", number)) == 0


def loopback_problem() -> str:
    """Return why processes cannot connect to 127.0.0.1, as a phrase; "" when they can, or when it cannot be tried."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(_LOOPBACK_SECONDS)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # frees its port at once
            client.connect(server.getsockname())
        except OSError as error:
            return "" if error.errno in _NOT_LOOPBACK else str(error)
    return ""


def get_free_port() -> int:
    """Return a port of this machine that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
