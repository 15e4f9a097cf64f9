"""Requests from the kernel to ranks: sends them over the channels and matches the replies."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from notebook_accelerate.debugging.process_stacks import ProcessStacks
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import Event
from notebook_accelerate.telemetry.channel import Sender
from notebook_accelerate.telemetry.debug_protocol import Reply, Request


class RankRequests:
    """The open requests of a run; usable on any thread except the supervisor's, which delivers the replies.

    Attributes:
        elsewhere: Why this notebook cannot send requests, as the text of an error; "" where it can.
        relay: Called with the replies that nobody here waits for.
        on_change: Called when a rank begins or ceases to accept requests, on the supervisor's thread.
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
            rank: Its global index.
            channel: Sends requests to it.
            capture_stacks: Reads its stacks from outside.
        """
        with self._changed:
            self._channels[rank], self._captures[rank] = channel, capture_stacks
        self.on_change()

    def close(self, rank: int) -> None:
        """Remove a rank that has ended, and stop waiting for it."""
        with self._changed:
            self._channels.pop(rank, None)
            self._captures.pop(rank, None)
            self._changed.notify_all()
        self.on_change()

    def capture_stacks(self, rank: int) -> ProcessStacks:
        """Read the stacks of a rank that cannot reply; they are empty where the rank has ended."""
        with self._changed:
            capture_stacks = self._captures.get(rank)
        return capture_stacks() if capture_stacks is not None else ProcessStacks()

    def open_ranks(self) -> list[int]:
        """Return the ranks that accept requests, in order.

        Raises:
            ValueError: Another notebook steers the run.
        """
        self._check_here()
        with self._changed:
            return sorted(self._channels)

    def deliver(self, rank: int, reply: Reply) -> None:
        """Handle a reply; one that is not awaited here is relayed."""
        with self._changed:
            if (rank, reply.number) in self._awaited:
                self._replies[rank, reply.number] = reply
                self._changed.notify_all()
                return
        self.relay(rank, reply)

    def forward(self, rank: int, events: Iterable[Event]) -> None:
        """Send what another process asks of a rank; its replies are relayed. Does nothing if the rank has ended."""
        with self._changed:
            channel = self._channels.get(rank)
        if channel is not None:
            with suppress(ChannelClosedError):
                channel.send(*events)

    def ask(self, ranks: Iterable[int], make: Callable[[int], Request], timeout: float) -> dict[int, Reply]:
        """Send a request to each rank and return the replies that arrive within ``timeout`` seconds.

        Args:
            ranks: The ranks.
            make: Creates the request with a number.
            timeout: Seconds to wait for all replies.
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
            ValueError: Another notebook steers the run.
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
        """Return whether a reply may still arrive: a rank that was started anew has another channel."""
        return any(
            key not in self._replies
            and (channel := self._channels.get(key[0])) is not None
            and channel is self._awaited.get(key)
            for key in keys
        )
