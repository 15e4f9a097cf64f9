"""Start ranks by forking the kernel. Nothing is pickled, because the ranks share the kernel's memory copy-on-write."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes import fork_probe, kernel_descriptors, process_backend, shared_imports
from notebook_accelerate.launch.processes.fork_costs import BriefSpins, collapse_memory, is_crowded
from notebook_accelerate.launch.processes.fork_probe import fork_hazard, fork_quietly
from notebook_accelerate.launch.processes.orphan_guard import own_mark
from notebook_accelerate.launch.processes.rank_pipes import RankPipes
from notebook_accelerate.launch.processes.rank_process import OwnChild, ProcessBackend, RankProcess, pidfd_of
from notebook_accelerate.telemetry import cells
from notebook_accelerate.worker import entry

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


RANKS_WORTH_COLLAPSING = 8
"""With at least this many ranks, moving the kernel's memory into huge pages saves more time than it takes."""
COLLAPSE_SECONDS = 0.5


class ForkedRank(OwnChild):
    """A rank that was forked from this process and shares the process's memory pages."""

    living: set[int] = set()  # noqa: RUF012 - all runs of this process share the set
    """The process ids of the ranks that have not been closed."""

    def __init__(self, rank: int, pid: int, ends: RankPipes, exit_descriptor: int | None) -> None:
        super().__init__(rank, pid, ends, exit_descriptor)
        self.living.add(pid)

    def close(self) -> None:
        super().close()
        self.living.discard(self.pid)


class ForkBackend(ProcessBackend):
    """Forks ranks from the calling thread, which must outlive them: Linux kills a rank when its parent thread ends."""

    _instead: ProcessBackend | None = None
    """The backend that starts the ranks if the kernel turns out to be unsafe to fork, or None."""
    _planned = 0
    """The value of ``fork_probe.plans`` when the ranks were started, or 0 before that."""

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        self._settings = config, note, stopping

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        self._planned = fork_probe.plans
        self._share_imports()
        if self._instead is not None:
            self._instead.start_ranks(orders, started)
            return
        entry.prepare_forks()
        if len(orders) >= RANKS_WORTH_COLLAPSING:
            _collapse_unshared_memory(self._planned)
        spins = BriefSpins()
        processes: list[RankProcess] = []
        if is_crowded(orders):
            spins.hold()
        try:
            super().start_ranks(orders, processes.append)
        finally:
            spins.release()
            # Report the ranks only after the last fork, because memory written between two forks has to be copied.
            for process in processes:
                started(process)

    def _share_imports(self) -> None:
        """Import what the ranks need into the kernel. If that makes forks unsafe, use the server process instead.

        Raises:
            RunStoppedError: The user stopped the run during the import.
        """
        config, note, stopping = self._settings
        loaded = shared_imports.load_for_training(self.function, self.arguments, config.env or {}, note, stopping)
        if loaded and (hazard := shared_imports.failure() or fork_hazard()):
            note(f"the kernel is no longer safe to fork: {hazard}; starting the ranks from the server process")
            self._instead = process_backend("zygote")(self.function, self.arguments)
            self._instead.configure(config, note, stopping)

    def close(self) -> None:
        super().close()
        if self._instead is not None:
            self._instead.close()

    def prepare_next(self) -> None:
        if _is_idle(self._planned):
            cells.note_classes()  # The next launch then searches only classes created after this call.
        _collapse_unshared_memory(self._planned)

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        ends = RankPipes()
        parent = os.getpid()
        order.mark = own_mark()
        try:
            pid = fork_quietly()
        except OSError as error:
            ends.close_rank_side()
            ends.close_kernel_side()
            raise LaunchError(f"rank {order.rank} could not be forked: {error}") from error
        if pid == 0:
            descriptors = entry.RankDescriptors(ends.rank_channel.detach(), ends.rank_stdout, ends.rank_stderr, parent)
            entry.main(order, descriptors, lambda: (self.function, self.arguments), kernel_descriptors.known())
        with suppress(OSError):  # The child does the same, because either process may run first.
            os.setpgid(pid, pid)
        ends.close_rank_side()
        return ForkedRank(order.rank, pid, ends, pidfd_of(pid))


def _collapse_unshared_memory(planned: int) -> None:
    """Move the kernel's memory into huge pages, unless ranks share it, because they would keep the small pages.

    Stop when the next launch begins, because moving memory would delay its forks and its reading of the memory map.

    Args:
        planned: The value of ``fork_probe.plans`` before the next launch.
    """
    collapse_memory(COLLAPSE_SECONDS, stop=lambda: not _is_idle(planned))


def _is_idle(planned: int) -> bool:
    """Return whether this process has no ranks and has planned no launch since ``fork_probe.plans`` was ``planned``."""
    return not ForkedRank.living and fork_probe.plans == planned
