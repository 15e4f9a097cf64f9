"""What the ranks of one attempt say, write and come to: all of it is heard here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from notebook_accelerate.debug import sanity_checks
from notebook_accelerate.errors import RunStoppedError
from notebook_accelerate.launch.output.rank_output import Label, Publisher, RankOutput
from notebook_accelerate.launch.run import DEFAULT_GRACE, Run
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.prompts import Prompt
from notebook_accelerate.launch.supervisor.stall_detector import StallDetector
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank, SupervisedRanks
from notebook_accelerate.telemetry import (
    AnsweredEvent,
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
    tracebacks,
)
from notebook_accelerate.telemetry.debug_protocol import (
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
from notebook_accelerate.telemetry.payload import load_bytes
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    import selectors

    from notebook_accelerate.launch.hosts.rendezvous.rank_mirror import RankMirror
    from notebook_accelerate.launch.processes.rank_process import Exit, RankProcess
    from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock

BEAT_SECONDS = 0.5
"""Least time between two comparisons of all ranks' steps."""


class RankEventHandler:
    """Hears the ranks of one attempt, on the thread that waits on the selector; see ``RankListener``.

    Args:
        run: What is heard is kept there.
        publisher: Where output is shown.
        selector: What the ranks are heard by is registered there.
        ranks: They are added here as they start.
        ending: Is told of failures and ends.
        stopwatch: Stands still while a rank waits for the user.

    Attributes:
        last_sign_of_life: When a rank has last said or done something, by the stopwatch.
        stall: Is told how the ranks move.
        tap: Gets a copy of what is heard of the ranks, for the first of several notebooks.
    """

    def __init__(
        self,
        run: Run,
        publisher: Publisher,
        selector: selectors.BaseSelector,
        ranks: SupervisedRanks,
        ending: StopSequence,
        stopwatch: PausableClock,
    ) -> None:
        self._run, self._publisher, self._selector, self._ranks = run, publisher, selector, ranks
        self._all = ranks.all  # looked into for every report
        self._ending, self._stopwatch = ending, stopwatch
        self._label = Label(run.config.log_line_prefix_template)
        self._beat_due = 0.0
        self._mistakes = sanity_checks.SanityChecks(len(run.ranks))
        self.last_sign_of_life = stopwatch.now()
        self.stall = StallDetector(run, self._report_stall)
        self.tap: RankMirror | None = None

    def attend(self, process: RankProcess) -> None:
        """Hear a rank that has started."""
        info = self._run._info(process.rank)
        info.pid, info.node, info.host = process.pid, process.node, process.host
        label = self._label(process.rank, process.local_rank)
        outputs = {
            stream: RankOutput(process.rank, stream, label, self._keep_lines, self._publisher)
            for stream in ("stdout", "stderr")
        }
        self._ranks.add(SupervisedRank(process, info, outputs))
        self._run._desk.open(process.rank, process.channel, process.look)
        if self.tap is not None:
            self.tap.started(process)
        process.connect(self._selector, self)

    def finish(self) -> None:
        """The last rank has ended."""
        self._warn(self._mistakes.finish())

    def _keep_lines(self, rank: int, stream: str, text: str) -> None:
        self._run.store.add([Record(rank, time.time(), LogEvent(stream, text))])

    def _report_stall(self, text: str) -> None:
        self._publisher.line("stderr", text)
        self._publisher.flush(force=True)

    # ---- what comes in

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """See ``RankListener.take_output``."""
        outputs = self._all[rank].outputs
        if self.tap is not None:
            self.tap.take_output(rank, stream, data)
        if data:
            self.last_sign_of_life = self._stopwatch.now()
            outputs[stream].feed(data)
        elif stream in outputs:
            outputs.pop(stream).finish()

    def take_frames(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_frames``."""
        watched = self._all[rank]
        if self.tap is not None:
            watched.process.drain(self, channel=False)  # what the rank wrote before it said something goes before
            self.tap.take_frames(rank, data)
        self._take(watched, watched.decoder.feed(data))

    def take_aside(self, rank: int, data: bytes) -> None:
        """See ``RankListener.take_aside``."""
        self._take(self._all[rank], Decoder().feed(data))

    def _take(self, watched: SupervisedRank, messages: list[Stamped]) -> None:
        if not messages:
            return
        rank, messages = watched.process.rank, watched.process.dated(messages)
        if any(type(event) is not HeartbeatEvent for _, event in messages):
            self.last_sign_of_life = self._stopwatch.now()
        self._run.store.add([Record(rank, stamp, event) for stamp, event in messages])
        for _, event in messages:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, watched, event)

    def _on_reply(self, watched: SupervisedRank, event: Reply) -> None:
        if isinstance(event, CellReply):  # what the cell printed comes before its end
            watched.process.drain(self, channel=False)
            self._publisher.flush(force=True)
        self._run._desk.deliver(watched.process.rank, event)

    def _on_dump_ready(self, watched: SupervisedRank, event: DumpReadyEvent) -> None:
        watched.process.open_dump(event.path)

    def _on_group_timeout(self, watched: SupervisedRank, event: GroupTimeoutEvent) -> None:
        self.stall.group_timeout = event.seconds

    def _on_debugger(self, watched: SupervisedRank, event: DebuggerLeftEvent) -> None:
        self._run._board.drop(watched.process.rank)

    def _on_check(self, watched: SupervisedRank, event: CheckEvent) -> None:
        self._warn(self._mistakes.note(watched.process.rank, event))

    def _warn(self, warnings: list[str]) -> None:
        for text in warnings:
            self._run.warnings.append(text)
            self._publisher.line("stderr", f"⚠ {text}")

    def _on_heartbeat(self, watched: SupervisedRank, event: HeartbeatEvent) -> None:
        self.stall.note(watched.process.rank, event, self._stopwatch)
        if time.monotonic() >= self._beat_due:
            self._beat_due = time.monotonic() + BEAT_SECONDS
            last = self._run.store.last_step
            running = [rank for rank, each in self._ranks.living.items() if each.info.state == "running"]
            self._warn(self._mistakes.beat({rank: last[rank] for rank in running if rank in last}))
        if event.moved > time.time() - 1.5 * HEARTBEAT_SECONDS:
            self.last_sign_of_life = self._stopwatch.now()

    def _on_status(self, watched: SupervisedRank, event: StatusEvent) -> None:
        watched.info.state = event.state
        if event.state != "starting":
            self._ranks.starting.discard(watched.process.rank)
        if self._run.status == "starting" and not self._ranks.starting:
            self._run._set_status("running")

    def _on_result(self, watched: SupervisedRank, event: ResultEvent) -> None:
        try:
            watched.info.result = load_bytes(event.payload)
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            message = f"the return value cannot be brought back: {type(error).__name__}: {error}"
            watched.outcome = event
            failure = RankFailure(watched.process.rank, "unpicklable", time.time(), message, exception=error)
            self._ending.fail(failure, watched)
            return
        watched.outcome = event

    def _on_failure(self, watched: SupervisedRank, event: FailureEvent) -> None:
        watched.outcome = event
        if event.kind == "quit" and not self._ending.stopping:
            reason = StopReason(RunStoppedError, f"the debugger of rank {watched.info.rank} was quit")
            self._ending.stop(DEFAULT_GRACE, reason)
        if event.kind in ("interrupted", "quit") and self._ending.stopping:
            watched.info.state = "stopped"
            return
        self._ending.fail(failures.from_event(watched.process.rank, event), watched)

    def _on_display(self, watched: SupervisedRank, event: DisplayEvent) -> None:
        self._publisher.display(event, self._label(watched.process.rank, watched.process.local_rank))

    def _on_input(self, watched: SupervisedRank, event: InputRequest) -> None:
        event.shown = tracebacks.name_cells(event.shown)
        process, resume = watched.process, self._stopwatch.resume
        question = Prompt(process.rank, event, process.channel, resume, here=process.asks_here)
        if question.of_debugger and self._ending.stopping:
            question.answer(None)  # the interrupt has come before the answer to its last question: it asks again
            return
        known = question.of_debugger and question.rank in self._run._board.debugged()
        if question.here and not (self._run.config.block or self._run._prompts_in_cell or known):
            self._publisher.line("stderr", f"rank {question.rank} {_how_to_answer(question)}")
        self._publisher.flush(force=True)
        self._stopwatch.pause(question.rank)
        self._run._board.put(question)

    def _on_answered(self, watched: SupervisedRank, event: AnsweredEvent) -> None:
        self._stopwatch.resume(watched.process.rank)
        self._run._board.withdraw(watched.process.rank, event.number)

    # ---- ends

    def take_end(self, rank: int) -> None:
        """See whether a rank has ended, and if so take in everything it left; see ``RankListener.take_end``."""
        watched = self._all[rank]
        end = None if watched.ended else watched.process.poll()
        if end is None:
            return
        watched.process.drain(self, channel=True)
        self._forget(watched)
        if self.tap is not None:
            self.tap.ended(rank, end)
        watched.info.exit = _exit_text(end)
        self._ending.judge(watched, end)

    def _forget(self, watched: SupervisedRank) -> None:
        for output in watched.outputs.values():  # held open by something the rank left running
            output.finish()
        watched.process.disconnect(self._selector)
        watched.process.close()
        self._ranks.leave_out(watched)
        self._stopwatch.resume(watched.process.rank)
        self._stopwatch.resume(("paused", watched.process.rank))
        self._run._desk.close(watched.process.rank)
        self._run._board.drop(watched.process.rank)


_HANDLERS: dict[type[Event], Callable[[RankEventHandler, SupervisedRank, Any], None]] = {
    StatusEvent: RankEventHandler._on_status,
    ResultEvent: RankEventHandler._on_result,
    FailureEvent: RankEventHandler._on_failure,
    DisplayEvent: RankEventHandler._on_display,
    InputRequest: RankEventHandler._on_input,
    AnsweredEvent: RankEventHandler._on_answered,
    HeartbeatEvent: RankEventHandler._on_heartbeat,
    DumpReadyEvent: RankEventHandler._on_dump_ready,
    GroupTimeoutEvent: RankEventHandler._on_group_timeout,
    DebuggerLeftEvent: RankEventHandler._on_debugger,
    CheckEvent: RankEventHandler._on_check,
    **dict.fromkeys((StacksReply, AskReply, CompleteReply, DoneReply, CellReply), RankEventHandler._on_reply),
}


def _exit_text(end: Exit) -> str:
    if end.lost:
        return "lost"
    return f"exit {end.code}" if end.signal is None else failures._signal_name(end.signal)


def _how_to_answer(question: Prompt) -> str:
    if question.of_debugger:
        return f"is stopped at a breakpoint; run.debug(rank={question.rank}) opens it"
    return "waits for input; run.wait() asks you for it"


__all__ = ["RankEventHandler"]
