"""The ranks of one attempt: starts them, waits for what they say, and sees them to their end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.hardware import torch_build
from notebook_accelerate.launch.output.rank_output import Publisher
from notebook_accelerate.launch.plan.planner import LaunchPlan, rank_environment
from notebook_accelerate.launch.run import DEFAULT_GRACE, Run
from notebook_accelerate.launch.state import failure_causes, failures
from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
from notebook_accelerate.launch.supervisor.rank_events import RankEventHandler
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank, SupervisedRanks
from notebook_accelerate.telemetry import RankFailure, ResultEvent, inherited_state
from notebook_accelerate.telemetry.worker_order import WorkerOrder

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend

ABANDON_SECONDS = 5.0
"""How long a killed rank is waited for."""
MANY_RANKS, TURN_SECONDS = 32, 0.005
"""So many ranks are heard in turns: to wake up for every event would cost more than to take it in."""


GroupCall = Callable[["RankGroup"], None]


class HasFileno(Protocol):
    """Something that can be waited on."""

    def fileno(self) -> int:
        """Return its descriptor."""


def dispatch(selector: selectors.BaseSelector, timeout: float | None) -> None:
    """Wait up to ``timeout`` seconds (None: for ever) and call the data of every registration that became ready.

    One call may close what others of the same batch stand for, as a rank's end closes its channel: those are skipped.
    """
    for key, _ in selector.select(timeout):
        if selector.get_map().get(key.fd) is key:
            key.data()


class RankGroup:
    """The ranks of one attempt, from their start until the last one is reaped.

    Args:
        run: Where everything is written to.
        plan: What was planned.
        publisher: Where output is shown.
        wake: Becomes readable when a stop was requested.
        calls: Returns what other threads want done with the group since the last call.
        stopwatch: Stands still while a rank waits for the user, and with it the run's limits.

    Attributes:
        ears: What the ranks say is heard there.
        ending: What went wrong, and how the ranks are stopped.
        on_step: Called whenever something may have changed.
    """

    def __init__(
        self,
        run: Run,
        plan: LaunchPlan,
        publisher: Publisher,
        wake: socket.socket,
        calls: Callable[[], list[GroupCall]],
        stopwatch: PausableClock,
    ) -> None:
        self._run, self._plan, self._publisher, self._wake, self._calls = run, plan, publisher, wake, calls
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ, self._drain_wake)
        self._ranks = SupervisedRanks()
        self.stopwatch = stopwatch
        self.ending = StopSequence(run)
        self.on_step: Callable[[], None] | None = None
        self.ears = RankEventHandler(run, publisher, self._selector, self._ranks, self.ending, stopwatch)

    # ---- start

    def start(self, backend: ProcessBackend, attempt: int, state: inherited_state.InheritedState) -> None:
        """Start every rank; on failure those that had started are ended."""
        orders = [self._order(local_rank, attempt, state) for local_rank in range(self._plan.num_processes)]
        try:
            backend.start_ranks(orders, self.ears.attend)
        except BaseException:
            self.abandon()
            raise
        finally:
            backend.close()

    def _order(self, local_rank: int, attempt: int, state: inherited_state.InheritedState) -> WorkerOrder:
        config = self._run.config
        environment = {**_launch_environment(self._run, attempt), **rank_environment(self._plan, local_rank)}
        environment.update(config.env or {})
        rank = self._plan.first_rank + local_rank
        return WorkerOrder(
            rank, environment, self._plan.threads, state, hold=config.debug, accelerator=config.accelerator
        )

    # ---- on the supervisor's thread, for others

    def show_under(self, cell: object) -> None:
        """Show what comes from now on under another cell: the one whose message is ``cell``."""
        self._publisher.flush(force=True)
        self._publisher.show_under(cell)
        if self.ears.tap is not None:
            self.ears.tap.tell_cells()

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send a KeyboardInterrupt to ranks that are to live on."""
        for watched in self._alive():
            if watched.process.rank in ranks:
                watched.process.send_signal(signal.SIGINT)

    def stop(self, grace: float, reason: StopReason) -> None:
        """Climb the ladder; a second call kills at once."""
        self.ending.stop(grace, reason)

    def verdicts(self) -> tuple[RankFailure, ...]:
        """Return what went wrong, the first failure first, explained as far as can be."""
        found = failures.ordered(self.ending.failures)
        store = self._run.store
        told = {f.rank: [line.text for line in store.log_lines(f.rank)][-failure_causes.LAST_LINES :] for f in found}
        returned = [rank for rank, watched in self._ranks.all.items() if isinstance(watched.outcome, ResultEvent)]
        return tuple(failure_causes.with_leavers([failure_causes.explained(f, told[f.rank]) for f in found], returned))

    def pids(self) -> dict[int, int]:
        """Return the process ids by rank of the ranks on this machine."""
        return {rank: watched.process.pid for rank, watched in self._ranks.all.items() if not watched.process.host}

    def listen(self, source: HasFileno, call: Callable[[], object]) -> None:
        """Call ``call`` on this thread whenever there is something to read from ``source``, while the ranks live."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def unlisten(self, source: HasFileno) -> None:
        """Undo ``listen``."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        for call in self._calls():
            call(self)

    # ---- the loop

    def supervise(self) -> None:
        """Hear and watch the ranks until the last one is reaped."""
        living = self._ranks.living
        while living:
            dispatch(self._selector, self._patience())
            self._take_steps()
            self._publisher.flush()
            if len(living) >= MANY_RANKS:
                time.sleep(TURN_SECONDS)
        self.ears.finish()
        self._selector.close()

    def _alive(self) -> list[SupervisedRank]:
        return list(self._ranks.living.values())

    def _patience(self) -> float:
        """Return how long the loop may sleep: until the next thing that is due."""
        waits = [5.0]
        if (due := self.ending.next_due()) is not None:
            waits.append(due - time.monotonic())
        if (publish := self._publisher.seconds_until_due()) is not None:
            waits.append(publish)
        if self._limits_count():
            waits += [due - self.stopwatch.now() for due, _ in self._limits()]
        if self._ranks.asked:
            waits.append(self._run.config.monitor_interval)
        return max(0.0, min(waits))

    def _take_steps(self) -> None:
        self._check_limits()
        self.ending.hold_when_due()
        if (due := self.ending.next_due()) is not None and due <= time.monotonic():
            dispatch(self._selector, 0)  # before ranks are stopped: on a busy machine much may have come meanwhile
        for rank in list(self._ranks.asked):
            self.ears.take_end(rank)
        self.ending.climb(watched.process for watched in self._ranks.living.values())
        if self.on_step is not None:
            self.on_step()

    # ---- the run's time limits

    def _check_limits(self) -> None:
        if not self._limits_count():
            return
        for due, reason in self._limits():
            if self.stopwatch.now() >= due:
                # Decided now: looking into the ranks sends signals, which can end the very call they are stuck in.
                self.ending.reason = StopReason(RunTimeoutError, reason)
                self.ears.stall.diagnose_then(partial(self._give_up, reason))
                return

    def _limits_count(self) -> bool:
        """Whether the run's time limits are in force: it runs, nobody is being asked, nobody looks into it already."""
        ending = self.ending
        over = ending.reason or ending.failures or ending.held
        return not (over or self.stopwatch.standing or self.ears.stall.busy)

    def _give_up(self, reason: str, verdict: str) -> None:
        self.stop(DEFAULT_GRACE, StopReason(RunTimeoutError, f"{reason}; {verdict}" if verdict else reason))

    def _limits(self) -> list[tuple[float, str]]:
        """Return when each limit is reached, by the run's stopwatch, and what to say then."""
        config = self._run.config
        limits = []
        if config.timeout is not None:
            limits.append((self._run.started + config.timeout, f"the run reached its timeout of {config.timeout:g} s"))
        if config.hang_timeout is not None:
            reason = f"no rank gave a sign of life for {config.hang_timeout:g} s (hang_timeout)"
            limits.append((self.ears.last_sign_of_life + config.hang_timeout, reason))
        limits += self.ears.stall.limits()
        return limits

    # ---- the end

    def abandon(self) -> None:
        """Kill and reap everything, whatever state it is in."""
        for watched in self._alive():
            watched.process.send_signal(signal.SIGKILL, group=True)
            watched.process.send_signal(signal.SIGKILL)
            watched.process.await_end(ABANDON_SECONDS)
            watched.process.close()
            self._ranks.leave_out(watched)
            self._run._desk.close(watched.process.rank)
        self._selector.close()


def _launch_environment(run: Run, attempt: int) -> dict[str, str]:
    from notebook_accelerate.config.environ import worker_variables

    return {
        **worker_variables(mixed_precision=run.config.mixed_precision, cpu=run.config.cpu),
        "TORCHELASTIC_RUN_ID": f"notebook-{os.getpid()}-{run.id}",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(run.config.max_restarts),
        **torch_build.flight_recorder_variables(),
    }
