"""Ranks forked from the kernel: they inherit its memory by copy-on-write, and nothing is pickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.plan.fork_probe import fork_quietly
from notebook_accelerate.launch.processes import huge_pages, zygote
from notebook_accelerate.launch.processes.openmp_spin import BriefSpins, is_crowded
from notebook_accelerate.launch.processes.orphan_guard import orphan_guard, own_mark
from notebook_accelerate.launch.processes.rank_process import Ends, OwnChild, ProcessBackend, RankProcess, pidfd_of
from notebook_accelerate.worker import entry

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


MANY_RANKS = 8
"""From this many ranks on, moving the kernel's memory into huge pages takes less time than it saves in one launch."""
COLLAPSE_SECONDS = 0.5


class ForkedRank(OwnChild):
    """A rank whose process group the zygote, if it runs, ends with the kernel."""

    living: set[int] = set()  # noqa: RUF012 - all runs of this process share it
    """The ranks that share pages with this process."""

    def __init__(self, rank: int, pid: int, ends: Ends, exit_descriptor: int | None) -> None:
        super().__init__(rank, pid, ends, exit_descriptor)
        self.living.add(pid)
        zygote.guard(pid)

    def close(self) -> None:
        """See ``RankProcess.close``."""
        super().close()
        self.living.discard(self.pid)
        zygote.end_guard(self.pid)
        orphan_guard.release()


class ForkBackend(ProcessBackend):
    """Forks from the calling thread, which must live as long as the ranks: Linux ends them with it."""

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""
        entry.prepare_forks()
        if len(orders) >= MANY_RANKS:
            _collapse()
        spins = BriefSpins()
        processes: list[RankProcess] = []
        if is_crowded(orders):
            spins.hold()
        try:
            super().start_ranks(orders, processes.append)
        finally:
            spins.release()
            unguarded = not zygote.guards_orphans()
            for process in processes:  # not between two forks, each of which makes this process copy what it writes to
                orphan_guard.acquire(needed=unguarded)
                started(process)

    def prepare_next(self) -> None:
        """See ``ProcessBackend.prepare_next``."""
        _collapse()

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        ends = Ends()
        parent = os.getpid()
        order.mark = own_mark()
        try:
            pid = fork_quietly()
        except OSError as error:
            ends.close_rank_side()
            ends.close_kernel_side()
            raise LaunchError(f"rank {order.rank} could not be forked: {error}") from error
        if pid == 0:
            wiring = entry.Wiring(ends.rank_channel.detach(), ends.rank_stdout, ends.rank_stderr, parent)
            entry.main(order, wiring, lambda: (self.function, self.arguments), inherited=ends.kernel_side)
        with suppress(OSError):  # the child does the same: either may run first
            os.setpgid(pid, pid)
        ends.close_rank_side()
        return ForkedRank(order.rank, pid, ends, pidfd_of(pid))


def _collapse() -> None:
    """Move the kernel's memory into huge pages, unless ranks share it: each would keep the small pages as well."""
    huge_pages.collapse(COLLAPSE_SECONDS, stop=lambda: bool(ForkedRank.living))
