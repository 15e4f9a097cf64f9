"""The value that the function returned on a rank. It is unpickled on the thread that first reads it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import ResultsFreedError, SerializationError
from notebook_accelerate.telemetry import ResultEvent
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.results import ResultFiles
from notebook_accelerate.telemetry.tracebacks import describe_error

MAX_ESTIMATED = 10_000
"""Maximum number of objects to measure when the size of a value is estimated."""


class RankResult:
    """The return value of a rank. Any thread may read it.

    Unpickling runs code of the value's classes, which may fail, end the process or take a long time. It therefore
    happens on the thread that reads the value, not on the supervisor's thread.

    Args:
        load: Returns the value. It is called once, and again only after a failure.
        nbytes: Approximate size of the value in bytes. If None, it is estimated from the value that ``load`` returns.
        rank: The rank's global index, for error messages.
        advice: Advice for the error message: the value to return instead of one that cannot be read.
        pickled: Returns the value's pickle, as `load_bytes` expects it, until the value is read. None if there is no
            pickle.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        nbytes: int | None = 0,
        *,
        rank: int = 0,
        advice: str = "",
        pickled: Callable[[], bytes] | None = None,
    ) -> None:
        self._load: Callable[[], Any] | None = load
        self._pickled = pickled
        self._rank, self._advice, self._freed = rank, advice, ""
        self._value: Any = None
        self._loading = threading.RLock()  # This lock is held during unpickling, which may take a long time.
        self._lock = threading.Lock()  # This lock is held only briefly, because the supervisor's thread uses it too.
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Approximate size of the value in bytes."""
        if self._nbytes is None:
            self._nbytes = estimated_bytes(self.read())
        return self._nbytes

    def pickled(self, most: int) -> bytes | None:
        """Return the pickle of an unread value, or None if there is no pickle or it is larger than ``most`` bytes."""
        with self._lock:
            pickled, nbytes = self._pickled, self._nbytes
        return pickled() if pickled is not None and nbytes is not None and nbytes <= most else None

    def read(self) -> Any:
        """Return the value.

        Raises:
            SerializationError: The value cannot be unpickled. A later call tries again.
            ResultsFreedError: The value was freed.
        """
        with self._loading:
            with self._lock:
                freed, load, value = self._freed, self._load, self._value
            if load is not None and not freed:
                value = self._loaded(load)
                with self._lock:
                    freed = self._freed
                    if not freed:
                        self._value, self._load, self._pickled = value, None, None
            if freed:
                del value
                raise ResultsFreedError(freed)
            return value

    def _loaded(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except (SerializationError, KeyboardInterrupt):
            raise
        except BaseException as error:
            hint = f"; {self._advice}" if self._advice else ""
            raise SerializationError(
                f"the return value of rank {self._rank} cannot be unpickled: {describe_error(error)}{hint}"
            ) from error

    def free(self, reason: str) -> None:
        """Drop the value, so that later reads raise an error with ``reason``.

        This does not wait for a thread that is unpickling the value.
        """
        with self._lock:
            if self._freed:
                return
            dropped = self._load, self._value
            self._freed, self._load, self._value = reason, None, None
            self._nbytes, self._pickled = 0, None
        del dropped  # Delete the value without holding the lock, because deleting may run user code.

    def freed(self, reason: str) -> RankResult:
        """Return a replacement for this result. Reading it raises an error with ``reason``."""
        result = RankResult(int)
        result.free(reason)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return holding, (self.read(),)


def holding(value: object) -> RankResult:
    """Return a `RankResult` for a value that is already in this process."""
    return RankResult(lambda: value, None)


def estimated_bytes(value: object) -> int:
    """Estimate the size of a value in bytes from the first objects that it contains."""
    total, left = 0, [value]
    seen: set[int] = set()
    while left and len(seen) < MAX_ESTIMATED:
        item = left.pop()
        if id(item) not in seen:
            seen.add(id(item))
            with suppress(Exception):  # The user's classes may raise any error.
                total += _own_bytes(item)
                left += _parts(item)
    return total


def _own_bytes(item: object) -> int:
    if type(item).__module__.partition(".")[0] in ("torch", "numpy"):
        return int(getattr(item, "nbytes", 0))
    return sys.getsizeof(item)


def _parts(item: object) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    return vars(item).values() if hasattr(item, "__dict__") and not isinstance(item, type) else ()


def received(event: ResultEvent, descriptors: tuple[int, ...], rank: int) -> RankResult:
    """Return the result that a rank has sent. A large value is in files, which ``descriptors`` refer to."""
    if event.error:
        return _unreadable(f"rank {rank}: {event.error}", rank)
    if event.sizes is None:
        payload = event.payload
        nbytes = len(payload)
        return RankResult(lambda: load_bytes(payload), nbytes, rank=rank, advice=event.advice, pickled=lambda: payload)
    if not descriptors:
        size = size_text(sum(event.sizes))
        text = f"the return value of rank {rank} ({size}) was lost: the kernel has no free file descriptors"
        return _unreadable(text, rank)
    files = ResultFiles(descriptors, event.sizes)
    return RankResult(files.load, files.nbytes, rank=rank, advice=event.advice, pickled=files.in_band)


def _unreadable(text: str, rank: int) -> RankResult:
    def refuse() -> Any:
        raise SerializationError(text)

    return RankResult(refuse, rank=rank)


# ---- the end of a rank's process


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: Exit status, or None if a signal ended the process or the status is unknown.
        signal: Number of the signal that ended the process, or None if no signal did.
        max_rss: Peak resident memory in bytes, or 0 if unknown.
        lost: Why nothing is known about how the process ended, such as "node 1 (c3-n07) was lost", or "" otherwise.
    """

    code: int | None = None
    signal: int | None = None
    max_rss: int = 0
    lost: str = ""

    @classmethod
    def from_status(cls, status: int, max_rss_kib: int) -> Exit:
        """Convert the wait status and the peak memory in KiB that ``os.wait4`` returns."""
        code = os.waitstatus_to_exitcode(status)
        return cls(code if code >= 0 else None, -code if code < 0 else None, max_rss_kib * 1024)
