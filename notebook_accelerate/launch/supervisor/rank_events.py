"""Handle everything that the ranks of one attempt send: events, output and exits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from notebook_accelerate.debugging import sanity_checks
from notebook_accelerate.errors import ChannelClosedError, RunStoppedError
from notebook_accelerate.launch.output.publisher import line_label
from notebook_accelerate.launch.output.rank_output import RankOutput
from notebook_accelerate.launch.processes import shared_imports
from notebook_accelerate.launch.state import failures, rank_result
from notebook_accelerate.launch.state.prompts import Prompt
from notebook_accelerate.launch.state.run_commands import DEFAULT_GRACE
from notebook_accelerate.launch.state.run_events import (
    DebuggerLeft,
    PromptClosed,
    PromptOpened,
    RankPaused,
    RankResumed,
    RankReturned,
    RankRunning,
    RankStarted,
    RankStopped,
    WarningAdded,
)
from notebook_accelerate.launch.state.run_state import ENDED
from notebook_accelerate.launch.supervisor.command_queue import paused
from notebook_accelerate.launch.supervisor.stall_detector import StallDetector
from notebook_accelerate.launch.supervisor.stop_sequence import StopReason, StopSequence
from notebook_accelerate.launch.supervisor.supervised_ranks import SupervisedRank, SupervisedRanks
from notebook_accelerate.telemetry import (
    AgentFailedEvent,
    AnsweredEvent,
    Decoder,
    DeviceMemoryEvent,
    DeviceUseEvent,
    DisplayEvent,
    Event,
    ExitWaitEvent,
    FailureEvent,
    GroupTimeoutEvent,
    ImportedEvent,
    InputRequest,
    LogEvent,
    ResourceEvent,
    ResultEvent,
    Stamped,
    StatusEvent,
    steady_time,
    tracebacks,
)
from notebook_accelerate.telemetry.debug_protocol import (
    AskReply,
    CellReply,
    CheckEvent,
    CompleteReply,
    DebuggerLeftEvent,
    DoneReply,
    DumpReadyEvent,
    HeartbeatEvent,
    MemoryReply,
    PausedEvent,
    ProfileReply,
    Reply,
    SampleReply,
    StacksReply,
)
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    import selectors

    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.supervisor.supervisor import Supervisor


STEP_COMPARISON_SECONDS = 0.5
"""Minimum seconds between two comparisons of all ranks' steps."""
_NO_SIGNS_OF_LIFE = frozenset({HeartbeatEvent, ResourceEvent, DeviceMemoryEvent, DeviceUseEvent})
"""The events that a rank's agent or host sends even if the rank itself hangs."""


class RankEventHandler:
    """The supervisor's `RankListener`, which handles what the ranks of one attempt send.

    Args:
        supervisor: The run's supervisor.
        selector: The selector to register ranks with as they start.
        ranks: The table to add ranks to as they start.
        stops: The attempt's stop sequence, which decides what failures and exits mean.

    Attributes:
        last_activity: When a rank last sent anything or made progress, by the run's clock. It is updated by `record`.
        stall: Detects periods during which no rank makes progress.
    """

    def __init__(
        self, supervisor: Supervisor, selector: selectors.BaseSelector, ranks: SupervisedRanks, stops: StopSequence
    ) -> None:
        self._supervisor, self._selector, self._ranks, self._stops = supervisor, selector, ranks, stops
        self._journal, self._publisher, self._clock = supervisor.journal, supervisor.publisher, supervisor.clock
        self._prompts, self._requests = supervisor.commands.prompts, supervisor.commands.requests
        self._all = ranks.all  # Keep a direct reference, because the table is read for every event.
        self._label = functools.partial(line_label, supervisor.config.log_line_prefix_template)
        self._comparison_due = 0.0
        self._exit_waits: set[str] = set()
        self._unrecorded: list[Record] = []
        self._active = False  # Whether a rank has sent anything or made progress since the last call to `record`.
        self._checks = sanity_checks.SanityChecks(len(supervisor.state.ranks))
        self.last_activity = self._clock.now()
        self.stall = StallDetector(supervisor)

    def add(self, process: RankProcess) -> None:
        """Start listening to a rank that has started."""
        label = self._label(process.rank, process.local_rank)
        output = RankOutput(process.rank, label, self._keep_lines, self._publisher)
        # Add the rank before anything can fail, because only ranks in the table are reaped.
        self._ranks.add(SupervisedRank(process, output))
        # Open requests before recording the start, because an attached kernel may send one as soon as it sees that the
        # rank has started.
        self._requests.open(process.rank, process.channel, process.capture_stacks)
        self._journal.append(RankStarted(process.rank, process.pid, process.node, process.host))
        process.connect(self._selector, self)

    def finish(self) -> None:
        """Report the final findings of the sanity checks. Call this once the last rank has ended."""
        self.warn(self._checks.finish())

    def warn(self, warnings: list[str]) -> None:
        """Record the warnings in the journal, and show them to the user."""
        for text in warnings:
            self._journal.append(WarningAdded(text))
            self._publisher.line("stderr", f"⚠ {text}")

    def _keep_lines(self, rank: int, stream: str, text: str) -> None:
        self._unrecorded.append(Record(rank, steady_time.now(), LogEvent(stream, text)))

    def record(self) -> None:
        """Append to the journal everything that the ranks have sent since the last call."""
        if self._active:
            self._active, self.last_activity = False, self._clock.now()
        records, self._unrecorded = self._unrecorded, []
        self._journal.add(records)

    # ---- output and events

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        output = self._all[rank].output
        if data:
            self._active = True
            output.feed(stream, data)
        else:
            output.finish(stream)

    def on_frames(self, rank: int, data: bytes) -> None:
        supervised = self._all[rank]
        messages = self._decode(supervised, supervised.decoder, data)
        self._handle(supervised, messages)

    def on_host_frames(self, rank: int, data: bytes) -> None:
        supervised = self._all[rank]
        self._handle(supervised, self._decode(supervised, Decoder(), data))

    def _decode(self, supervised: SupervisedRank, decoder: Decoder, data: bytes) -> list[Stamped]:
        """Return the events that ``data`` completes.

        After invalid data, the channel is still read so that the rank does not block, but what arrives is ignored.
        """
        if supervised.channel_error:
            return []
        try:
            return decoder.feed(data)
        except ChannelClosedError as error:
            supervised.channel_error = str(error)
            supervised.output.expect_no_displays()
            lost = "its output is shown, but its metrics, prompts and result are lost"
            self.warn([f"the channel of rank {supervised.process.rank} ended, {error}; {lost}"])
            return []

    def _handle(self, supervised: SupervisedRank, messages: list[Stamped]) -> None:
        process, rank, handled = supervised.process, supervised.process.rank, []
        for stamp, event in process.in_local_time(messages):
            self._unrecorded.append(Record(rank, stamp, event))
            if (kind := type(event)) in _HANDLERS:
                handled.append(event)
            if kind not in _NO_SIGNS_OF_LIFE:
                self._active = True
        for event in handled:
            if type(event) is not HeartbeatEvent:
                self.record()  # Record what the ranks have sent so far before the handler appends its own events.
            _HANDLERS[type(event)](self, supervised, event)

    def _on_status(self, supervised: SupervisedRank, event: StatusEvent) -> None:
        if event.state == "running" and self._state_of(supervised) == "starting":
            self._journal.append(RankRunning(supervised.process.rank))

    def _on_result(self, supervised: SupervisedRank, event: ResultEvent) -> None:
        supervised.outcome, rank = event, supervised.process.rank
        descriptors = supervised.process.take_descriptors(2) if event.sizes is not None else ()
        result = rank_result.received(event, descriptors, rank)
        supervised.outcome = ResultEvent(b"")  # Drop the payload, which may be large.
        self._journal.append(RankReturned(rank, result))
        if event.error and event.error not in self._journal.state.warnings:
            self.warn([event.error])

    def _on_failure(self, supervised: SupervisedRank, event: FailureEvent) -> None:
        supervised.outcome, rank = event, supervised.process.rank
        if event.kind == "quit" and not self._stops.stopping:
            self._stops.stop(DEFAULT_GRACE, StopReason(RunStoppedError, f"the debugger of rank {rank} was quit"))
        if event.kind in ("interrupted", "quit") and self._stops.stopping:
            if self._state_of(supervised) not in ENDED:
                self._journal.append(RankStopped(rank))
            return
        self._stops.fail(failures.from_event(rank, event, self._supervisor.exceptions), supervised)

    def _on_display(self, supervised: SupervisedRank, event: DisplayEvent) -> None:
        # First show all output that was written before the display, including standard error.
        supervised.process.drain(self, channel=False)
        supervised.output.display(event)

    def _on_reply(self, supervised: SupervisedRank, event: Reply) -> None:
        if isinstance(event, CellReply):  # Show all of the cell's output before the reply, which marks the cell's end.
            supervised.process.drain(self, channel=False)
            supervised.output.settle()
            self._publisher.flush(force=True)
        self._requests.deliver(supervised.process.rank, event)

    def _on_dump_ready(self, supervised: SupervisedRank, event: DumpReadyEvent) -> None:
        supervised.process.open_dump(event.path)

    def _on_agent_failed(self, supervised: SupervisedRank, event: AgentFailedEvent) -> None:
        what = "ended: metrics, prompts and debugging no longer work there" if event.ended else "continues"
        self.warn([f"the agent of rank {supervised.process.rank} failed ({event.error}) and {what}"])

    def _on_exit_wait(self, supervised: SupervisedRank, event: ExitWaitEvent) -> None:
        if event.text not in self._exit_waits:  # All ranks usually wait for the same thing.
            self._exit_waits.add(event.text)
            self.warn([f"rank {supervised.process.rank} does not exit: {tracebacks.name_cells(event.text)}"])

    def _on_imported(self, _supervised: SupervisedRank, _event: ImportedEvent) -> None:
        shared_imports.learn(self._supervisor.function_name)

    # ---- progress and the lack of it

    def _on_group_timeout(self, supervised: SupervisedRank, event: GroupTimeoutEvent) -> None:
        self.stall.group_timeout = event.seconds

    def _on_check(self, supervised: SupervisedRank, event: CheckEvent) -> None:
        self.warn(self._checks.note(supervised.process.rank, event))

    def _on_heartbeat(self, supervised: SupervisedRank, event: HeartbeatEvent) -> None:
        if self.stall.note(supervised.process.rank, event):
            self._active = True
        if time.monotonic() >= self._comparison_due:
            self._comparison_due = time.monotonic() + STEP_COMPARISON_SECONDS
            self.record()
            last, state = self._journal.store.last_step, self._journal.state
            running = [rank for rank in self._ranks.living if state.rank(rank).state == "running"]
            self.warn(self._checks.check_progress({rank: last[rank] for rank in running if rank in last}))

    # ---- prompts

    def _on_input(self, supervised: SupervisedRank, event: InputRequest) -> None:
        event.shown = tracebacks.name_cells(event.shown)
        process = supervised.process
        prompt = Prompt(process.rank, event, process.channel, self._clock.resume)
        if prompt.of_debugger and self._stops.stopping:
            prompt.answer(None)  # The stop interrupted the debugger before its last answer arrived, so it asks again.
            return
        known = prompt.of_debugger and prompt.rank in self._prompts.debugged()
        if not (self._supervisor.config.block or self._prompts.shown_in_cell or known):
            self._publisher.line("stderr", f"rank {prompt.rank} {_how_to_answer(prompt)}")
        self._publisher.flush(force=True)
        self._clock.pause(prompt.rank)
        # Queue the prompt before recording it, because an attached kernel may answer as soon as it sees the event.
        self._prompts.put(prompt)
        self._journal.append(
            PromptOpened(prompt.rank, event.number, event.kind, event.prompt, event.password, event.shown)
        )

    def _on_answered(self, supervised: SupervisedRank, event: AnsweredEvent) -> None:
        rank = supervised.process.rank
        self._clock.resume(rank)
        if self._journal.state.prompts.get(rank) == event.number:
            self._journal.append(PromptClosed(rank, answered=True))
        self._prompts.withdraw(rank, event.number)

    def _on_debugger_left(self, supervised: SupervisedRank, event: DebuggerLeftEvent) -> None:
        self._drop_prompt(supervised.process.rank)

    def _on_paused(self, supervised: SupervisedRank, event: PausedEvent) -> None:
        rank = supervised.process.rank
        if event.paused != (rank in self._journal.state.paused):
            self._journal.append(RankPaused(rank) if event.paused else RankResumed(rank))

    def _drop_prompt(self, rank: int) -> None:
        if rank in self._journal.state.prompts:
            self._journal.append(PromptClosed(rank, answered=False))
        if rank in self._prompts.debugged():
            self._journal.append(DebuggerLeft(rank))
        self._prompts.drop(rank)

    # ---- exits

    def on_end(self, rank: int) -> None:
        """Check whether a rank has ended. If so, handle everything that it sent, and then its end."""
        supervised = self._all[rank]
        end = None if supervised.ended else supervised.process.poll()
        if end is None:
            self._ranks.poll_if_needed(supervised)
            return
        supervised.process.drain(self, channel=True)
        self._forget(supervised)
        self.record()
        self._stops.rank_exited(supervised, end)

    def _forget(self, supervised: SupervisedRank) -> None:
        rank = supervised.process.rank
        # Don't wait for the streams to close, because a child of the rank may keep them open.
        supervised.output.finish()
        supervised.process.disconnect(self._selector)
        supervised.process.close()
        self._ranks.remove(supervised)
        self._requests.close(rank)
        self.forget_prompt(rank)

    def forget_prompt(self, rank: int) -> None:
        """Drop the prompt of a rank that has ended, and resume the clock if the rank has suspended it."""
        self._clock.resume(rank)
        self._clock.resume(paused(rank))
        self._drop_prompt(rank)

    def _state_of(self, supervised: SupervisedRank) -> str:
        return self._journal.state.rank(supervised.process.rank).state


_HANDLERS: dict[type[Event], Callable[[RankEventHandler, SupervisedRank, Any], None]] = {
    StatusEvent: RankEventHandler._on_status,
    ResultEvent: RankEventHandler._on_result,
    FailureEvent: RankEventHandler._on_failure,
    DisplayEvent: RankEventHandler._on_display,
    ExitWaitEvent: RankEventHandler._on_exit_wait,
    ImportedEvent: RankEventHandler._on_imported,
    InputRequest: RankEventHandler._on_input,
    AnsweredEvent: RankEventHandler._on_answered,
    AgentFailedEvent: RankEventHandler._on_agent_failed,
    HeartbeatEvent: RankEventHandler._on_heartbeat,
    DumpReadyEvent: RankEventHandler._on_dump_ready,
    GroupTimeoutEvent: RankEventHandler._on_group_timeout,
    PausedEvent: RankEventHandler._on_paused,
    DebuggerLeftEvent: RankEventHandler._on_debugger_left,
    CheckEvent: RankEventHandler._on_check,
    **dict.fromkeys(
        (StacksReply, AskReply, SampleReply, ProfileReply, MemoryReply, CompleteReply, DoneReply, CellReply),
        RankEventHandler._on_reply,
    ),
}


def _how_to_answer(prompt: Prompt) -> str:
    if prompt.of_debugger:
        return f"is stopped at a breakpoint; notebook_accelerate.debug(rank={prompt.rank}) opens it"
    return "waits for input; run.wait() asks you for it"
