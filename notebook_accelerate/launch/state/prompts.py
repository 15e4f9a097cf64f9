"""Ranks that wait for a line of text, and who answers them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import InputReply, InputRequest
from notebook_accelerate.telemetry.channel import Sender


@dataclass
class Prompt:
    """A rank that waits for a line of text.

    Attributes:
        rank: Global index.
        request: What it asks.
        channel: The way down to it.
        answered: Called with the rank as soon as it is answered here.
        here: Whether this notebook's user is asked; of another notebook's rank the question can be answered here too.
        over: Whether it has been answered.
    """

    rank: int
    request: InputRequest
    channel: Sender
    answered: Callable[[int], None]
    here: bool = True
    over: bool = False

    @property
    def of_debugger(self) -> bool:
        """Whether a debugger asks."""
        return self.request.kind == "debugger"

    def answer(self, text: str | None) -> None:
        """Send the line; None means there is none. A rank that has ended meanwhile needs no answer."""
        self.answered(self.rank)
        with suppress(ChannelClosedError):
            self.channel.send(InputReply(text, self.request.number))


class PromptQueue:
    """The open questions of a run, one per rank at most; safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, Prompt] = {}
        self._last: dict[int, Prompt] = {}
        self._debugged: set[int] = set()
        self._closed = False
        self._endings = 0

    def put(self, question: Prompt) -> None:
        """A rank asks."""
        with self._changed:
            self._open[question.rank] = self._last[question.rank] = question
            if question.of_debugger:
                self._debugged.add(question.rank)
            self._changed.notify_all()

    def give_back(self, question: Prompt) -> None:
        """Whoever took a question has not answered it: it is open again, unless it is over meanwhile."""
        with self._changed:
            if self._last.get(question.rank) is question and not question.over:
                self._open[question.rank] = question
                self._changed.notify_all()

    def drop(self, rank: int) -> None:
        """A rank has ended, or its debugger has let it go: it asks nothing any longer."""
        with self._changed:
            self._open.pop(rank, None)
            self._last.pop(rank, None)
            self._debugged.discard(rank)
            self._changed.notify_all()

    def withdraw(self, rank: int, number: int) -> None:
        """A rank has its answer to question ``number``, from here or from another notebook."""
        with self._changed:
            last = self._last.get(rank)
            if last is not None and last.request.number == number:
                last.over = True
                self._open.pop(rank, None)
                self._changed.notify_all()

    def close(self) -> None:
        """The run has ended."""
        with self._changed:
            self._closed = True
            self._endings += 1
            self._changed.notify_all()

    def reopen(self) -> None:
        """Ranks are held after the end of the run: they may ask again."""
        with self._changed:
            self._closed = False

    def debugged(self) -> list[int]:
        """Return the ranks that a debugger holds, in order."""
        with self._changed:
            return sorted(self._debugged)

    def asks(self, rank: int) -> bool:
        """Whether a rank has an open question."""
        with self._changed:
            return rank in self._open

    def open_questions(self) -> list[Prompt]:
        """Return the open questions, by rank."""
        with self._changed:
            return [self._open[rank] for rank in sorted(self._open)]

    def take(
        self, timeout: float | None = None, rank: int | None = None, among: Collection[int] | None = None
    ) -> Prompt | None:
        """Wait for a question and take it.

        Args:
            timeout: Seconds; None waits until the run ends.
            rank: Only of this rank, and only while its debugger holds it.
            among: Only of these ranks; None means those whose questions are for this notebook's user.

        Returns:
            The question; None when the time is over, the run has ended, or the debugger has let ``rank`` go.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            ending = self._endings
            while not self._closed and ending == self._endings:
                if (question := self._next(rank, among)) is not None:
                    return self._open.pop(question.rank)
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or (rank is not None and timeout is None and self._let_go(rank)):
                    return None
                self._changed.wait(left)
            return None

    def await_question(self, rank: int, timeout: float) -> Prompt | None:
        """Wait until the debugger of ``rank`` asks again, and leave the question open; None when it does not."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and not self._let_go(rank) and (left := deadline - time.monotonic()) > 0:
                if rank in self._open:
                    return self._open[rank]
                self._changed.wait(left)
            return self._open.get(rank)

    def await_debugger(self, rank: int, timeout: float) -> None:
        """Wait until a debugger holds ``rank``."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and self._let_go(rank) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def claim(self, rank: int) -> Prompt | None:
        """Take the open question of ``rank``'s debugger without waiting."""
        with self._changed:
            question = self._open.get(rank)
            return self._open.pop(rank) if question is not None and question.of_debugger else None

    def _next(self, rank: int | None, among: Collection[int] | None) -> Prompt | None:
        if rank is not None:
            return self._open.get(rank)
        wanted = [each for each, question in self._open.items() if (question.here if among is None else each in among)]
        return self._open[min(wanted)] if wanted else None

    def _let_go(self, rank: int) -> bool:
        return rank not in self._debugged
