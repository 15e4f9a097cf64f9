"""Debugging of a run from the kernel: stacks, evaluation, pauses and breakpoints."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from notebook_accelerate.debugging import diagnosis, stack_dumps
from notebook_accelerate.debugging.diagnosis import Diagnosis, RankPosition
from notebook_accelerate.debugging.rank_requests import RankRequests
from notebook_accelerate.errors import AskError, NotebookAccelerateError
from notebook_accelerate.telemetry import FrameInfo
from notebook_accelerate.telemetry.debug_protocol import (
    AskReply,
    AskRequest,
    AttachRequest,
    BreakRequest,
    CompleteReply,
    CompleteRequest,
    DoneReply,
    MemoryReply,
    MemoryRequest,
    PauseRequest,
    ProfileReply,
    ProfileRequest,
    Reply,
    Request,
    ResumeRequest,
    SampleReply,
    SampleRequest,
    StacksReply,
    StacksRequest,
)
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.rank_devices import rank_names

REPLY_SECONDS = 1.0
"""Time limit of a rank's agent for its stacks; after it, the rank's signal handler writes them."""
SAMPLE_REPLY_SECONDS = 10.0
"""Time limit of the reply after the samples: a rank that holds the GIL replies when it releases it."""
PROFILE_REPLY_SECONDS = 400.0
"""Time limit of a profile's reply: the rank itself replies earlier where it sees no steps, or is stuck."""
LIVE_SECONDS = 5.0
"""Time limit of the sign of life before a profile: a rank without one is not waited for."""
ROUND_SECONDS = 1.5
"""Time to reach a step boundary; after it, the ranks that have reached one resume until their next one."""


class Stacks(dict[int, tuple[FrameInfo, ...]]):
    """The main thread's frames by rank, outermost first; the ``repr`` groups ranks with equal stacks."""

    def __init__(self, stacks: Mapping[int, tuple[FrameInfo, ...]], name_place: Callable[[FrameInfo], str]) -> None:
        super().__init__(stacks)
        self._name_place = name_place

    def __repr__(self) -> str:
        folded: dict[tuple[FrameInfo, ...], list[int]] = {}
        for rank, frames in self.items():
            folded.setdefault(frames, []).append(rank)
        lines: list[str] = []
        for frames, ranks in folded.items():
            lines.append(rank_names(ranks) + ":")
            for frame in frames:
                lines.append(f"  {self._name_place(frame)}, in {frame.function}")
                if frame.source:
                    lines.append(f"    {frame.source}")
        return "\n".join(lines)


class Session:
    """Debugs the ranks of one run.

    Args:
        requests: Sends requests and receives replies.
        states: Returns every rank's state.
        name_place: Returns the location of a frame, as "Cell In[7], line 12".
    """

    def __init__(
        self, requests: RankRequests, states: Callable[[], dict[int, str]], name_place: Callable[[FrameInfo], str]
    ) -> None:
        self.requests = requests
        self._states = states
        self._name_place = name_place

    def positions(self) -> list[RankPosition]:
        """Return the position of every rank, including ranks that cannot reply."""
        open_ranks = self.requests.open_ranks()
        replies = self.requests.ask(open_ranks, StacksRequest, REPLY_SECONDS)
        return [self._position(rank, state, replies.get(rank)) for rank, state in self._states().items()]

    def _position(self, rank: int, state: str, reply: object) -> RankPosition:
        if isinstance(reply, StacksReply):
            main = next(iter(reply.threads.values()), ())
            return RankPosition(
                rank, state, main, reply.moved, reply.waiting, reply.last, reply.paused, paused=reply.by_user
            )
        if rank not in self.requests.open_ranks():
            return RankPosition(rank, state)
        seen = self.requests.capture_stacks(rank)
        frames = next(iter(stack_dumps.parse(seen.dump).values()), ())
        frames = tuple(f._replace(source=linecache.getline(f.filename, f.lineno).strip()) for f in frames)
        note = seen.suspended or seen.problem or "it holds the GIL in native code and cannot reply"
        if seen.native:
            note += f"; natively in {seen.native[-1]}"
        return RankPosition(rank, state, frames, note=note, answered=False, native=seen.native)

    def diagnose(self) -> Diagnosis:
        """Explain why the run is stuck."""
        return diagnosis.diagnose(self.positions(), self._name_place)

    def stacks(self, ranks: Iterable[int] | None = None) -> Stacks:
        """Return the main thread's frames by rank."""
        wanted = self._wanted(ranks)
        return Stacks({each.rank: each.frames for each in self.positions() if each.rank in wanted}, self._name_place)

    def ask(self, expression: str, ranks: Iterable[int] | None, frame: str | None, timeout: float) -> dict[int, Any]:
        """Evaluate ``expression`` on ranks; see ``Run.ask``."""
        try:
            compile(expression, "<ask>", "eval")
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is not an expression: {error.msg}") from None
        wanted = self._wanted(ranks)
        replies = self.requests.ask(wanted, lambda number: AskRequest(number, expression, frame or ""), timeout)
        return {rank: self._value(rank, replies.get(rank)) for rank in wanted}

    def sample(self, seconds: float, ranks: Iterable[int] | None, rate: float) -> dict[int, SampleReply | str]:
        """Sample the stacks of ranks; see ``Run.sample``. Return why for a rank that does not reply."""
        wanted = self._wanted(ranks)
        limit = seconds + SAMPLE_REPLY_SECONDS
        replies = self.requests.ask(wanted, lambda number: SampleRequest(number, seconds, rate), limit)
        found: dict[int, SampleReply | str] = {}
        for rank in wanted:
            reply = replies.get(rank)
            found[rank] = reply if isinstance(reply, SampleReply) else self._why_silent(rank)
        return found

    def profile(
        self, make: Callable[[int], ProfileRequest], ranks: Iterable[int] | None
    ) -> dict[int, ProfileReply | str]:
        """Record steps of ranks; see ``Run.profile``. Return why for a rank without a trace.

        Args:
            make: Creates the request with a number.
            ranks: Global indices; None means all.
        """
        wanted = self._wanted(ranks)
        live = self.requests.ask(wanted, StacksRequest, LIVE_SECONDS)
        replies = self.requests.ask(list(live), make, make(0).seconds + PROFILE_REPLY_SECONDS)
        return {rank: self._profiled(rank, replies.get(rank)) for rank in wanted}

    def _profiled(self, rank: int, reply: object) -> ProfileReply | str:
        if not isinstance(reply, ProfileReply):
            return self._why_silent(rank)
        return reply.error or reply

    def memory(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, MemoryReply | str]:
        """Return what the memory of ranks holds, or why it is not known; see ``Run.memory``."""
        wanted = self._wanted(ranks)
        replies = self.requests.ask(wanted, MemoryRequest, timeout)
        found: dict[int, MemoryReply | str] = {}
        for rank in wanted:
            reply = replies.get(rank)
            found[rank] = reply.error or reply if isinstance(reply, MemoryReply) else self._why_silent(rank)
        return found

    def complete(self, text: str, rank: int, frame: str | None, timeout: float) -> list[str]:
        """Complete ``text`` with the names of a frame; see ``Run.complete``."""
        self._wanted([rank])
        reply = self.requests.ask([rank], lambda number: CompleteRequest(number, text, frame or ""), timeout).get(rank)
        return reply.matches if isinstance(reply, CompleteReply) else []

    def _value(self, rank: int, reply: object) -> Any:
        if not isinstance(reply, AskReply):
            return AskError(f"rank {rank} did not reply: {self._why_silent(rank)}")
        if reply.error:
            return AskError(f"rank {rank}: {reply.error}")
        if reply.payload:
            with suppress(Exception):  # the kernel may lack its class, and shows the repr
                return load_bytes(reply.payload)
        return RemoteRepr(reply.shown)

    def _why_silent(self, rank: int) -> str:
        if rank not in self.requests.open_ranks():
            return f"it is {self._states().get(rank, 'not running')}"
        if self._states().get(rank) == "starting":
            return "it has not called the function yet"
        position = self._position(rank, "running", None)
        frame = position.user_frame
        return position.note + (f", at {self._name_place(frame)}" if frame is not None else "")

    def pause(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Pause ranks at their next step boundary; return each rank's reply.

        Ranks are rarely at the same line: one may be a step ahead, in a collective that it cannot leave while another
        rank is paused. The paused ranks then resume until their next boundary, until all ranks are paused.
        """
        wanted = self._wanted(ranks)
        deadline = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        sent = self.requests.send(wanted, PauseRequest)
        while True:
            round_end = min(deadline, time.monotonic() + ROUND_SECONDS)
            while len(replies) < len(sent) and (left := round_end - time.monotonic()) > 0:
                replies |= self.requests.collect(sent, left)
            if len(replies) == len(sent) or time.monotonic() >= deadline:
                self.requests.forget(sent)
                return self._texts(wanted, replies)
            paused = list(replies)
            replies.clear()
            self.requests.ask(paused, ResumeRequest, REPLY_SECONDS)
            sent |= self.requests.send(paused, PauseRequest)

    def resume(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Resume paused ranks."""
        return self._do(ResumeRequest, ranks, timeout)

    def break_into(self, rank: int, timeout: float) -> None:
        """Open the debugger of a running rank."""
        self._do(BreakRequest, [rank], timeout)

    def attach(self, rank: int, timeout: float) -> str:
        """Start debugpy in a rank and return its address, as "127.0.0.1:5678"."""
        return self._do(AttachRequest, [rank], timeout)[rank]

    def _do(self, make: Callable[[int], Request], ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        wanted = self._wanted(ranks)
        return self._texts(wanted, self.requests.ask(wanted, make, timeout))

    def _texts(self, wanted: list[int], replies: Mapping[int, Reply]) -> dict[int, str]:
        answers: dict[int, str] = {}
        for rank in wanted:
            reply = replies.get(rank)
            if isinstance(reply, DoneReply) and reply.error:
                raise NotebookAccelerateError(f"rank {rank}: {reply.error}")
            answers[rank] = reply.text if isinstance(reply, DoneReply) else f"no reply: {self._why_silent(rank)}"
        return answers

    def _wanted(self, ranks: Iterable[int] | None) -> list[int]:
        known = list(self._states())
        wanted = known if ranks is None else list(ranks)
        if unknown := [rank for rank in wanted if rank not in known]:
            raise ValueError(f"ranks={unknown} are not ranks of this run; its ranks are {known}")
        return wanted


class RemoteRepr(str):
    """The ``repr`` of a value that cannot be sent to the kernel."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
