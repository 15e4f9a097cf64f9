"""The kernel's desk for questions to ranks: sends requests down the channels and matches replies to them."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from notebook_accelerate.debug.process_inspection import Look
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry.channel import Sender
from notebook_accelerate.telemetry.debug_protocol import Reply, Request


class RankRequests:
    """One per run; safe from any thread but the supervisor's, which delivers the replies."""

    def __init__(self) -> None:
        # Two notebooks may ask one rank, and each hears the answers to both.
        self._numbers = itertools.count(secrets.randbelow(1 << 40))
        self._changed = threading.Condition()
        self._channels: dict[int, Sender] = {}
        self._looks: dict[int, Callable[[], Look]] = {}
        self._replies: dict[tuple[int, int], Reply] = {}
        self._awaited: set[tuple[int, int]] = set()

    def open(self, rank: int, channel: Sender, look: Callable[[], Look]) -> None:
        """A rank has started.

        Args:
            rank: Its global index.
            channel: The way down to it.
            look: Looks at it without its help.
        """
        with self._changed:
            self._channels[rank], self._looks[rank] = channel, look

    def close(self, rank: int) -> None:
        """A rank has ended: nobody waits for it any longer."""
        with self._changed:
            self._channels.pop(rank, None)
            self._looks.pop(rank, None)
            self._changed.notify_all()

    def look(self, rank: int) -> Look:
        """Look at a rank that cannot answer; nothing is seen of one that is not there."""
        with self._changed:
            look = self._looks.get(rank)
        return look() if look is not None else Look()

    def open_ranks(self) -> list[int]:
        """Return the ranks that can be asked, in order."""
        with self._changed:
            return sorted(self._channels)

    def deliver(self, rank: int, reply: Reply) -> None:
        """A reply has come; one that nobody waits for any longer is dropped."""
        with self._changed:
            if (rank, reply.number) in self._awaited:
                self._replies[rank, reply.number] = reply
                self._changed.notify_all()

    def ask(self, ranks: Iterable[int], make: Callable[[int], Request], timeout: float) -> dict[int, Reply]:
        """Send a request to each rank and return the replies that come within ``timeout`` seconds.

        Args:
            ranks: Whom to ask.
            make: Makes the request of a number.
            timeout: Seconds to wait for all of them.
        """
        keys = set(self.send(ranks, make).items())
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._missing(keys) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._awaited -= keys
            return {rank: self._replies.pop((rank, number)) for rank, number in keys if (rank, number) in self._replies}

    def send(self, ranks: Iterable[int], make: Callable[[int], Request]) -> dict[int, int]:
        """Send a request to each rank that is there and return the numbers to ``collect`` by."""
        return {rank: number for rank in ranks if (number := self._send(rank, make)) is not None}

    def collect(self, sent: dict[int, int], timeout: float) -> dict[int, Reply]:
        """Wait up to ``timeout`` seconds for one more reply to what was ``sent``, and take those that are there."""
        with self._changed:
            if not any(key in self._replies for key in sent.items()):
                self._changed.wait(timeout)
            found = {rank: self._replies.pop((rank, n)) for rank, n in sent.items() if (rank, n) in self._replies}
            self._awaited -= {(rank, sent[rank]) for rank in found}
            return found

    def forget(self, sent: dict[int, int]) -> None:
        """Wait no longer for what was ``sent``."""
        with self._changed:
            self._awaited -= set(sent.items())

    def _send(self, rank: int, make: Callable[[int], Request]) -> int | None:
        with self._changed:
            channel = self._channels.get(rank)
            number = next(self._numbers)
            self._awaited.add((rank, number))
        if channel is not None:
            with suppress(ChannelClosedError):
                channel.send(make(number))
                return number
        self._awaited.discard((rank, number))
        return None

    def _missing(self, keys: set[tuple[int, int]]) -> bool:
        return any(key not in self._replies and key[0] in self._channels for key in keys)
