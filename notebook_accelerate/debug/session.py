"""What a kernel does with a run's ranks: look, ask, pause, break in."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from notebook_accelerate.debug import diagnosis, stack_dumps
from notebook_accelerate.debug.diagnosis import Diagnosis, RankPlace
from notebook_accelerate.debug.rank_requests import RankRequests
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
    PauseRequest,
    Reply,
    Request,
    ResumeRequest,
    StacksReply,
    StacksRequest,
)
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.rank_names import rank_names

ANSWER_SECONDS = 1.0
"""How long a rank's agent may take to say where it is; after that its signal handler says it."""
ROUND_SECONDS = 1.5
"""How long ranks have to come to a step boundary before those that have are let go to the next one."""


class Stacks(dict[int, tuple[FrameInfo, ...]]):
    """The main thread's frames by rank, outermost first; equal ones are folded when shown."""

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
    """Sees into the ranks of one run.

    Args:
        desk: Carries questions and replies.
        states: Returns every rank's state.
        name_place: Names a frame's place, as "Cell In[7], line 12".
    """

    def __init__(
        self, desk: RankRequests, states: Callable[[], dict[int, str]], name_place: Callable[[FrameInfo], str]
    ) -> None:
        self.desk = desk
        self._states = states
        self._name_place = name_place

    def places(self) -> list[RankPlace]:
        """Return where every rank is, also one that cannot answer."""
        open_ranks = self.desk.open_ranks()
        replies = self.desk.ask(open_ranks, StacksRequest, ANSWER_SECONDS)
        return [self._place(rank, state, replies.get(rank)) for rank, state in self._states().items()]

    def _place(self, rank: int, state: str, reply: object) -> RankPlace:
        if isinstance(reply, StacksReply):
            main = next(iter(reply.threads.values()), ())
            return RankPlace(rank, state, main, reply.moved, reply.waiting, reply.last, reply.paused)
        if rank not in self.desk.open_ranks():
            return RankPlace(rank, state)
        seen = self.desk.look(rank)
        frames = next(iter(stack_dumps.parse(seen.dump).values()), ())
        frames = tuple(f._replace(source=linecache.getline(f.filename, f.lineno).strip()) for f in frames)
        note = "it holds the interpreter in native code, and can only be looked at"
        if seen.native:
            note += f"; natively in {seen.native[-1]}"
        return RankPlace(rank, state, frames, note=note, answered=False, native=seen.native)

    def diagnose(self) -> Diagnosis:
        """Say why the run is stuck."""
        return diagnosis.diagnose(self.places(), self._name_place)

    def stacks(self, ranks: Iterable[int] | None = None) -> Stacks:
        """Return the main thread's frames by rank."""
        wanted = self._wanted(ranks)
        return Stacks({place.rank: place.frames for place in self.places() if place.rank in wanted}, self._name_place)

    def ask(self, expression: str, ranks: Iterable[int] | None, frame: str | None, timeout: float) -> dict[int, Any]:
        """Evaluate ``expression`` on ranks; see ``Run.ask``."""
        try:
            compile(expression, "<ask>", "eval")
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is not an expression: {error.msg}") from None
        wanted = self._wanted(ranks)
        replies = self.desk.ask(wanted, lambda number: AskRequest(number, expression, frame or ""), timeout)
        return {rank: self._value(rank, replies.get(rank)) for rank in wanted}

    def complete(self, text: str, rank: int, frame: str | None, timeout: float) -> list[str]:
        """Complete ``text`` with the names of a frame; see ``Run.complete``."""
        self._wanted([rank])
        reply = self.desk.ask([rank], lambda number: CompleteRequest(number, text, frame or ""), timeout).get(rank)
        return reply.matches if isinstance(reply, CompleteReply) else []

    def _value(self, rank: int, reply: object) -> Any:
        if not isinstance(reply, AskReply):
            return AskError(f"rank {rank} gave no answer: {self._why_silent(rank)}")
        if reply.error:
            return AskError(f"rank {rank}: {reply.error}")
        if reply.payload:
            try:
                return load_bytes(reply.payload)
            except Exception:  # noqa: BLE001 - its class may be unknown here; its repr is known
                return Shown(reply.shown)
        return Shown(reply.shown)

    def _why_silent(self, rank: int) -> str:
        if rank not in self.desk.open_ranks():
            return f"it is {self._states().get(rank, 'not there')}"
        if self._states().get(rank) == "starting":
            return "it has not come to the function yet"
        place = self._place(rank, "running", None)
        frame = place.user_frame
        return place.note + (f", at {self._name_place(frame)}" if frame is not None else "")

    def pause(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Have ranks wait at their next step boundary; return what each says.

        Ranks are rarely at the same line: one may be a step ahead, in a collective that it cannot leave while another
        is held. Those that are held go on to their next boundary then, until all have come to one.
        """
        wanted = self._wanted(ranks)
        deadline = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        sent = self.desk.send(wanted, PauseRequest)
        while True:
            round_end = min(deadline, time.monotonic() + ROUND_SECONDS)
            while len(replies) < len(sent) and (left := round_end - time.monotonic()) > 0:
                replies |= self.desk.collect(sent, left)
            if len(replies) == len(sent) or time.monotonic() >= deadline:
                self.desk.forget(sent)
                return self._told(wanted, replies)
            held = list(replies)
            replies.clear()
            self.desk.ask(held, ResumeRequest, ANSWER_SECONDS)
            sent |= self.desk.send(held, PauseRequest)

    def resume(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Let ranks go on."""
        return self._do(ResumeRequest, ranks, timeout)

    def break_into(self, rank: int, timeout: float) -> None:
        """Open the debugger of a rank that runs."""
        self._do(BreakRequest, [rank], timeout)

    def attach(self, rank: int, timeout: float) -> str:
        """Start debugpy in a rank and return its address, as "127.0.0.1:5678"."""
        return self._do(AttachRequest, [rank], timeout)[rank]

    def _do(self, make: Callable[[int], Request], ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        wanted = self._wanted(ranks)
        return self._told(wanted, self.desk.ask(wanted, make, timeout))

    def _told(self, wanted: list[int], replies: Mapping[int, Reply]) -> dict[int, str]:
        answers: dict[int, str] = {}
        for rank in wanted:
            reply = replies.get(rank)
            if isinstance(reply, DoneReply) and reply.error:
                raise NotebookAccelerateError(f"rank {rank}: {reply.error}")
            answers[rank] = reply.text if isinstance(reply, DoneReply) else f"no answer: {self._why_silent(rank)}"
        return answers

    def _wanted(self, ranks: Iterable[int] | None) -> list[int]:
        known = list(self._states())
        wanted = known if ranks is None else list(ranks)
        if unknown := [rank for rank in wanted if rank not in known]:
            raise ValueError(f"ranks={unknown} are not ranks of this run; there are {known}")
        return wanted


class Shown(str):
    """What a value that cannot travel looks like: its ``repr`` in the rank."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
