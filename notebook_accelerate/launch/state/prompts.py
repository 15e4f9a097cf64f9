"""Prompts of ranks that wait for a line of input, and the queue that passes them to the user's cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.state.interrupts import next_wait
from notebook_accelerate.telemetry import InputReply, InputRequest
from notebook_accelerate.telemetry.channel import Sender

STAY_SECONDS = 1.0
"""How many seconds a rank's debugger has for its next prompt before the prompt of another rank is shown.

After a command such as ``n``, the rank may wait for another rank that is stopped in a debugger too.
"""


@dataclass
class Prompt:
    """The prompt of a rank that waits for a line of input.

    Attributes:
        rank: The rank's global index.
        request: The request that the rank has sent.
        channel: The channel through which to answer the rank.
        on_answer: The function that `answer` calls with the rank.
        seen: Whether the user has already seen the text that the rank showed before the prompt.
        over: Whether the rank no longer waits for an answer.
    """

    rank: int
    request: InputRequest
    channel: Sender
    on_answer: Callable[[int], None]
    over: bool = False
    seen: bool = False

    @property
    def of_debugger(self) -> bool:
        """Whether this is the prompt of a debugger."""
        return self.request.kind == "debugger"

    def answer(self, text: str | None) -> None:
        """Send a line to the rank, or end-of-file if ``text`` is None. Do nothing if the rank has already ended."""
        self.on_answer(self.rank)
        with suppress(ChannelClosedError):
            self.channel.send(InputReply(text, self.request.number))


class PromptQueue:
    """The open prompts of a run, at most one per rank. Safe to use from any thread.

    Attributes:
        shown_in_cell: Whether a cell that runs on warm ranks shows their prompts. ``wait`` and ``debug`` always show
            prompts.
        on_change: The function to call, on any thread, when the open prompts change.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, Prompt] = {}
        self._last: dict[int, Prompt] = {}
        self._debugged: set[int] = set()
        self._closed = False
        self._endings = 0
        self._current: int | None = None
        self._stay_until = 0.0
        self.shown_in_cell = False
        self.on_change: Callable[[], None] = lambda: None

    def put(self, prompt: Prompt) -> None:
        """Add the prompt of a rank that now waits for a line."""
        with self._changed:
            self._open[prompt.rank] = self._last[prompt.rank] = prompt
            if prompt.of_debugger:
                self._debugged.add(prompt.rank)
            self._note_change()

    def give_back(self, prompt: Prompt) -> None:
        """Put an unanswered prompt back into the queue if the rank still waits for an answer."""
        with self._changed:
            if self._last.get(prompt.rank) is prompt and not prompt.over:
                self._open[prompt.rank] = prompt
                self._note_change()

    def stay_with(self, rank: int) -> None:
        """Prefer this rank's prompts until its debugger releases it, or does not ask again within `STAY_SECONDS`."""
        with self._changed:
            self._current, self._stay_until = rank, time.monotonic() + STAY_SECONDS
            self._changed.notify_all()

    def current(self, default: int) -> int:
        """Return the preferred rank if it is in a debugger, or else ``default``."""
        with self._changed:
            return self._current if self._current is not None and self._current in self._debugged else default

    def drop(self, rank: int) -> None:
        """Remove the prompt of a rank that exited or was released by its debugger."""
        with self._changed:
            self._open.pop(rank, None)
            self._last.pop(rank, None)
            self._debugged.discard(rank)
            self._note_change()

    def withdraw(self, rank: int, number: int) -> None:
        """Remove prompt ``number`` of a rank that no longer waits for it, because it was answered or interrupted."""
        with self._changed:
            last = self._last.get(rank)
            if last is not None and last.request.number == number:
                last.over = True
                self._open.pop(rank, None)
                self._note_change()

    def close(self) -> None:
        """End all waits for prompts, because the run is over."""
        with self._changed:
            self._closed = True
            self._endings += 1
            self._note_change()

    def reopen(self) -> None:
        """Accept prompts again, because ranks are held after the end of the run."""
        with self._changed:
            self._closed = False

    def _note_change(self) -> None:
        self._changed.notify_all()
        self.on_change()

    def debugged(self) -> list[int]:
        """Return the ranks that are stopped in a debugger, in order."""
        with self._changed:
            return sorted(self._debugged)

    def is_open(self, rank: int) -> bool:
        """Return whether a rank has an open prompt."""
        with self._changed:
            return rank in self._open

    def open_prompts(self) -> list[Prompt]:
        """Return the open prompts, sorted by rank."""
        with self._changed:
            return [self._open[rank] for rank in sorted(self._open)]

    def claim_next(
        self,
        timeout: float | None = None,
        rank: int | None = None,
        among: Collection[int] | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> Prompt | None:
        """Wait for a prompt and claim it, so that no other reader answers it.

        If several ranks are in debuggers, the prompts of one of them are claimed until its debugger lets it continue;
        see `stay_with`.

        Args:
            timeout: Seconds to wait. None means until the run ends.
            rank: Claim only prompts of this rank, and only while it is in a debugger.
            among: Claim only prompts of these ranks. None means all ranks.
            until: A function that ends the wait by returning True. It is called after every change.

        Returns:
            The prompt, or None after the timeout, at the end of the run, or when the debugger has released ``rank``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            ending = self._endings
            while not (self._closed or until()) and ending == self._endings:
                if (prompt := self._next(rank, among)) is not None:
                    return self._open.pop(prompt.rank)
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or (
                    rank is not None and timeout is None and self._is_released(rank)
                ):
                    return None
                stay = self._stay_until - time.monotonic()
                self._changed.wait(next_wait(left) if stay <= 0 else min(next_wait(left), stay))
            return None

    def await_prompt(self, rank: int, timeout: float) -> Prompt | None:
        """Return the next prompt of ``rank``'s debugger without claiming it, or None after the timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and not self._is_released(rank) and (left := deadline - time.monotonic()) > 0:
                if rank in self._open:
                    return self._open[rank]
                self._changed.wait(next_wait(left))
            return self._open.get(rank)

    def await_debugger(self, rank: int, timeout: float) -> None:
        """Wait until ``rank`` is in a debugger, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed and self._is_released(rank) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(next_wait(left))

    def claim(self, rank: int) -> Prompt | None:
        """Claim the open prompt of ``rank``'s debugger without waiting. Return None if there is none."""
        with self._changed:
            prompt = self._open.get(rank)
            return self._open.pop(rank) if prompt is not None and prompt.of_debugger else None

    def _next(self, rank: int | None, among: Collection[int] | None) -> Prompt | None:
        if rank is not None:
            return self._open.get(rank)
        wanted = [each for each in self._open if among is None or each in among]
        if self._current in wanted:
            return self._open[self._current]
        if self._current in self._debugged and time.monotonic() < self._stay_until:
            return None
        return self._open[min(wanted)] if wanted else None

    def _is_released(self, rank: int) -> bool:
        return rank not in self._debugged
