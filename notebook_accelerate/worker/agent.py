"""The one thread of this package in a rank: it empties the event queue and hears what the kernel says."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import AnsweredEvent, Event, InputReply, InputRequest, Sink

PERIOD = 0.05
"""Seconds between two flushes of the event queue."""


class Agent:
    """Flushes ``sink`` 20 times a second and hands what the kernel sends to who asked for it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._process = os.getpid()
        self._replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._questions = itertools.count(1)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {InputReply: self._replies.put}
        self._ticks: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is left. The thread ends with the process: joining it would cost up to a period."""
        self._stopping.set()
        self.sink.flush()

    def on(self, kind: type[Event], handler: Callable[[Any], None]) -> None:
        """Call ``handler(event)`` on the agent's thread for every event of ``kind`` from the kernel."""
        self._handlers[kind] = handler

    def every_tick(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the agent's thread, about 20 times a second."""
        self._ticks.append(callback)

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Have the user answer ``prompt`` in the notebook; blocks until then.

        Args:
            prompt: What stands before the answer.
            password: Whether the answer must not be seen.
            shown: Lines to show before the prompt.
            kind: "input", or "debugger".

        Raises:
            EOFError: There is nobody to ask; or a process asks that the rank has started, as a worker of a DataLoader.
        """
        if os.getpid() != self._process:  # the answer would come to the rank
            raise EOFError("only the rank itself can ask, and no process that it has started")
        number = next(self._questions)
        try:
            self.sink.send(InputRequest(prompt, password, shown, kind, number))
            while (reply := self._replies.get()).number != number:
                pass  # a second notebook's answer to an earlier question
        finally:  # an interrupt, too, ends the question
            self.sink.send(AnsweredEvent(number))
        if reply.text is None:
            raise EOFError("the notebook gave no answer")
        return reply.text

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for _, event in self.sink.channel.receive(PERIOD):
                    self._hear(event)
                for tick in self._ticks:
                    tick()
                self.sink.flush()
        except ChannelClosedError:
            if not self._stopping.is_set():
                # The kernel is gone. This rank and what it started have no one left to work for.
                os.kill(0, signal.SIGKILL)

    def _hear(self, event: Event) -> None:
        """Hand one event on; a handler that fails must not end the hearing: the rank would never answer again."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except ChannelClosedError:
            raise
        except Exception:  # noqa: BLE001 - shown in the rank's stderr
            traceback.print_exc()
