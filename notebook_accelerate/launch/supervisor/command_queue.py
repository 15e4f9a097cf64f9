"""The run's clock, and commands for its supervisor, which any thread can queue and the run's thread executes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Protocol

from notebook_accelerate.debugging.session import RankRequests
from notebook_accelerate.launch.processes.event_loop import HasFileno, WakeDescriptor
from notebook_accelerate.launch.state.prompts import PromptQueue
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.publisher import Publisher


class CommandTarget(Protocol):
    """An object that executes commands: a `RankGroup`, or a `WaitingTarget` while there are no ranks."""

    def stop(self, grace: float, reason: StopReason) -> None:
        """Start stopping the ranks, or stop waiting for them, because of ``reason``."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to these ranks."""

    def show_under(self, cell: object) -> None:
        """Show the run's further output under another cell."""


Command = Callable[[CommandTarget], None]


class CommandQueue:
    """The `RunCommands` of a supervised run.

    Attributes:
        wake: A descriptor that is readable while commands are queued.
        prompts: The prompts of ranks that wait for a line of input.
        requests: Sends requests to the ranks, and matches their replies.
        clock: The clock of the run's time limits.
        listener: A socket to watch on the run's thread, with the function to call when it is readable, or None.
    """

    refusal, connected = "", False
    listener: tuple[HasFileno, Callable[[], object]] | None = None

    def __init__(self) -> None:
        self.prompts, self.requests, self.clock = PromptQueue(), RankRequests(), PausableClock()
        self.wake = WakeDescriptor()
        # A deque needs no lock. A lock could deadlock, because signal handlers post commands too.
        self._waiting: deque[Command] = deque()
        self._stopping = False

    # ---- any thread

    def post(self, command: Command) -> None:
        """Schedule a call to ``command(target)`` on the run's thread."""
        self._waiting.append(command)
        self.wake.set()

    def stop(self, grace: float) -> None:
        self._stopping = True
        self.post(lambda target: target.stop(grace, USER_STOP))

    def interrupt(self, ranks: Iterable[int]) -> None:
        wanted = list(ranks)
        self.post(lambda target: target.interrupt(wanted))

    def show_under(self, cell: object) -> None:
        self.post(lambda target: target.show_under(cell))

    def hold_clock(self, rank: int) -> None:
        # Don't call a method of the target, because a rank may be paused just before it starts or just after it ends.
        self.post(lambda _: self.clock.pause(paused(rank)))

    def release_clock(self, rank: int) -> None:
        self.post(lambda _: self.clock.resume(paused(rank)))

    # ---- the run's thread

    def watch(self, register: Callable[[HasFileno, Callable[[], object]], object], target: CommandTarget) -> None:
        """Make an event loop of the run's thread execute the commands on ``target``, and watch the `listener`.

        Args:
            register: Registers a source with the loop, together with the function to call when the source is readable.
            target: The object that executes the commands.
        """
        register(self.wake, lambda: self.carry_out(target))
        if self.listener is not None:
            register(*self.listener)

    def stopping(self) -> bool:
        """Return whether the user has stopped the run."""
        return self._stopping

    def carry_out(self, target: CommandTarget) -> None:
        """Execute the queued commands on ``target``."""
        self.wake.clear()
        while self._waiting:
            self._waiting.popleft()(target)

    def close(self) -> None:
        """Close the descriptor, so that later commands have no effect."""
        self.wake.close()


def paused(rank: int) -> Hashable:
    """Return the clock's holder for a paused rank, which differs from the holder for a prompt (the rank's number)."""
    return ("paused", rank)


class WaitingTarget:
    """The `CommandTarget` of a run that has no ranks yet.

    Args:
        publisher: Shows the run's output.
        on_stop: A function to call with the grace period of every stop.

    Attributes:
        stop_reason: Why to stop waiting, or None to continue. It is never reset, because if a stop arrives at the same
            time as the awaited event, the next wait must notice the stop.
    """

    def __init__(self, publisher: Publisher, on_stop: Callable[[float], None] = lambda _: None) -> None:
        self._publisher, self._on_stop = publisher, on_stop
        self.stop_reason: StopReason | None = None

    def stop(self, grace: float, reason: StopReason) -> None:
        self.stop_reason = self.stop_reason or reason
        self._on_stop(grace)

    def show_under(self, cell: object) -> None:
        self._publisher.flush(force=True)
        self._publisher.show_under(cell)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Do nothing, because there are no ranks."""


class PausableClock:
    """A clock that counts the seconds toward a run's time limits. Safe to use from any thread.

    Time does not count while the run waits for its user or the machine sleeps.

    Attributes:
        started: The time of this clock when it was created.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[Hashable] = set()
        self._held_at = self._excluded = 0.0
        self.started = self.now()

    def now(self) -> float:
        """Return the clock's time, in seconds. Only differences between two times are meaningful."""
        with self._lock:
            return (self._held_at if self._holders else time.monotonic()) - self._excluded

    def pause(self, holder: Hashable) -> None:
        """Suspend the clock until ``holder``, such as a rank that waits for the user, resumes it."""
        with self._lock:
            if not self._holders:
                self._held_at = time.monotonic()
            self._holders.add(holder)

    def resume(self, holder: Hashable) -> None:
        """End any suspension by ``holder``. The clock resumes when no other holder suspends it."""
        with self._lock:
            if holder in self._holders:
                self._holders.discard(holder)
                if not self._holders:
                    self._excluded += time.monotonic() - self._held_at

    def exclude(self, seconds: float) -> None:
        """Don't count the last ``seconds``, during which this process did not run."""
        with self._lock:
            if not self._holders:
                self._excluded += seconds

    @property
    def suspended(self) -> bool:
        """Whether the clock is suspended."""
        return bool(self._holders)
