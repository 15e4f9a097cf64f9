"""The addresses of this machine, and sockets that listen on them."""

from __future__ import annotations

import socket

import pytest

from notebook_accelerate.hardware.addresses import listen


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("first", ["0.0.0.0", "::"])
def test_listening_on_all_addresses_accepts_ipv4(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems list IPv4 first, and others IPv6."""
    found = socket.getaddrinfo(first, 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    with listen("", 0) as listener:
        monkeypatch.undo()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()
