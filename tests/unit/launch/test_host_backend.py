"""Messages to a host without a notebook: the function, and the orders for its ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from notebook_accelerate.launch.hosts.host_backend import PART_BYTES, FunctionBackend
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import FunctionEvent, HelloEvent, StartOrder
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import Stream, new_secret
from notebook_accelerate.telemetry import Event
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from tests.support.waiting import until


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def double(values: bytes) -> bytes:
    return values * 2


@pytest.fixture
def ends() -> Iterator[tuple[HostConnection, Stream]]:
    """Yield both ends of the connection to a host."""
    secret = new_secret()
    with closing(HostListener("127.0.0.1", secret)) as listener:
        host = connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(1, "c3-n07"))
        incoming = listener.next_host(60)
    assert incoming is not None
    connection = HostConnection(incoming)
    yield connection, host
    connection.close()
    host.close()
    listener.wait_until_free()


def test_a_function_is_read_while_it_is_sent(ends: tuple[HostConnection, Stream]) -> None:
    connection, host = ends
    # This exceeds the stream's window, so the end is sent only after the host has read the beginning.
    values = os.urandom(8 * PART_BYTES)
    backend = FunctionBackend(double, (values,))
    orders = [WorkerOrder(rank, {"RANK": str(rank)}, 1, capture_inherited_state()) for rank in (4, 5)]
    backend.send(connection, orders)
    backend.close()  # This is called when the ranks on all other hosts have started.

    received: list[Event] = []
    while not received or not isinstance(received[-1], StartOrder):
        received += [event for _, event in host.receive(60)]
    *parts, start = received
    assert isinstance(start, StartOrder)
    assert [order.rank for order in pickle.loads(start.payload)] == [4, 5]
    assert len(parts) > 8
    payloads = [part.payload for part in parts if isinstance(part, FunctionEvent)]
    assert len(payloads) == len(parts)
    assert values in b"".join(payloads)


def test_a_host_that_is_lost_during_the_transfer_of_a_function_delays_no_other_host(
    ends: tuple[HostConnection, Stream],
) -> None:
    connection, host = ends
    descriptors = open_descriptors()
    backend = FunctionBackend(double, (bytes(64 * PART_BYTES),))
    backend.send(connection, [WorkerOrder(0, {}, 1, capture_inherited_state())])
    backend.close()
    assert open_descriptors() == descriptors + 1, "the rest of the function is still to be sent"
    host.close()
    until(lambda: open_descriptors() < descriptors)
