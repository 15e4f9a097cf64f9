"""The one thread of this package in a rank: it empties the event queue and hears what the kernel says."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import InputReply, InputRequest

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import Event, Sink

PERIOD = 0.05
"""Seconds between two flushes of the event queue."""


class Agent:
    """Flushes ``sink`` 20 times a second and hands replies to who waits for them."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is left. The thread ends with the process: joining it would cost up to a period."""
        self._stopping.set()
        self.sink.flush()

    def ask(self, prompt: str, *, password: bool = False) -> str:
        """Have the user answer ``prompt`` in the notebook; blocks until then.

        Raises:
            EOFError: There is nobody to ask.
        """
        self.sink.send(InputRequest(prompt, password))
        reply = self._replies.get()
        if reply.text is None:
            raise EOFError("the notebook gave no answer")
        return reply.text

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for _, event in self.sink.channel.receive(PERIOD):
                    self._handle(event)
                self.sink.flush()
        except ChannelClosedError:
            # The kernel is gone. This rank and what it started have no one left to work for.
            os.kill(0, signal.SIGKILL)

    def _handle(self, event: Event) -> None:
        if isinstance(event, InputReply):
            self._replies.put(event)
