"""What a host without a notebook receives: the function, and the orders of its ranks."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

from notebook_accelerate.launch.hosts.host_backend import PART_BYTES, FunctionBackend
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import FunctionEvent, StartOrder
from notebook_accelerate.telemetry import Channel, Event, inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def double(values: bytes) -> bytes:
    return values * 2


def test_a_function_is_read_while_it_is_sent() -> None:
    values = os.urandom(8 * PART_BYTES)  # more than the buffers of a socket take
    ours, theirs = Channel.pair()
    connection, host = HostConnection(ours, 1, "c3-n07"), Channel(theirs)
    backend = FunctionBackend(double, (values,))
    orders = [WorkerOrder(rank, {"RANK": str(rank)}, 1, inherited_state.capture()) for rank in (4, 5)]
    backend.send(connection, orders)
    backend.close()  # as when the ranks of all other hosts have started

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
    connection.close()
    host.close()


def test_a_host_that_is_lost_while_a_function_is_sent_holds_up_nobody() -> None:
    descriptors = open_descriptors()
    ours, theirs = Channel.pair()
    connection = HostConnection(ours, 1, "c3-n07")
    backend = FunctionBackend(double, (bytes(64 * PART_BYTES),))
    backend.send(connection, [WorkerOrder(0, {}, 1, inherited_state.capture())])
    backend.close()
    theirs.close()
    connection.close()
    assert not any(thread.name == "notebook-accelerate-outbox" for thread in threading.enumerate())
    assert open_descriptors() == descriptors
