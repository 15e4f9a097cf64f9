"""The listener of a run when its process is busy or its settings are extreme."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import IncomingHost, connect_to_kernel
from tests.support.waiting import until
from tests.unit.launch.test_listener import SECONDS, SECRET, _accepted, _exchange, _Kernel, _output, kernel

__all__ = ["kernel"]


def test_a_host_that_joins_among_many_connections_is_not_counted_as_unauthenticated(
    monkeypatch: pytest.MonkeyPatch, kernel: _Kernel
) -> None:
    """If the host counted as unauthenticated, it would be closed as the oldest of too many such connections."""
    blocked, go = threading.Event(), threading.Event()

    def block(text: str) -> None:
        blocked.set()
        go.wait(SECONDS)

    monkeypatch.setattr(kernel.listener, "_report", block)
    address = kernel.listener._peer_address

    def slowly(descriptor: int) -> str:
        time.sleep(0.002)
        return address(descriptor)

    monkeypatch.setattr(kernel.listener, "_peer_address", slowly)
    with socket.create_connection(("127.0.0.1", kernel.port)) as peer:
        peer.sendall(b"x" * 100)
    assert blocked.wait(SECONDS)
    peers = [socket.create_connection(("127.0.0.1", kernel.port), timeout=SECONDS) for _ in range(300)]
    until(lambda: len(_accepted(kernel.port)) == 300)
    joining = threading.Thread(target=kernel.connect_host)
    joining.start()
    until(lambda: len(_accepted(kernel.port)) == 301)
    go.set()
    joining.join(SECONDS)
    until(lambda: len(kernel.listener._waiting) >= 300)
    time.sleep(0.5)
    assert len(kernel.listener._waiting) == 300
    for each in peers:
        each.close()


def test_sending_waits_for_no_lock(kernel: _Kernel) -> None:
    """Cells also send, and an interrupt in a lock's Python code would leave the lock held forever."""
    host, ours = kernel.connect_host()
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with kernel.listener.changed:
            taken.set()
            done.wait(SECONDS)

    holding = threading.Thread(target=hold)
    holding.start()
    assert taken.wait(SECONDS)
    sending = threading.Thread(target=HostConnection(IncomingHost(ours, HelloEvent(1, "x"), [])).send, args=[_output()])
    sending.start()
    sending.join(10.0)
    waits = sending.is_alive()
    done.set()
    holding.join()
    assert not waits
    assert [event for _, event in host.receive(SECONDS)] == [_output()]


@pytest.mark.parametrize("keep_alive", [(3600.0, 10800.0), (1e9, 1e9)])
def test_a_keep_alive_longer_than_libzmq_can_count_is_capped(keep_alive: tuple[float, float]) -> None:
    with closing(_Kernel(keep_alive)) as kernel:
        host = connect_to_kernel("127.0.0.1", kernel.port, SECRET, HelloEvent(1, "machine-1"), keep_alive)
        kernel.ends.append(host)
        _exchange(host, kernel.next_end())
