"""Start the ranks of an attempt on all hosts.

This module is not in ``remote``, because the modules there must not import pickle.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.hosts.placed_ranks import completed_for_another_machine
from notebook_accelerate.launch.hosts.remote.host_protocol import COMMAND, FunctionEvent, StartOrder
from notebook_accelerate.launch.processes.pickled import PickledBackend
from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankProcess
from notebook_accelerate.launch.processes.shared_imports import trains

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

START_SECONDS = 300.0
"""How many seconds a host may take to start its ranks. Before that, it may have to import torch twice."""
PART_BYTES = 1 << 20


class HostBackend(ProcessBackend):
    """Starts the ranks on this machine, and makes the other hosts start their ranks at the same time.

    Args:
        own: The backend that starts the ranks on this machine.
        count: The number of ranks on this machine.
        hosts: The connections to the other hosts, in order.
    """

    def __init__(self, own: ProcessBackend, count: int, hosts: Sequence[HostConnection]) -> None:
        super().__init__(own.function, own.arguments)
        self._own, self._count, self._hosts = own, count, hosts
        self._stopping: Callable[[], bool] = bool
        self._spawn = False

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        self._stopping, self._spawn = stopping, config.start_method == "spawn"
        self._own.configure(config, note, stopping)

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        theirs: dict[int, list[WorkerOrder]] = {}
        for order in orders[self._count :]:
            theirs.setdefault(int(order.environment["GROUP_RANK"]), []).append(order)
        with ExitStack() as last:
            pickled: FunctionBackend | None = None
            for connection in self._hosts:
                if connection.hello.kind == COMMAND:
                    pickled = pickled or last.enter_context(closing(FunctionBackend(self.function, self.arguments)))
                    pickled.send(connection, theirs[connection.node], spawn=self._spawn)
                else:  # Leave out the Accelerator's arguments. A notebook has its own, and these may not be picklable.
                    own = [replace(order, accelerator=None) for order in theirs[connection.node]]
                    connection.send(StartOrder(pickle.dumps(own)))
        self._own.start_ranks(orders[: self._count], started)
        for connection in self._hosts:
            take_ranks(connection, theirs[connection.node], started, START_SECONDS, self._stopping)

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        return self._own.start_rank(order)

    def close(self) -> None:
        super().close()
        self._own.close()


class FunctionBackend(PickledBackend):
    """Sends hosts the pickled function and arguments, followed by the orders for their ranks."""

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """Raise an error, because hosts start the ranks."""
        raise NotImplementedError

    def send(self, connection: HostConnection, orders: Sequence[WorkerOrder], *, spawn: bool = False) -> None:
        """Send a host the function and the orders. The function is sent only once, however many ranks there are.

        Args:
            connection: The connection to the host.
            orders: The orders for the host's ranks.
            spawn: Whether each rank must be a fresh interpreter.
        """
        # Map the file, because its parts are read as the host needs them, possibly after this object has been closed.
        content = mmap.mmap(self._payload, 0, access=mmap.ACCESS_READ)
        parts = range(0, len(content), PART_BYTES)
        connection.send_each(FunctionEvent(content[begin : begin + PART_BYTES]) for begin in parts)
        orders = [completed_for_another_machine(self.complete(order)) for order in orders]
        connection.send(StartOrder(pickle.dumps(orders), spawn, trains(self.function, self.arguments)))


def take_ranks(
    connection: HostConnection,
    orders: Sequence[WorkerOrder],
    started: Callable[[RankProcess], None],
    seconds: float,
    stopping: Callable[[], bool],
) -> None:
    """Wait until a host has started its ranks. If the host is lost, its ranks and the attempt end immediately.

    Args:
        connection: The connection to the host.
        orders: The orders for the host's ranks.
        started: A function to call with each rank, but only once all have started, because a connection for one attempt
            closes when its last rank has ended.
        seconds: How many seconds each rank may take to start.
        stopping: A function that returns whether the user has stopped the run.

    Raises:
        LaunchError: The host could not start a rank, or took too long.
        RunStoppedError: The user has stopped the run.
    """
    for process in [connection.await_started(order, seconds, stopping) for order in orders]:
        started(process)
