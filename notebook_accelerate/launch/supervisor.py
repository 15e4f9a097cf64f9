"""The ranks of one attempt: starts them, hears them, and sees them to their end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accelerate.debug import flight, mistakes
from notebook_accelerate.debug.protocol import (
    HEARTBEAT_SECONDS,
    AskReply,
    CellReply,
    CheckEvent,
    CompleteReply,
    DebuggerLeftEvent,
    DoneReply,
    DumpReadyEvent,
    HeartbeatEvent,
    Reply,
    StacksReply,
)
from notebook_accelerate.errors import RunStoppedError, RunTimeoutError, WorkerError
from notebook_accelerate.launch import ambient, crashes, failures, tracebacks
from notebook_accelerate.launch.ladder import Ladder
from notebook_accelerate.launch.output import Label, Publisher, RankOutput
from notebook_accelerate.launch.payload import load_bytes
from notebook_accelerate.launch.planner import LaunchPlan, rank_environment
from notebook_accelerate.launch.questions import Question
from notebook_accelerate.launch.run import DEFAULT_GRACE, RankInfo, Run
from notebook_accelerate.launch.stall import StallWatch
from notebook_accelerate.launch.stopwatch import Stopwatch
from notebook_accelerate.launch.worker import WorkerOrder
from notebook_accelerate.telemetry import (
    Decoder,
    DisplayEvent,
    Event,
    FailureEvent,
    GroupTimeoutEvent,
    InputRequest,
    LogEvent,
    RankFailure,
    ResultEvent,
    Stamped,
    StatusEvent,
)
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    from notebook_accelerate.launch.backends.base import Exit, ProcessBackend, RankProcess
    from notebook_accelerate.launch.rendezvous.tap import Tap

SETTLE_SECONDS = 0.3
"""After the first failure the other ranks have this long to fail or finish by themselves, before they are stopped."""
ABANDON_SECONDS = 5.0
"""How long a killed rank is waited for."""
MANY_RANKS, TURN_SECONDS = 32, 0.005
"""So many ranks are heard in turns: to wake up for every event would cost more than to take it in."""
BEAT_SECONDS = 0.5
"""Least time between two comparisons of all ranks' steps."""
FAILURE_GRACE = 2.0
"""Seconds from KeyboardInterrupt to SIGKILL for the ranks that are left after a failure."""


GroupCall = Callable[["Group"], None]


class HasFileno(Protocol):
    """Something that can be waited on."""

    def fileno(self) -> int:
        """Return its descriptor."""


@dataclass(frozen=True)
class StopReason:
    """Why a run is stopped: the error it ends with, and the words for it."""

    error: type[WorkerError]
    text: str


USER_STOP = StopReason(RunStoppedError, "it was stopped")


class _Watched:
    """A rank under supervision."""

    def __init__(self, process: RankProcess, info: RankInfo, outputs: dict[str, RankOutput]) -> None:
        self.process, self.info, self.outputs = process, info, outputs
        self.decoder = Decoder()
        self.outcome: Event | None = None
        self.ended = False


def dispatch(selector: selectors.BaseSelector, timeout: float | None) -> None:
    """Wait up to ``timeout`` seconds (None: for ever) and call the data of every registration that became ready.

    One call may close what others of the same batch stand for, as a rank's end closes its channel: those are skipped.
    """
    for key, _ in selector.select(timeout):
        if selector.get_map().get(key.fd) is key:
            key.data()


class Group:
    """The ranks of one attempt, from their start until the last one is reaped.

    Args:
        run: Where everything is written to.
        plan: What was planned.
        publisher: Where output is shown.
        wake: Becomes readable when a stop was requested.
        calls: Returns what other threads want done with the group since the last call.
        stopwatch: Stands still while a rank waits for the user, and with it the run's limits.
    """

    def __init__(
        self,
        run: Run,
        plan: LaunchPlan,
        publisher: Publisher,
        wake: socket.socket,
        calls: Callable[[], list[GroupCall]],
        stopwatch: Stopwatch,
    ) -> None:
        self._run, self._plan, self._publisher, self._wake, self._calls = run, plan, publisher, wake, calls
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ, self._drain_wake)
        self._label = Label(run.config.log_line_prefix_template)
        self._ranks: dict[int, _Watched] = {}
        # Hundreds of ranks report all the time: what is done for each report must not look at all ranks.
        self._living: dict[int, _Watched] = {}
        self._asked: dict[int, _Watched] = {}
        self._starting: set[int] = set()
        self._beat_due = 0.0
        self._ladder: Ladder | None = None
        self._asked_to_stop = False
        self.stopwatch = stopwatch
        self._last_sign_of_life = stopwatch.now()
        self._oom_kills = failures.oom_kill_count()
        self.failures: list[RankFailure] = []
        self.stop_reason: StopReason | None = None
        self._hold_at: float | None = None
        self._held = False
        self.on_hold: Callable[[], None] | None = None
        self.on_stopping: Callable[[StopReason | None], None] | None = None
        """Called when a stop begins: with its reason, or with None when a rank has failed."""
        self.tap: Tap | None = None
        """Gets a copy of what is heard of the ranks, for the first of several notebooks."""
        self._watch_for_stall = StallWatch(run, self._report_stall)
        self._mistakes = mistakes.Mistakes(len(run.ranks) or plan.num_processes)

    # ---- start

    def start(self, backend: ProcessBackend, attempt: int) -> None:
        """Start every rank; on failure those that had started are ended."""
        state = ambient.capture()
        orders = [self._order(local_rank, attempt, state) for local_rank in range(self._plan.num_processes)]
        try:
            backend.start_ranks(orders, self._watch)
        except BaseException:
            self.abandon()
            raise
        finally:
            backend.close()

    def _order(self, local_rank: int, attempt: int, state: ambient.Ambient) -> WorkerOrder:
        config = self._run.config
        environment = {**_launch_environment(self._run, attempt), **rank_environment(self._plan, local_rank)}
        environment.update(config.env or {})
        rank = self._plan.first_rank + local_rank
        return WorkerOrder(
            rank, environment, self._plan.threads, state, hold=config.debug, accelerator=config.accelerator
        )

    def _watch(self, process: RankProcess) -> None:
        info = self._run._info(process.rank)
        info.pid, info.node, info.host = process.pid, process.node, process.host
        label = self._label(process.rank, process.local_rank)
        outputs = {
            stream: RankOutput(process.rank, stream, label, self._keep_lines, self._publisher)
            for stream in ("stdout", "stderr")
        }
        watched = self._ranks[process.rank] = self._living[process.rank] = _Watched(process, info, outputs)
        self._starting.add(process.rank)
        if process.must_be_asked:
            self._asked[process.rank] = watched
        self._run._desk.open(process.rank, process.channel, process.look)
        if self.tap is not None:
            self.tap.started(process)
        process.connect(self._selector, self)

    def show_under(self, cell: object) -> None:
        """Show what comes from now on under another cell: the one whose message is ``cell``."""
        self._publisher.flush(force=True)
        self._publisher.show_under(cell)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send a KeyboardInterrupt to ranks that are to live on."""
        for watched in self._alive():
            if watched.process.rank in ranks:
                watched.process.send_signal(signal.SIGINT)

    def verdicts(self) -> tuple[RankFailure, ...]:
        """Return what went wrong, the first failure first, explained as far as can be."""
        found = failures.ordered(self.failures)
        store = self._run.store
        told = {f.rank: [line.text for line in store.log_lines(f.rank)][-crashes.LAST_LINES :] for f in found}
        returned = [watched.info.rank for watched in self._ranks.values() if isinstance(watched.outcome, ResultEvent)]
        return tuple(crashes.with_leavers([crashes.explained(f, told[f.rank]) for f in found], returned))

    def pids(self) -> dict[int, int]:
        """Return the process ids by rank of the ranks on this machine."""
        return {rank: watched.process.pid for rank, watched in self._ranks.items() if not watched.process.host}

    # ---- the loop

    def supervise(self) -> None:
        """Hear and watch the ranks until the last one is reaped."""
        while self._living:
            dispatch(self._selector, self._patience())
            self._take_steps()
            self._publisher.flush()
            if len(self._living) >= MANY_RANKS:
                time.sleep(TURN_SECONDS)
        self._warn(self._mistakes.finish())
        self._selector.close()

    def _alive(self) -> list[_Watched]:
        return list(self._living.values())

    def _patience(self) -> float:
        """Return how long the loop may sleep: until the next thing that is due."""
        now = time.monotonic()
        waits = [5.0]
        if self._ladder is not None and (due := self._ladder.next_due()) is not None:
            waits.append(due - now)
        if (publish := self._publisher.seconds_until_due()) is not None:
            waits.append(publish)
        if self._hold_at is not None:
            waits.append(self._hold_at - now)
        if self._limits_count():
            waits += [due - self.stopwatch.now() for due, _ in self._limits()]
        if self._asked:
            waits.append(self._run.config.monitor_interval)
        return max(0.0, min(waits))

    def _take_steps(self) -> None:
        self._check_limits()
        if self._hold_at is not None and time.monotonic() >= self._hold_at and self.on_hold is not None:
            self._hold_at, self._held = None, True
            self.on_hold()
        for rank in list(self._asked):
            self.take_end(rank)
        if self._ladder is not None:
            self._ladder.climb(watched.process for watched in self._alive())

    def _check_limits(self) -> None:
        if not self._limits_count():
            return
        for due, reason in self._limits():
            if self.stopwatch.now() >= due:
                # Decided now: looking into the ranks sends signals, which can end the very call they are stuck in.
                self.stop_reason = StopReason(RunTimeoutError, reason)
                self._watch_for_stall.diagnose_then(partial(self._give_up, reason))
                return

    def _limits_count(self) -> bool:
        """Whether the run's time limits are in force: it runs, nobody is being asked, nobody looks into it already."""
        return not (self.stop_reason or self.stopwatch.standing or self.failures or self._watch_for_stall.busy)

    def _give_up(self, reason: str, verdict: str) -> None:
        self.stop(DEFAULT_GRACE, StopReason(RunTimeoutError, f"{reason}; {verdict}" if verdict else reason))

    def _report_stall(self, text: str) -> None:
        self._publisher.line("stderr", text)
        self._publisher.flush(force=True)

    def _limits(self) -> list[tuple[float, str]]:
        """Return when each limit is reached, by the run's stopwatch, and what to say then."""
        config = self._run.config
        limits = []
        if config.timeout is not None:
            limits.append((self._run.started + config.timeout, f"the run reached its timeout of {config.timeout:g} s"))
        if config.hang_timeout is not None:
            reason = f"no rank gave a sign of life for {config.hang_timeout:g} s (hang_timeout)"
            limits.append((self._last_sign_of_life + config.hang_timeout, reason))
        limits += self._watch_for_stall.limits()
        return limits

    # ---- what comes in

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

    def _keep_lines(self, rank: int, stream: str, text: str) -> None:
        self._run.store.add([Record(rank, time.time(), LogEvent(stream, text))])

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """See ``Hearing.take_output``."""
        outputs = self._ranks[rank].outputs
        if self.tap is not None:
            self.tap.take_output(rank, stream, data)
        if data:
            self._last_sign_of_life = self.stopwatch.now()
            outputs[stream].feed(data)
        elif stream in outputs:
            outputs.pop(stream).finish()

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``Hearing.take_frames``."""
        watched = self._ranks[rank]
        if self.tap is not None:
            watched.process.drain(self, channel=False)  # what the rank wrote before it said something goes before
            self.tap.take_frames(rank, data)
        self._take(watched, watched.decoder.feed(data))

    def take_aside(self, rank: int, data: bytes) -> None:
        """See ``Hearing.take_aside``."""
        self._take(self._ranks[rank], Decoder().feed(data))

    def _take(self, watched: _Watched, messages: list[Stamped]) -> None:
        if not messages:
            return
        rank, messages = watched.process.rank, watched.process.dated(messages)
        if any(type(event) is not HeartbeatEvent for _, event in messages):
            self._last_sign_of_life = self.stopwatch.now()
        self._run.store.add([Record(rank, stamp, event) for stamp, event in messages])
        for _, event in messages:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, watched, event)

    def _on_reply(self, watched: _Watched, event: Reply) -> None:
        if isinstance(event, CellReply):  # what the cell printed comes before its end
            watched.process.drain(self, channel=False)
            self._publisher.flush(force=True)
        self._run._desk.deliver(watched.process.rank, event)

    def _on_dump_ready(self, watched: _Watched, event: DumpReadyEvent) -> None:
        watched.process.open_dump(event.path)

    def _on_group_timeout(self, watched: _Watched, event: GroupTimeoutEvent) -> None:
        self._watch_for_stall.group_timeout = event.seconds

    def _on_debugger(self, watched: _Watched, event: DebuggerLeftEvent) -> None:
        self._run._board.drop(watched.process.rank)

    def _on_check(self, watched: _Watched, event: CheckEvent) -> None:
        self._warn(self._mistakes.note(watched.process.rank, event))

    def _warn(self, warnings: list[str]) -> None:
        for text in warnings:
            self._run.warnings.append(text)
            self._publisher.line("stderr", f"⚠ {text}")

    def _on_heartbeat(self, watched: _Watched, event: HeartbeatEvent) -> None:
        self._watch_for_stall.note(watched.process.rank, event, self.stopwatch)
        if time.monotonic() >= self._beat_due:
            self._beat_due = time.monotonic() + BEAT_SECONDS
            last = self._run.store.last_step
            running = [rank for rank, each in self._living.items() if each.info.state == "running"]
            self._warn(self._mistakes.beat({rank: last[rank] for rank in running if rank in last}))
        if event.moved > time.time() - 1.5 * HEARTBEAT_SECONDS:
            self._last_sign_of_life = self.stopwatch.now()

    def _on_status(self, watched: _Watched, event: StatusEvent) -> None:
        watched.info.state = event.state
        if event.state != "starting":
            self._starting.discard(watched.process.rank)
        if self._run.status == "starting" and not self._starting:
            self._run._set_status("running")

    def _on_result(self, watched: _Watched, event: ResultEvent) -> None:
        try:
            watched.info.result = load_bytes(event.payload)
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            message = f"the return value cannot be brought back: {type(error).__name__}: {error}"
            watched.outcome = event
            self._fail(RankFailure(watched.process.rank, "unpicklable", time.time(), message, exception=error), watched)
            return
        watched.outcome = event

    def _on_failure(self, watched: _Watched, event: FailureEvent) -> None:
        watched.outcome = event
        if event.kind == "quit" and self._ladder is None:
            self.stop(DEFAULT_GRACE, StopReason(RunStoppedError, f"the debugger of rank {watched.info.rank} was quit"))
        if event.kind in ("interrupted", "quit") and self._ladder is not None:
            watched.info.state = "stopped"
            return
        self._fail(failures.from_event(watched.process.rank, event), watched)

    def _on_display(self, watched: _Watched, event: DisplayEvent) -> None:
        self._publisher.display(event, self._label(watched.process.rank, watched.process.local_rank))

    def _on_input(self, watched: _Watched, event: InputRequest) -> None:
        if not watched.process.asks_here:
            where = f"node {watched.process.node} ({watched.process.host})"
            self._publisher.line("stderr", f"rank {watched.process.rank} waits for input in the notebook of {where}")
            return
        event.shown = tracebacks.name_cells(event.shown)
        question = Question(watched.process.rank, event, watched.process.channel, self.stopwatch.resume)
        known = question.of_debugger and question.rank in self._run._board.debugged()
        if not (self._run.config.block or self._run._prompts_in_cell or known):
            self._publisher.line("stderr", f"rank {question.rank} {_how_to_answer(question)}")
        self._publisher.flush(force=True)
        self.stopwatch.pause(question.rank)
        self._run._board.put(question)

    # ---- ends

    def take_end(self, rank: int) -> None:
        """See whether a rank has ended, and if so take in everything it left; see ``Hearing.take_end``."""
        watched = self._ranks[rank]
        end = None if watched.ended else watched.process.poll()
        if end is None:
            return
        watched.process.drain(self, channel=True)
        self._forget(watched)
        if self.tap is not None:
            self.tap.ended(rank, end)
        watched.info.exit = _exit_text(end)
        self._judge(watched, end)
        if self._held and self._ladder is None:  # its debugger was quit: the others are let go too
            self._ladder = Ladder(FAILURE_GRACE)

    def _forget(self, watched: _Watched) -> None:
        for output in watched.outputs.values():  # held open by something the rank left running
            output.finish()
        watched.process.disconnect(self._selector)
        watched.process.close()
        self._leave_out(watched)
        self.stopwatch.resume(watched.process.rank)
        self.stopwatch.resume(("paused", watched.process.rank))
        self._run._desk.close(watched.process.rank)
        self._run._board.drop(watched.process.rank)

    def _leave_out(self, watched: _Watched) -> None:
        watched.ended = True
        for table in (self._living, self._asked):
            table.pop(watched.process.rank, None)
        self._starting.discard(watched.process.rank)

    def _judge(self, watched: _Watched, end: Exit) -> None:
        info = watched.info
        if isinstance(watched.outcome, ResultEvent) and info.state != "failed":
            info.state = "succeeded"
        elif watched.outcome is None and self._died_alone(end):
            kills = failures.oom_kill_count() - self._oom_kills
            self._fail(failures.from_exit(info.rank, end, oom_kills=kills), watched)
        elif watched.outcome is None:
            info.state = "stopped"

    def _died_alone(self, end: Exit) -> bool:
        """Whether a rank that left no word ended before anything was done to end it."""
        untouched = self.stop_reason is None and (self._ladder is None or not self._ladder.begun)
        return untouched or end.signal not in (None, *_SENT)

    def _fail(self, failure: RankFailure, watched: _Watched) -> None:
        if self._held:
            watched.info.state = "stopped"
            return
        watched.info.state = "failed"
        self.failures.append(failure)
        if self.on_stopping is not None and len(self.failures) == 1 and self._ladder is None:
            self.on_stopping(None)
        if self._run.config.debug and self._ladder is None:
            self._hold_at = self._hold_at or time.monotonic() + SETTLE_SECONDS
        elif self._ladder is None:
            self._ladder = Ladder(FAILURE_GRACE, time.monotonic() + SETTLE_SECONDS)

    # ---- stopping

    def stop(self, grace: float, reason: StopReason) -> None:
        """Climb the ladder; a second call kills at once."""
        if self._asked_to_stop and self._ladder is not None:
            self._ladder.kill_now()
            return
        self._asked_to_stop = True
        self.stop_reason = reason
        if not self.failures:
            self._run._set_status("stopping")
        if self.on_stopping is not None:
            self.on_stopping(reason)
        self._begin_ladder(grace)

    @property
    def stopping(self) -> bool:
        """Whether the ranks are being stopped."""
        return self._ladder is not None

    def follow(self, reason: StopReason) -> bool:
        """Stop because another notebook of the run does; return whether that is news to this one."""
        if self._ladder is not None or self._held:
            return False
        self.stop_reason = reason
        self._run._set_status("stopping")
        self._begin_ladder(FAILURE_GRACE)
        return True

    def _begin_ladder(self, grace: float) -> None:
        self._ladder = Ladder(grace)
        for question in self._run._board.open_questions():
            if question.of_debugger:
                question.answer(None)  # a debugger takes a KeyboardInterrupt for itself

    def abandon(self) -> None:
        """Kill and reap everything, whatever state it is in."""
        for watched in self._alive():
            watched.process.send_signal(signal.SIGKILL, group=True)
            watched.process.send_signal(signal.SIGKILL)
            watched.process.await_end(ABANDON_SECONDS)
            watched.process.close()
            self._leave_out(watched)
            self._run._desk.close(watched.process.rank)
        self._selector.close()


_HANDLERS: dict[type[Event], Callable[[Group, _Watched, Any], None]] = {
    StatusEvent: Group._on_status,
    ResultEvent: Group._on_result,
    FailureEvent: Group._on_failure,
    DisplayEvent: Group._on_display,
    InputRequest: Group._on_input,
    HeartbeatEvent: Group._on_heartbeat,
    DumpReadyEvent: Group._on_dump_ready,
    GroupTimeoutEvent: Group._on_group_timeout,
    DebuggerLeftEvent: Group._on_debugger,
    CheckEvent: Group._on_check,
    **dict.fromkeys((StacksReply, AskReply, CompleteReply, DoneReply, CellReply), Group._on_reply),
}


_SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that stopping sends: a rank that dies of another one meanwhile has failed by itself."""


def _exit_text(end: Exit) -> str:
    if end.lost:
        return "lost"
    return f"exit {end.code}" if end.signal is None else failures._signal_name(end.signal)


def _how_to_answer(question: Question) -> str:
    if question.of_debugger:
        return f"is stopped at a breakpoint; run.debug(rank={question.rank}) opens it"
    return "waits for input; run.wait() asks you for it"


def _launch_environment(run: Run, attempt: int) -> dict[str, str]:
    from notebook_accelerate.config.environ import worker_variables

    return {
        **worker_variables(mixed_precision=run.config.mixed_precision, cpu=run.config.cpu),
        "TORCHELASTIC_RUN_ID": f"notebook-{os.getpid()}-{run.id}",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(run.config.max_restarts),
        **flight.environment(),
    }
