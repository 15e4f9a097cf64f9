"""Debug a run from the kernel: stacks, evaluation, pauses, breakpoints, and the requests to the ranks."""

from __future__ import annotations

import itertools
import linecache
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from notebook_accelerate.debugging.diagnosis import Diagnosis, RankPosition, diagnose
from notebook_accelerate.debugging.process_stacks import ProcessStacks, parse_dump
from notebook_accelerate.errors import AskError, ChannelClosedError, NotebookAccelerateError
from notebook_accelerate.telemetry import Event, FrameInfo
from notebook_accelerate.telemetry.channel import Sender
from notebook_accelerate.telemetry.debug_protocol import (
    AskReply,
    AskRequest,
    BreakRequest,
    CompleteReply,
    CompleteRequest,
    DebugpyRequest,
    DoneReply,
    MemoryReply,
    MemoryRequest,
    PauseRequest,
    ProfileReply,
    ProfileRequest,
    Reply,
    Request,
    SampleReply,
    SampleRequest,
    StacksReply,
    StacksRequest,
    UnpauseRequest,
)
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import frame_location

REPLY_SECONDS = 1.0
"""Time limit in seconds for a rank's agent to send stacks. After that, the rank's signal handler must write them."""
SAMPLE_REPLY_SECONDS = 10.0
"""Time limit in seconds for the reply after sampling. A rank cannot reply while its code holds the GIL."""
PROFILE_REPLY_SECONDS = 400.0
"""Time limit in seconds for a profile. A rank replies earlier if it takes no steps or is stuck."""
LIVE_SECONDS = 5.0
"""Time limit in seconds for a rank to reply before it is profiled. Ranks that do not reply are not profiled."""
ROUND_SECONDS = 1.5
"""Seconds for all ranks to reach a step boundary. After that, paused ranks resume until their next boundary."""

R = TypeVar("R", bound=Reply)


class Session:
    """Debugs the ranks of one run, by sending requests to them.

    Args:
        requests: Sends requests to the ranks and receives their replies.
        states: Returns the state of every rank.
    """

    def __init__(self, requests: RankRequests, states: Callable[[], dict[int, str]]) -> None:
        self.requests = requests
        self._states = states

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
        frames = next(iter(parse_dump(seen.dump).values()), ())
        frames = tuple(f._replace(source=linecache.getline(f.filename, f.lineno).strip()) for f in frames)
        note = seen.suspended or seen.problem or "it holds the GIL in native code and cannot reply"
        if seen.native:
            note += f"; natively in {seen.native[-1]}"
        return RankPosition(rank, state, frames, note=note, answered=False, native=seen.native)

    def diagnose(self) -> Diagnosis:
        """Explain why the run is stuck."""
        return diagnose(self.positions(), frame_location)

    def stacks(self, ranks: Iterable[int] | None = None) -> Stacks:
        """Return the frames of each rank's main thread."""
        wanted = self._wanted(ranks)
        return Stacks({each.rank: each.frames for each in self.positions() if each.rank in wanted}, frame_location)

    def ask(self, expression: str, ranks: Iterable[int] | None, frame: str | None, timeout: float) -> dict[int, Any]:
        """Evaluate ``expression`` on ranks, as ``Run.ask`` does."""
        try:
            compile(expression, "<ask>", "eval")
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is not an expression: {error.msg}") from None
        replies = self._ask(AskReply, lambda number: AskRequest(number, expression, frame or ""), ranks, timeout)
        return {rank: self._value(rank, reply) for rank, reply in replies.items()}

    def sample(self, seconds: float, ranks: Iterable[int] | None, rate: float) -> dict[int, SampleReply | str]:
        """Sample the stacks of ranks. For a rank that does not reply, the result is the reason. See ``Run.sample``."""
        limit = seconds + SAMPLE_REPLY_SECONDS
        return self._ask(SampleReply, lambda number: SampleRequest(number, seconds, rate), ranks, limit)

    def profile(
        self, make: Callable[[int], ProfileRequest], ranks: Iterable[int] | None
    ) -> dict[int, ProfileReply | str]:
        """Record steps of ranks. For a rank without a trace, the result is the reason. See ``Run.profile``.

        Args:
            make: Creates the request, given its number.
            ranks: The global indices of the ranks, or None for all ranks.
        """
        wanted = self._wanted(ranks)
        live = self.requests.ask(wanted, StacksRequest, LIVE_SECONDS)
        replies = self.requests.ask(list(live), make, make(0).seconds + PROFILE_REPLY_SECONDS)
        return {rank: _or_its_error(reply) for rank, reply in self._replies(ProfileReply, wanted, replies).items()}

    def memory(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, MemoryReply | str]:
        """Return a report of each rank's memory, or the reason why it is missing. See ``Run.memory``."""
        return {
            rank: _or_its_error(reply) for rank, reply in self._ask(MemoryReply, MemoryRequest, ranks, timeout).items()
        }

    def complete(self, text: str, rank: int, frame: str | None, timeout: float) -> list[str]:
        """Complete ``text`` with the names of a frame. See ``Run.complete``."""
        self._wanted([rank])
        reply = self.requests.ask([rank], lambda number: CompleteRequest(number, text, frame or ""), timeout).get(rank)
        return reply.matches if isinstance(reply, CompleteReply) else []

    def _ask(
        self, kind: type[R], make: Callable[[int], Request], ranks: Iterable[int] | None, timeout: float
    ) -> dict[int, R | str]:
        """Return the reply of each rank, or the reason why it did not reply."""
        wanted = self._wanted(ranks)
        return self._replies(kind, wanted, self.requests.ask(wanted, make, timeout))

    def _replies(self, kind: type[R], wanted: Iterable[int], replies: Mapping[int, Reply]) -> dict[int, R | str]:
        found: dict[int, R | str] = {}
        for rank in wanted:
            reply = replies.get(rank)
            found[rank] = reply if isinstance(reply, kind) else self._why_silent(rank)
        return found

    def _value(self, rank: int, reply: AskReply | str) -> Any:
        if isinstance(reply, str):
            return AskError(f"rank {rank} did not reply: {reply}")
        if reply.error:
            return AskError(f"rank {rank}: {reply.error}")
        if reply.payload:
            with suppress(Exception):  # The kernel may lack the value's class. In that case, return the repr.
                return load_bytes(reply.payload)
        return RemoteRepr(reply.shown)

    def _why_silent(self, rank: int) -> str:
        if rank not in self.requests.open_ranks():
            return f"it is {self._states().get(rank, 'not running')}"
        if self._states().get(rank) == "starting":
            return "it has not called the function yet"
        position = self._position(rank, "running", None)
        frame = position.user_frame
        return position.note + (f", at {frame_location(frame)}" if frame is not None else "")

    def pause(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Pause ranks at their next step boundary, and return each rank's reply.

        Ranks are rarely at the same line. One may be a step ahead, in a collective that it cannot leave while another
        rank is paused. In that case, the paused ranks resume until their next boundary, and so on until all are paused.
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
            self.requests.ask(paused, UnpauseRequest, REPLY_SECONDS)
            sent |= self.requests.send(paused, PauseRequest)

    def unpause(self, ranks: Iterable[int] | None, timeout: float) -> dict[int, str]:
        """Resume paused ranks, and return each rank's reply."""
        return self._do(UnpauseRequest, ranks, timeout)

    def break_into(self, rank: int, timeout: float) -> None:
        """Open the debugger in a running rank, at the next bytecode of its main thread."""
        self._do(BreakRequest, [rank], timeout)

    def debugpy(self, rank: int, timeout: float) -> str:
        """Start debugpy in a rank and return its address, such as "127.0.0.1:5678"."""
        return self._do(DebugpyRequest, [rank], timeout)[rank]

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


class Stacks(dict[int, tuple[FrameInfo, ...]]):
    """The main thread's frames on each rank, outermost first. The ``repr`` groups ranks with equal stacks."""

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


def _or_its_error(reply: ProfileReply | MemoryReply | str) -> Any:
    return reply if isinstance(reply, str) else reply.error or reply


class RemoteRepr(str):
    """The ``repr`` of a value that cannot be sent to the kernel."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# ---- requests and replies


class RankRequests:
    """Sends requests to the ranks of a run, and collects their replies.

    Use this on any thread except the supervisor's, which delivers the replies.

    Attributes:
        elsewhere: The text of the error that says why this notebook cannot send requests, or "" if it can.
        relay: Called with replies that no request in this process waits for.
        on_change: Called on the supervisor's thread when a rank starts or stops accepting requests.
    """

    def __init__(self) -> None:
        self.elsewhere = ""
        self.relay: Callable[[int, Reply], None] = lambda _rank, _reply: None
        self.on_change: Callable[[], None] = lambda: None
        self._numbers = itertools.count(secrets.randbelow(1 << 40))
        self._changed = threading.Condition()
        self._channels: dict[int, Sender] = {}
        self._captures: dict[int, Callable[[], ProcessStacks]] = {}
        self._replies: dict[tuple[int, int], Reply] = {}
        self._awaited: dict[tuple[int, int], Sender | None] = {}

    def open(self, rank: int, channel: Sender, capture_stacks: Callable[[], ProcessStacks]) -> None:
        """Register a rank that has started.

        Args:
            rank: The rank's global index.
            channel: Sends requests to the rank.
            capture_stacks: Reads the rank's stacks from outside.
        """
        with self._changed:
            self._channels[rank], self._captures[rank] = channel, capture_stacks
        self.on_change()

    def close(self, rank: int) -> None:
        """Remove a rank that has exited, and stop waiting for its replies."""
        with self._changed:
            self._channels.pop(rank, None)
            self._captures.pop(rank, None)
            self._changed.notify_all()
        self.on_change()

    def capture_stacks(self, rank: int) -> ProcessStacks:
        """Read the stacks of a rank that cannot reply. If the rank has exited, the stacks are empty."""
        with self._changed:
            capture_stacks = self._captures.get(rank)
        return capture_stacks() if capture_stacks is not None else ProcessStacks()

    def open_ranks(self) -> list[int]:
        """Return the ranks that accept requests, in order.

        Raises:
            ValueError: Another notebook controls the run.
        """
        self._check_here()
        with self._changed:
            return sorted(self._channels)

    def deliver(self, rank: int, reply: Reply) -> None:
        """Handle a reply. If no request in this process waits for the reply, relay it."""
        with self._changed:
            if (rank, reply.number) in self._awaited:
                self._replies[rank, reply.number] = reply
                self._changed.notify_all()
                return
        self.relay(rank, reply)

    def forward(self, rank: int, events: Iterable[Event]) -> None:
        """Forward another process's requests to a rank, and relay its replies. Do nothing if the rank has exited."""
        with self._changed:
            channel = self._channels.get(rank)
        if channel is not None:
            with suppress(ChannelClosedError):
                channel.send(*events)

    def ask(self, ranks: Iterable[int], make: Callable[[int], Request], timeout: float) -> dict[int, Reply]:
        """Send a request to each rank and return the replies that arrive within ``timeout`` seconds.

        Args:
            ranks: The global indices of the ranks.
            make: Creates a request, given its number.
            timeout: The maximum number of seconds to wait for all replies.
        """
        keys = set(self.send(ranks, make).items())
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._missing(keys) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._forget(keys)
            return {rank: self._replies.pop((rank, number)) for rank, number in keys if (rank, number) in self._replies}

    def send(self, ranks: Iterable[int], make: Callable[[int], Request]) -> dict[int, int]:
        """Send a request to each living rank and return the numbers for ``collect``, by rank.

        Raises:
            ValueError: Another notebook controls the run.
        """
        self._check_here()
        return {rank: number for rank in ranks if (number := self._send(rank, make)) is not None}

    def collect(self, sent: dict[int, int], timeout: float) -> dict[int, Reply]:
        """Wait up to ``timeout`` seconds for a reply to the ``sent`` requests, and return all that have arrived."""
        with self._changed:
            if not any(key in self._replies for key in sent.items()):
                self._changed.wait(timeout)
            found = {rank: self._replies.pop((rank, n)) for rank, n in sent.items() if (rank, n) in self._replies}
            self._forget((rank, sent[rank]) for rank in found)
            return found

    def forget(self, sent: dict[int, int]) -> None:
        """Stop waiting for replies to the ``sent`` requests."""
        with self._changed:
            self._forget(sent.items())

    def _forget(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            self._awaited.pop(key, None)

    def _check_here(self) -> None:
        if self.elsewhere:
            raise ValueError(self.elsewhere)

    def _send(self, rank: int, make: Callable[[int], Request]) -> int | None:
        with self._changed:
            channel = self._channels.get(rank)
            number = next(self._numbers)
            self._awaited[rank, number] = channel
        if channel is not None:
            with suppress(ChannelClosedError):
                channel.send(make(number))
                return number
        self._forget([(rank, number)])
        return None

    def _missing(self, keys: set[tuple[int, int]]) -> bool:
        """Return whether a reply may still arrive. A rank that was restarted has a new channel, and will not reply."""
        return any(
            key not in self._replies
            and (channel := self._channels.get(key[0])) is not None
            and channel is self._awaited.get(key)
            for key in keys
        )
