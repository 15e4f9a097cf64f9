"""Commands to a run's supervisor: queued by any thread, carried out on the run's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from notebook_accelerate.debugging.rank_requests import RankRequests
from notebook_accelerate.launch.processes.selecting import Signal
from notebook_accelerate.launch.state.prompts import PromptQueue
from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason


class CommandTarget(Protocol):
    """Carries out commands: the ranks of an attempt, or the wait for hosts while there are no ranks."""

    @property
    def clock(self) -> PausableClock:
        """The clock of the run's time limits."""

    def stop(self, grace: float, reason: StopReason) -> None:
        """See ``RunCommands.stop``."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """See ``RunCommands.interrupt``."""

    def show_under(self, cell: object) -> None:
        """See ``RunCommands.show_under``."""


Command = Callable[[CommandTarget], None]


class CommandQueue:
    """The `RunCommands` of a supervised run.

    Attributes:
        wake: Readable while commands wait.
        prompts: The ranks that wait for a line of text.
        requests: Requests to the ranks, matched with their replies.
        clock: The clock of the run's time limits.
    """

    refusal, lingers = "", False

    def __init__(self) -> None:
        self.prompts, self.requests, self.clock = PromptQueue(), RankRequests(), PausableClock()
        self.wake = Signal()
        self._waiting: deque[Command] = deque()  # no lock: signal handlers post too
        self._stopping = False

    # ---- any thread

    def post(self, command: Command) -> None:
        """Schedule a call of ``command(target)`` on the run's thread."""
        self._waiting.append(command)
        self.wake.set()

    def stop(self, grace: float) -> None:
        """See ``RunCommands.stop``."""
        self._stopping = True
        self.post(lambda target: target.stop(grace, USER_STOP))

    def interrupt(self, ranks: Iterable[int]) -> None:
        """See ``RunCommands.interrupt``."""
        wanted = list(ranks)
        self.post(lambda target: target.interrupt(wanted))

    def show_under(self, cell: object) -> None:
        """See ``RunCommands.show_under``."""
        self.post(lambda target: target.show_under(cell))

    def hold_clock(self, rank: int) -> None:
        """See ``RunCommands.hold_clock``."""
        self.post(lambda target: target.clock.pause(paused(rank)))

    def release_clock(self, rank: int) -> None:
        """See ``RunCommands.release_clock``."""
        self.post(lambda target: target.clock.resume(paused(rank)))

    # ---- the run's thread

    def stopping(self) -> bool:
        """Whether the run was told to stop."""
        return self._stopping

    def carry_out(self, target: CommandTarget) -> None:
        """Carry out the commands that wait."""
        self.wake.clear()
        while self._waiting:
            self._waiting.popleft()(target)

    def close(self) -> None:
        """Close the descriptor; later commands have no effect."""
        self.wake.close()


def paused(rank: int) -> Hashable:
    """Return the clock holder for a paused rank; a rank that waits at a prompt uses its number instead."""
    return ("paused", rank)
