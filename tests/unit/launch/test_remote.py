"""Ranks that a host starts, and whose messages it relays. The host runs on this machine over a real connection."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from notebook_accelerate import LaunchConfig
from notebook_accelerate.debugging.diagnosis import RankPosition
from notebook_accelerate.errors import AskError, LaunchError, WorkerDiedError, WorkerError
from notebook_accelerate.launch import processes, start
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import (
    CHANNEL,
    SAMPLES,
    EndedEvent,
    HelloEvent,
    RelayEvent,
    StartedEvent,
)
from notebook_accelerate.launch.hosts.remote.listener import HostListener, IncomingHost, connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import new_secret
from notebook_accelerate.launch.processes.pickled import PickledBackend
from notebook_accelerate.launch.processes.rank_process import RankProcess
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from tests.support.simulated import Received
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0


class HostedBackend(PickledBackend):
    """A backend that starts two hosts on this machine, which share the ranks."""

    hosts: list[subprocess.Popen[bytes]] = []  # noqa: RUF012 - seen by the tests

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        secret, half = new_secret(), (len(orders) + 1) // 2
        refused: list[str] = []
        listener = HostListener("127.0.0.1", secret, report=refused.append)
        try:
            for node, part in enumerate((orders[:half], orders[half:])):
                self.hosts.append(self._host(listener, secret, node, [self.complete(order) for order in part]))
            for _ in range(2):
                incoming = listener.next_host(SECONDS)
                assert incoming is not None, refused
                connection = HostConnection(incoming)
                connection.on_last_end = connection.close
                connection.measure_clock()
                try:
                    for order in orders[half:] if incoming.hello.node else orders[:half]:
                        started(connection.await_started(order, SECONDS))
                except LaunchError:
                    connection.close()
                    raise
        finally:
            listener.close()

    def _host(
        self, listener: HostListener, secret: bytes, node: int, orders: list[WorkerOrder]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from tests.unit.launch.test_remote import be_a_host; be_a_host()"],
            stdin=subprocess.PIPE, pass_fds=[self._payload], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(pickle.dumps((listener.port, secret, node, orders, self._payload)))
        return process

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        raise NotImplementedError


def be_a_host() -> None:
    """Run as one of the two hosts."""
    from notebook_accelerate.launch.processes.spawn import SpawnBackend

    port, secret, node, orders, payload = pickle.loads(sys.stdin.buffer.read())

    class Given(SpawnBackend):
        def __init__(self) -> None:
            self._payload = payload

        def complete(self, order: WorkerOrder) -> WorkerOrder:
            return order

    hello = HelloEvent(node, f"machine-{node}", processes=len(orders))
    with closing(Host(connect_to_kernel("127.0.0.1", port, secret, hello))) as host:
        host.run_ranks(Given(), orders)
        assert host.next_message() is None, "the kernel closes the connection"


@pytest.fixture(autouse=True)
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(processes.ROWS, "spawn", "tests.unit.launch.test_remote:HostedBackend")
    HostedBackend.hosts.clear()
    yield
    for process in HostedBackend.hosts:
        process.wait(SECONDS)


def _launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    config = LaunchConfig(num_processes=2, start_method="spawn", use_port=0, cpu=True, panel=False, **options)
    return start(config, function, arguments)


def _train(steps: int) -> float:
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.init_trackers("x")
    total = torch.zeros(1)
    for step in range(steps):
        total = accelerator.reduce(torch.ones(1) * (accelerator.process_index + 1))
        accelerator.log({"sum": float(total)}, step)
    print(f"rank {accelerator.process_index} is done")
    return float(total)


def _fail(who: int) -> None:
    rank = int(os.environ["RANK"])
    if rank == who:
        raise ValueError("it diverged")
    time.sleep(600)


def _sleep() -> None:
    answer = 42  # noqa: F841 - the test asks for it
    print("asleep", flush=True)
    while True:
        time.sleep(0.01)


def test_a_run_over_two_hosts_behaves_like_a_local_one() -> None:
    run = _launch(_train, 3)
    assert run.results == (3.0, 3.0)
    assert [(info.node, info.host) for info in run.ranks] == [(0, "machine-0"), (1, "machine-1")]
    assert "[rank 1] rank 1 is done" in run.logs()
    assert list(run.metrics["sum"].rank(0).values) == [3.0] * 3


def test_the_first_failure_ends_all_ranks_at_its_line() -> None:
    with pytest.raises(WorkerError, match="ValueError: it diverged") as raised:
        _launch(_fail, 1)
    assert isinstance(raised.value.__cause__, ValueError)
    assert raised.value.run is not None
    assert [info.state for info in raised.value.run.ranks] == ["stopped", "failed"]


def test_ranks_can_be_asked_inspected_sampled_and_stopped() -> None:
    run = _launch(_sleep, block=False)
    until(lambda: len(run.logs()) == 2)
    answers = run.ask("answer", timeout=SECONDS)
    assert not any(isinstance(answer, AskError) for answer in answers.values()), answers
    assert answers == {0: 42, 1: 42}
    # A diagnosis takes a second, in which a rank on a busy machine may show nothing.
    until(lambda: [_function(place) for place in run.diagnose().places] == [(0, "_sleep"), (1, "_sleep")])
    until(lambda: "_sleep" in run._internals.commands.requests.capture_stacks(1).dump)
    until(lambda: set(run._internals.store.resources) >= {0, 1})
    run.stop()
    assert run.status == "stopped"


def test_a_suspended_rank_is_reported_as_suspended() -> None:
    run = _launch(_sleep, block=False)
    until(lambda: len(run.logs()) == 2)
    pid = run.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        assert f"rank 1: suspended (SIGSTOP); kill -CONT {pid} resumes it on machine-1" in run.diagnose().text
    finally:
        os.kill(pid, signal.SIGCONT)
        run.stop()


def test_a_host_restarts_its_orphan_guard() -> None:
    run = _launch(_sleep, block=False)
    until(lambda: len(run.logs()) == 2)
    host = psutil.Process(HostedBackend.hosts[0].pid)

    def shells() -> list[int]:
        found = []
        for child in host.children():
            with suppress(psutil.NoSuchProcess):  # The process may just have exited.
                found += [child.pid] if child.name() == "sh" else []
        return found

    (first,) = shells()
    os.kill(first, signal.SIGKILL)
    until(lambda: (found := shells()) != [] and found != [first])
    run.stop()


def test_a_lost_host_is_named() -> None:
    run = _launch(_sleep, block=False)
    until(lambda: len(run.logs()) == 2)
    HostedBackend.hosts[1].kill()
    run.wait(SECONDS)
    assert isinstance(run.error, WorkerDiedError)
    assert "node 1 (machine-1) was lost" in str(run.error)
    assert run.ranks[1].exit == "lost"


def test_events_that_arrive_with_the_hello_are_not_lost() -> None:
    secret = new_secret()
    listener = HostListener("127.0.0.1", secret)
    kernel = None
    try:
        host = connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(1, "machine-1"))
        host.send(*(StartedEvent(rank, 100 + rank) for rank in (4, 5)))
        incoming = listener.next_host(SECONDS)
        assert incoming is not None
        kernel = HostConnection(incoming)
        kernel.on_last_end = kernel.close
        orders = [WorkerOrder(rank, {}, None, capture_inherited_state()) for rank in (4, 5)]
        started = [kernel.await_started(order, SECONDS) for order in orders]
        assert [(rank.rank, rank.pid) for rank in started] == [(4, 104), (5, 105)]
    finally:
        listener.close()
        host.close()
        if kernel is not None:
            kernel.close()


def test_messages_relayed_before_all_ranks_are_connected_arrive_in_order() -> None:
    secret, received = new_secret(), Received()
    pieces = [
        (4, "stdout", b"one"),
        (5, CHANNEL, b"two"),
        (4, SAMPLES, b"three"),
        (9, CHANNEL, b"?"),
        (5, "stderr", b""),
    ]
    lengths = [(rank, source, len(data)) for rank, source, data in pieces]
    with (
        closing(HostListener("127.0.0.1", secret)) as listener,
        selectors.DefaultSelector() as selector,
        closing(connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(1, "machine-1"))) as host,
    ):
        host.send(*(StartedEvent(rank, 100 + rank) for rank in (4, 5)))
        host.send(RelayEvent(lengths, b"".join(data for _, _, data in pieces)), EndedEvent(4, 0, None, 0))
        incoming = listener.next_host(SECONDS)
        assert incoming is not None
        kernel = HostConnection(incoming)
        orders = [WorkerOrder(rank, {}, None, capture_inherited_state()) for rank in (4, 5)]
        for rank in [kernel.await_started(order, SECONDS) for order in orders]:
            rank.connect(selector, received)
        while (4, "end") not in received.calls:
            for key, _ in selector.select(SECONDS):
                key.data()
        kernel.close()
    assert received.calls == [*(piece for piece in pieces if piece[0] in (4, 5)), (4, "end")]


def test_an_accepted_host_stays_connected_if_the_listener_closes_immediately() -> None:
    class Slow(SimpleQueue[IncomingHost]):
        """A queue that delays the thread of the handshake, as a busy machine may do."""

        def put(self, item: IncomingHost, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            time.sleep(0.5)

    secret = new_secret()
    listener = HostListener("127.0.0.1", secret)
    listener._incoming = Slow()
    host = connect_to_kernel("127.0.0.1", listener.port, secret, HelloEvent(1, "machine-1"))
    incoming = listener.next_host(SECONDS)
    listener.close()
    until(lambda: not any(thread.name == "notebook-accelerate-handshake" for thread in threading.enumerate()))
    assert incoming is not None
    host.send(StartedEvent(4, 104))
    assert [event for _, event in incoming.stream.receive(SECONDS)] == [StartedEvent(4, 104)]
    for stream in (host, incoming.stream):
        stream.close()


def _function(place: RankPosition) -> tuple[int, str]:
    return place.rank, place.user_frame.function if place.user_frame is not None else ""
