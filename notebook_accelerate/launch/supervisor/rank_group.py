"""Start the ranks of one attempt, handle what they send, enforce the time limits, and reap the ranks."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.config.environ import worker_variables
from notebook_accelerate.errors import RunTimeoutError
from notebook_accelerate.hardware.detection import in_kernel
from notebook_accelerate.hardware.versions import torch_build
from notebook_accelerate.integrations import accelerate_alias
from notebook_accelerate.launch.plan.planner import LaunchPlan, on_node, rank_environment
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, HasFileno, call_ready, dispatch
from notebook_accelerate.launch.processes.orphan_guard import orphan_guard
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE
from notebook_accelerate.launch.state.run_events import AttemptEnded, FailuresRecorded, RankExited
from notebook_accelerate.launch.state.run_state import ENDED, TransitionError
from notebook_accelerate.launch.supervisor.rank_events import RankEventHandler
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank, SupervisedRanks
from notebook_accelerate.telemetry import RankFailure, ResultEvent
from notebook_accelerate.telemetry.worker_order import CHANNEL_BYTES, WorkerOrder

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.supervisor.supervisor import Supervisor
    from notebook_accelerate.telemetry.inherited_state import InheritedState


UNKILLABLE_SECONDS = 20.0
"""How many seconds a rank may take to end after SIGKILL. A driver may need seconds to free a device's memory."""
ABANDON_SECONDS = 5.0
"""How many seconds to wait for a rank to end after killing it without a stop sequence."""
LONGEST_WAIT = 1.0
"""The maximum number of seconds that the event loop sleeps, so that it soon notices when the machine has slept."""
GAP_SECONDS = 1.0
"""If the loop is more than this many seconds late, the machine was asleep or the kernel was suspended."""
PAUSED_RANKS, PAUSE_PER_RANK = 32, 40e-6
"""With at least this many ranks, the loop pauses after each turn, for this many seconds per rank (0.02 s for 512).

With so many ranks, waking up for every single event would cost more than handling the events.
"""
FLIGHT_RECORDER_ENTRIES = "2000"
"""The number of operations that each of torch's flight recorders keeps, which is torch's own default for NCCL.

A rank queues NCCL operations ahead of its device, so hundreds may follow the one that the device is waiting in.
"""


class RankGroup:
    """The ranks of one attempt, from their start until the last one is reaped. It is a `CommandTarget`.

    Args:
        supervisor: The run's supervisor.
        plan: The plan that says how many ranks to start, and how.

    Attributes:
        selector: The selector with everything that the event loop waits for.
        events: Handles everything that the ranks send.
        stops: Decides when the ranks are stopped, and whether each of them succeeded, failed or was stopped.
        after_turn: A function to call after every turn of the event loop, or None.
    """

    def __init__(self, supervisor: Supervisor, plan: LaunchPlan) -> None:
        self._supervisor, self._plan = supervisor, plan
        self.selector = DispatchSelector()
        supervisor.commands.watch(self.listen, self)
        self._ranks = SupervisedRanks()
        self.after_turn: Callable[[], None] | None = None
        self._guard_due = 0.0
        self._seen = time.monotonic(), time.thread_time()
        self.stops = StopSequence(supervisor.journal, supervisor.commands.prompts, hold=supervisor.config.hold_on_error)
        self.events = RankEventHandler(supervisor, self.selector, self._ranks, self.stops)
        self._limits = TimeLimits(supervisor, self.events, self.stops)

    # ---- start

    def start(self, backend: ProcessBackend, attempt: int, inherited: InheritedState) -> None:
        """Start all ranks. If one fails to start, kill those that have already started."""
        nodes = range(len(self._plan.sizes)) if self._plan.sizes else (self._plan.node,)
        plans = [self._plan if node == self._plan.node else on_node(self._plan, node) for node in nodes]
        orders = [self._order(plan, at, attempt, inherited) for plan in plans for at in range(plan.num_processes)]
        try:
            backend.start_ranks(orders, self.events.add)
        except BaseException:
            self.abandon()
            raise
        finally:
            backend.close()

    def _order(self, plan: LaunchPlan, local_rank: int, attempt: int, inherited: InheritedState) -> WorkerOrder:
        config = self._supervisor.config
        environment = {
            **_launch_environment(self._supervisor, plan, attempt),
            **rank_environment(plan, local_rank),
            **(config.env or {}),
        }
        here = plan is self._plan and not plan.where
        return WorkerOrder(
            plan.first_rank + local_rank,
            environment,
            plan.threads,
            inherited,
            hold=config.hold_on_error,
            accelerator=config.accelerator,
            as_accelerate=config.as_accelerate or accelerate_alias.is_installed(),
            report_from=config.report_from,
            automatic_metrics=config.automatic_metrics,
            result_bytes=CHANNEL_BYTES if here else None,  # This machine cannot open the result files of another one.
        )

    # ---- commands

    def show_under(self, cell: object) -> None:
        self._supervisor.publisher.flush(force=True)
        self._supervisor.publisher.show_under(cell)

    def interrupt(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._ranks.living:
                self._ranks.living[rank].process.send_signal(signal.SIGINT)

    def stop(self, grace: float, reason: StopReason) -> None:
        """Start the stop sequence of this attempt."""
        self.stops.stop(grace, reason)

    # ---- the event loop

    def supervise(self) -> None:
        """Handle what the ranks send and watch them until the last one is reaped."""
        living = self._ranks.living
        self._seen = time.monotonic(), time.thread_time()
        while living:
            self._wait(self._select_timeout())
            self._check_deadlines()
            self.events.record()
            self._supervisor.publisher.flush()
            if len(living) >= PAUSED_RANKS:
                time.sleep(len(living) * PAUSE_PER_RANK)
        self.events.finish()
        self.selector.close()

    def _wait(self, timeout: float) -> None:
        ready = self.selector.select(timeout)
        self._exclude_gap(timeout)
        call_ready(self.selector, ready)
        self.events.record()

    def _exclude_gap(self, slept: float = 0.0) -> None:
        """If this thread was suspended for long since the last call, exclude that time from the time limits.

        Args:
            slept: The number of seconds that the thread was meant to sleep.
        """
        now, used = time.monotonic(), time.thread_time()
        late = now - self._seen[0] - (used - self._seen[1]) - slept
        self._seen = now, used
        if late > GAP_SECONDS:
            self._supervisor.clock.exclude(late)

    def _select_timeout(self) -> float:
        """Return how many seconds the loop may sleep before its next deadline."""
        waits = [LONGEST_WAIT]
        if (due := self.stops.next_due()) is not None:
            waits.append(due - time.monotonic())
        if (publish := self._supervisor.publisher.seconds_until_due()) is not None:
            waits.append(publish)
        if (left := self._limits.seconds_left()) is not None:
            waits.append(left)
        if self._ranks.polled:
            waits.append(self._supervisor.config.monitor_interval)
        return max(0.0, min(waits))

    def _check_deadlines(self) -> None:
        self._check_limits()
        if self.stops.hold_when_due():
            self._hold()
        if (due := self.stops.next_due()) is not None and due <= time.monotonic():
            # On a busy machine, many events may be pending. Handle them before any ranks are stopped.
            dispatch(self.selector, 0)
        if time.monotonic() >= self._guard_due:
            self._guard_due = time.monotonic() + LONGEST_WAIT
            orphan_guard.ensure()
        for rank in list(self._ranks.polled):
            self.events.on_end(rank)
        self.stops.signal_when_due(rank.process for rank in self._ranks.living.values())
        if self.stops.killed_at is not None and time.monotonic() - self.stops.killed_at > UNKILLABLE_SECONDS:
            self._abandon_unkillable()
        if self.after_turn is not None:
            self.after_turn()

    def _hold(self) -> None:
        """Record that the run has failed, while its ranks are held for the debugger."""
        found, supervisor = self.verdicts(), self._supervisor
        supervisor.publisher.flush(force=True)
        supervisor.journal.append(FailuresRecorded(found))
        supervisor.journal.append(AttemptEnded(failures.headline(found)))
        supervisor.journal.append(failures.failed(supervisor.id, supervisor.state))
        supervisor.show(
            "its ranks are kept: notebook_accelerate.debug() opens the debugger where it failed; "
            "the next launch, or notebook_accelerate.shutdown(), ends them",
            "stderr",
        )

    def _check_limits(self) -> None:
        self._exclude_gap()
        reason = self._limits.reached()
        if reason:
            # Set the reason before the diagnosis, whose signals may end the call that the ranks are stuck in. If the
            # ranks then exit, the time limit must be the reason.
            self.stops.reason = StopReason(RunTimeoutError, reason)
            self.events.stall.diagnose_then(partial(self._give_up, reason))

    def _give_up(self, reason: str, found: Diagnosis | None) -> None:
        if not self._ranks.living:  # The ranks ended during the diagnosis, and another attempt may have started.
            return
        self.stop(
            DEFAULT_GRACE, StopReason(RunTimeoutError, f"{reason}; {found.verdict}" if found is not None else reason)
        )

    # ---- queries

    def verdicts(self) -> tuple[RankFailure, ...]:
        """Return the failures, starting with the first one, with explanations if they are known."""
        found = failures.ordered(self.stops.failures)
        store, lines = self._supervisor.journal.store, failures.LAST_LINES
        last = {failure.rank: [line.text for line in store.log_lines(failure.rank)][-lines:] for failure in found}
        returned = [rank for rank, each in self._ranks.all.items() if isinstance(each.outcome, ResultEvent)]
        explained = [failures.explained(failure, last[failure.rank]) for failure in found]
        return tuple(failures.with_returned_peers(explained, returned))

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank on this machine, by rank."""
        return {rank: each.process.pid for rank, each in self._ranks.all.items() if not each.process.host}

    def listen(self, source: HasFileno, call: Callable[[], object]) -> None:
        """Call ``call`` on the run's thread whenever ``source`` is readable, until the last rank has ended."""
        self.selector.register(source, selectors.EVENT_READ, call)

    # ---- the end

    def abandon(self) -> None:
        """Kill and reap all ranks, whatever state they are in."""
        for rank in list(self._ranks.living.values()):
            self._kill(rank)
        self.events.record()
        self.selector.close()

    def _abandon_unkillable(self) -> None:
        """Give up on ranks that survive SIGKILL because a system call hangs, for example in a device driver."""
        for rank in list(self._ranks.living.values()):
            process = rank.process
            where = f" on {process.host}" if process.host else ""
            text = (
                f"rank {process.rank} (process {process.pid}{where}) has not ended {UNKILLABLE_SECONDS:g} s after "
                "SIGKILL and is left to the system: it waits in a system call, usually of a device's driver. It still "
                "holds its device; see dmesg, and nvidia-smi for a GPU"
            )
            self.events.warn([text])
            self._kill(rank, 0.0)

    def _kill(self, rank: SupervisedRank, patience: float = ABANDON_SECONDS) -> None:
        process = rank.process
        process.send_signal(signal.SIGKILL, group=True)
        process.await_end(patience)
        process.close()
        self._ranks.remove(rank)
        self._supervisor.commands.requests.close(process.rank)
        self.events.forget_prompt(process.rank)
        with suppress(TransitionError):  # The run's state may no longer allow recording the exit.
            state = self._supervisor.state.rank(process.rank).state
            self._supervisor.journal.append(RankExited(process.rank, state if state in ENDED else "stopped", "SIGKILL"))


def _launch_environment(supervisor: Supervisor, plan: LaunchPlan, attempt: int) -> dict[str, str]:
    config = supervisor.config
    return {
        **worker_variables(mixed_precision=config.mixed_precision, cpu=config.cpu or plan.accelerator == "cpu"),
        "TORCHELASTIC_RUN_ID": f"notebook-{os.getpid()}-{supervisor.id}",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        **{name: value for name, value in watched_rank_variables().items() if name not in os.environ},
        **_display_variables(),
    }


def watched_rank_variables() -> dict[str, str]:
    """Return the torch environment variables for a supervised rank.

    The variables enable the flight recorders and disable NCCL's monitoring of its threads. The monitoring would abort a
    rank that was suspended for eight minutes, by Ctrl-Z or together with its machine.
    """
    if torch_build().version is None:
        return {}
    return {"TORCH_FR_BUFFER_SIZE": FLIGHT_RECORDER_ENTRIES, "TORCH_NCCL_ENABLE_MONITORING": "0"}


def _display_variables() -> dict[str, str]:
    """Return the variable that makes plotly display figures in the notebook.

    In a rank, plotly does not detect the notebook, and would open a browser.
    """
    if not in_kernel() or "PLOTLY_RENDERER" in os.environ:
        return {}
    return {"PLOTLY_RENDERER": "plotly_mimetype+notebook"}


# ---- time limits: the run's timeout, its hang timeout, and the process group's timeout


class TimeLimits:
    """The time limits of one attempt, measured with the run's clock.

    Args:
        supervisor: The run's supervisor.
        events: Knows when a rank was last active, and which collectives are waiting.
        stops: The attempt's stop sequence. Once it has started, the limits no longer apply.
    """

    def __init__(self, supervisor: Supervisor, events: RankEventHandler, stops: StopSequence) -> None:
        self._config, self._clock, self._events, self._stops = supervisor.config, supervisor.clock, events, stops

    def seconds_left(self) -> float | None:
        """Return the seconds until the next limit, or None if no limit applies."""
        now = self._clock.now()
        return min((due - now for due, _ in self._limits()), default=None)

    def reached(self) -> str:
        """Return the reason to stop the run, or "" if no limit is reached."""
        now = self._clock.now()
        return next((reason for due, reason in self._limits() if now >= due), "")

    def _limits(self) -> list[tuple[float, str]]:
        """Return each limit: when it is reached, by the run's clock, and the reason for the stop."""
        stops, stall = self._stops, self._events.stall
        if stops.reason or stops.failures or stops.held or self._clock.suspended or stall.busy:
            return []
        limits = []
        timeout, hang_timeout = self._config.timeout, self._config.hang_timeout
        if timeout is not None:
            limits.append((self._clock.started + timeout, f"the run reached its timeout of {timeout:g} s"))
        if hang_timeout is not None:
            reason = f"no rank gave a sign of life for {hang_timeout:g} s (hang_timeout)"
            limits.append((self._events.last_activity + hang_timeout, reason))
        return [*limits, *stall.limits()]
