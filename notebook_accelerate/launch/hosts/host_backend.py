"""Starts the ranks of an attempt on all hosts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.hosts.remote.host_connection import HostLostError, RemoteRank
from notebook_accelerate.launch.hosts.remote.host_protocol import FunctionEvent, StartOrder
from notebook_accelerate.launch.processes.pickled_start import PickledBackend
from notebook_accelerate.launch.processes.placed import completed_for_another_machine
from notebook_accelerate.launch.processes.rank_process import ProcessBackend, RankProcess

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

START_SECONDS = 120.0
"""Seconds that a host has to start its ranks."""
PART_BYTES = 1 << 20


class HostBackend(ProcessBackend):
    """Starts the ranks of this machine, and has the hosts start theirs at the same time.

    Args:
        own: Starts the ranks of this machine.
        count: Their number.
        hosts: The connections to the others, in order, and whether each needs the function from here.
    """

    def __init__(self, own: ProcessBackend, count: int, hosts: Sequence[tuple[HostConnection, bool]]) -> None:
        super().__init__(own.function, own.arguments)
        self._own, self._count, self._hosts = own, count, hosts
        self._stopping: Callable[[], bool] = bool

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """See ``ProcessBackend.configure``."""
        self._stopping = stopping
        self._own.configure(config, note, stopping)

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""
        theirs: dict[int, list[WorkerOrder]] = {}
        for order in orders[self._count :]:
            theirs.setdefault(int(order.environment["GROUP_RANK"]), []).append(order)
        self._order_ranks(theirs)
        self._own.start_ranks(orders[: self._count], started)
        for connection, _ in self._hosts:
            for order in theirs[connection.node]:
                try:
                    started(connection.await_started(START_SECONDS, self._stopping))
                except HostLostError:  # its ranks end at once, and with them the attempt
                    started(RemoteRank(connection, order.rank, 0, int(order.environment["LOCAL_RANK"])))

    def _order_ranks(self, orders: dict[int, list[WorkerOrder]]) -> None:
        pickled = None
        if any(needs_function for _, needs_function in self._hosts):
            pickled = _Payload(self.function, self.arguments)
        try:
            for connection, needs_function in self._hosts:
                own = orders[connection.node]
                if not needs_function:  # it has arguments for the Accelerator too, which need not be picklable
                    own = [replace(order, accelerator=None) for order in own]
                elif pickled is not None:
                    own = [completed_for_another_machine(pickled.complete(order)) for order in own]
                    for part in pickled.parts():
                        connection.send(FunctionEvent(part))
                connection.send(StartOrder(pickle.dumps(own)))
        finally:
            if pickled is not None:
                pickled.close()

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        return self._own.start_rank(order)

    def close(self) -> None:
        """See ``ProcessBackend.close``."""
        super().close()
        self._own.close()

    def prepare_next(self) -> None:
        """See ``ProcessBackend.prepare_next``."""
        self._own.prepare_next()


class _Payload(PickledBackend):
    """The function and its arguments, pickled."""

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """Not supported: it only makes the payload and completes the orders."""
        raise NotImplementedError

    def parts(self) -> Iterator[bytes]:
        """Yield the payload in parts."""
        position = 0
        while part := os.pread(self._payload, PART_BYTES, position):
            yield part
            position += len(part)


__all__ = ["HostBackend"]
