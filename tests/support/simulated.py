"""Simulated ranks: threads in other processes that speak the channel's protocol over real sockets, without training.

    backend = SimulatedBackend(events_per_second=10)
    group.start(backend, 0)          # a Group like any other, with the ranks of its plan

One process simulates up to 64 ranks in four threads. Each rank has its own channel and two output pipes, and sends the
messages of a training rank: metrics, progress, step times, heartbeats, resource usage, and lines of text.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.hosts.host_backend import take_ranks
from notebook_accelerate.launch.hosts.remote.host import Host
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import CHANNEL, SAMPLES, HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
from notebook_accelerate.launch.hosts.remote.stream import new_secret
from notebook_accelerate.launch.processes.rank_pipes import RankPipes
from notebook_accelerate.launch.processes.rank_process import LocalRank, ProcessBackend, RankProcess
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.telemetry import (
    Channel,
    Event,
    MetricEvent,
    ProgressEvent,
    ResourceEvent,
    ResultEvent,
    StatusEvent,
    StepTimeEvent,
)
from notebook_accelerate.telemetry.debug_protocol import HeartbeatEvent
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from tests.support.runs import devices

ROOT = Path(__file__).resolve().parents[2]
RANKS_PER_PROCESS, THREADS = 64, 4
EVENTS_PER_SECOND = 10.0
TOTAL_STEPS = 100_000


class Received:
    """A listener that records everything that it receives from ranks, as the rank, the source and the bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Record the output of a rank."""
        self.calls.append((rank, stream, data))

    def on_frames(self, rank: int, data: bytes) -> None:
        """Record bytes from a rank's channel."""
        self.calls.append((rank, CHANNEL, data))

    def on_host_frames(self, rank: int, data: bytes) -> None:
        """Record a host's measurements of a rank."""
        self.calls.append((rank, SAMPLES, data))

    def on_end(self, rank: int) -> None:
        """Record the end of a rank."""
        self.calls.append((rank, "end"))


class SimulatedRank(LocalRank):
    """A rank that another process simulates.

    Args:
        rank: The global index of the rank.
        pid: The id of the process that simulates it.
        ends: The kernel's ends of the rank's channel and pipes.
        life: A socket that the simulator closes when the rank ends, and whose sending half this process closes to end
            the rank.
    """

    def __init__(self, rank: int, pid: int, ends: RankPipes, life: socket.socket) -> None:
        super().__init__(rank, pid, ends, life.fileno())
        self._life = life

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        try:
            return None if self._life.recv(1, socket.MSG_DONTWAIT) else Exit(0)
        except BlockingIOError:
            return None
        except OSError:
            return Exit(1)

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Ask the rank to end, whichever signal is sent."""
        with suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the kernel's ends, which the simulator notices."""
        self.exit_descriptor = None
        super().close()
        self._life.close()


class _Simulator:
    """A process that simulates some of the ranks."""

    def __init__(self, events_per_second: float) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.simulated", str(theirs.fileno()), str(events_per_second)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=environment)
        theirs.close()
        self._control, self.pid, self.count = ours, self._process.pid, 0

    def simulate(self, rank: int, ends: RankPipes) -> SimulatedRank:
        life, theirs = socket.socketpair()
        mine = [ends.rank_channel.fileno(), ends.rank_stdout, ends.rank_stderr, theirs.fileno()]
        socket.send_fds(self._control, [rank.to_bytes(4, "big")], mine)
        theirs.close()
        ends.close_rank_side()
        self.count += 1
        return SimulatedRank(rank, self.pid, ends, life)

    def close(self) -> None:
        """Stop accepting ranks. The process exits when its last rank ends."""
        self._control.close()

    def wait(self) -> None:
        self._process.wait(120)


class SimulatedBackend(ProcessBackend):
    """Starts simulated ranks.

    Args:
        events_per_second: The rate of each rank.
    """

    def __init__(self, events_per_second: float = EVENTS_PER_SECOND) -> None:
        super().__init__(_nothing, ())
        self._rate = events_per_second
        self._simulators: list[_Simulator] = []

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        if not self._simulators or self._simulators[-1].count >= RANKS_PER_PROCESS:
            self._simulators.append(_Simulator(self._rate))
        return self._simulators[-1].simulate(order.rank, RankPipes())

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        for simulator in self._simulators:
            simulator.close()

    def wait(self) -> None:
        """Reap the simulators after the end of their ranks."""
        for simulator in self._simulators:
            simulator.wait()


class LinkedBackend(ProcessBackend):
    """Starts simulated ranks on simulated machines, each of which is a real host with a real link on loopback.

    Args:
        ranks_per_host: The number of ranks per machine.
        events_per_second: The rate of each rank.
    """

    def __init__(self, ranks_per_host: int = 8, events_per_second: float = EVENTS_PER_SECOND) -> None:
        super().__init__(_nothing, ())
        self._each, self._rate = ranks_per_host, events_per_second
        self._processes: list[subprocess.Popen[bytes]] = []

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""
        secret = new_secret()
        listener = HostListener("127.0.0.1", secret)
        per_process = RANKS_PER_PROCESS // self._each * self._each
        try:
            for first in range(0, len(orders), per_process):
                self._simulate(listener.port, secret, first, min(per_process, len(orders) - first))
            for _ in range(0, len(orders), self._each):
                incoming = listener.next_host(120.0)
                assert incoming is not None, "a simulated machine did not connect"
                connection = HostConnection(incoming)
                connection.on_last_end = connection.close
                connection.measure_clock()
                first = incoming.hello.node * self._each
                take_ranks(connection, orders[first : first + self._each], started, 120.0, lambda: False)
        finally:
            listener.close()

    def _simulate(self, port: int, secret: bytes, first: int, count: int) -> None:
        numbers = [port, first, count, self._each, self._rate]
        command = [sys.executable, "-m", "tests.support.simulated", "hosts", *map(str, numbers)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env=environment)
        assert process.stdin is not None
        process.stdin.write(secret)
        process.stdin.close()
        self._processes.append(process)

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        raise NotImplementedError("simulated machines start all of their ranks together")

    def wait(self) -> None:
        """Reap the simulators after the end of their ranks."""
        for process in self._processes:
            process.wait(120)


def _nothing() -> None:
    """Stand in for the function of a launch, because simulated ranks do not run one."""


# ---- in the simulator


class _Voice:
    """The messages of one rank, and the descriptors that carry them."""

    def __init__(self, rank: int, descriptors: list[int], period: float) -> None:
        self._rank, self._period = rank, period
        channel, self._stdout, self._stderr, life = descriptors
        self._channel, self._life = Channel(socket.socket(fileno=channel)), socket.socket(fileno=life)
        self._life.setblocking(False)
        self._number, self.due = 0, 0.0
        self._channel.send(StatusEvent("running"))

    def begin(self) -> None:
        """Schedule the first message at a random time within a period, so that ranks do not send at the same time."""
        self.due = time.monotonic() + random.Random(self._rank).random() * self._period

    def speak(self) -> bool:
        """Send the next message. Return whether the rank continues."""
        with suppress(ChannelClosedError, OSError):
            if not self._asked_to_end():
                self._say(self._number)
                self._number += 1
                # Like training, a rank does not make up for lost time.
                self.due = max(self.due + self._period, time.monotonic())
                return True
            self._channel.send(ResultEvent(pickle.dumps(self._rank)))
        for descriptor in (self._stdout, self._stderr):
            os.close(descriptor)
        self._channel.close()
        self._life.close()
        return False

    def _asked_to_end(self) -> bool:
        try:
            return not self._life.recv(1)
        except BlockingIOError:
            return False

    def _say(self, number: int) -> None:
        turn, step = number % 10, number // 2
        if turn == 9:
            os.write(self._stdout, f"step {step}: a line of text as training scripts write it\n".encode())
        else:
            self._channel.send(self._event(turn, step))

    def _event(self, turn: int, step: int) -> Event:
        slow = self._rank % 100 == 13
        own = 0.18 if slow else 0.09
        parts = dict(zip(PARTS, (own / 3, 0.1, 0.2 - own, 0.01, own / 3), strict=True))
        return {
            1: ProgressEvent(step, TOTAL_STEPS, "step"),
            3: StepTimeEvent(parts, step, 5, own),
            5: HeartbeatEvent(time.time()),
            7: devices(self._rank, 80.0, 30 << 30)[step % 2]
            if step % 4
            else ResourceEvent(90.0 + self._rank % 7, (2 << 30) + (self._rank << 20)),
        }.get(turn) or MetricEvent(
            {"train/loss": 2.0 * math.exp(-step / 500) + 0.02 * math.sin(self._rank + step / 9), "lr": 1e-3}, step
        )


class _VoiceBackend(ProcessBackend):
    """A backend for a host in this process, whose ranks are simulated by threads."""

    def __init__(self, events_per_second: float) -> None:
        super().__init__(_nothing, ())
        self._period = 1 / events_per_second
        self._voices: list[_Voice] = []

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        ends, (life, theirs) = RankPipes(), socket.socketpair()
        mine = [ends.rank_channel.detach(), ends.rank_stdout, ends.rank_stderr, theirs.detach()]
        self._voices.append(_Voice(order.rank, mine, self._period))
        return SimulatedRank(order.rank, os.getpid(), ends, life)

    def close(self) -> None:
        """Let the ranks start sending, now that all of them have been created."""
        threading.Thread(target=_speak_for, args=(self._voices,), daemon=True).start()


def _be_host(port: int, secret: bytes, node: int, ranks: range, events_per_second: float) -> None:
    hello = HelloEvent(node, f"worker-{node:02}", processes=len(ranks))
    orders = [WorkerOrder(rank, {}, None, capture_inherited_state()) for rank in ranks]
    with closing(Host(connect_to_kernel("127.0.0.1", port, secret, hello))) as host:
        host.run_ranks(_VoiceBackend(events_per_second), orders)
        host.next_message()  # Return when the kernel disconnects.


def be_hosts(port: int, first: int, count: int, each: int, events_per_second: float) -> None:
    """Simulate several machines, each with a host and some of the ranks. The secret arrives on standard input."""
    secret = sys.stdin.buffer.read()
    threads = []
    for begin in range(first, first + count, each):
        ranks = range(begin, min(begin + each, first + count))
        arguments = (port, secret, begin // each, ranks, events_per_second)
        threads.append(threading.Thread(target=_be_host, args=arguments))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _speak_for(ranks: list[_Voice]) -> None:
    """Send each rank's messages when they are due, until all ranks are finished."""
    for rank in ranks:
        rank.begin()
    while ranks:
        first = min(ranks, key=lambda rank: rank.due)
        time.sleep(max(0.0, first.due - time.monotonic()))
        if not first.speak():
            ranks.remove(first)


def main(control: int, events_per_second: float) -> None:
    """Simulate the ranks whose descriptors arrive through a socket, until all are finished."""
    ranks = []
    with socket.socket(fileno=control) as connection:
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
            if not data:
                break
            ranks.append(_Voice(int.from_bytes(data, "big"), list(descriptors), 1 / events_per_second))
    shares = [ranks[begin::THREADS] for begin in range(min(THREADS, len(ranks)))]
    threads = [threading.Thread(target=_speak_for, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__" and sys.argv[1] == "hosts":
    port_, first_, count_, each_ = map(int, sys.argv[2:6])
    be_hosts(port_, first_, count_, each_, float(sys.argv[6]))
elif __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
