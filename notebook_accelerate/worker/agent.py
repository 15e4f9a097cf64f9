"""The agent: this package's thread in a rank, which sends the rank's events and answers the kernel."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry.events import (
    AgentFailedEvent,
    AnsweredEvent,
    Event,
    InputReply,
    InputRequest,
)
from notebook_accelerate.telemetry.sink import Sink
from notebook_accelerate.telemetry.tracebacks import describe_error

FLUSH_SECONDS = 0.05
"""Seconds between two flushes of the event queue while it contains urgent events."""
_PERIODS_PER_FLUSH = 4
"""Other events are flushed only once in this many periods of ``FLUSH_SECONDS``, because panels repaint every 0.2 s, and
a flush takes 0.2 ms."""
MAX_FAILURES = 5
"""The agent's thread ends after this many unexpected errors."""


class Agent:
    """Flushes ``sink``, and passes events from the kernel to the registered handlers."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._process = os.getpid()
        self._replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._prompts = itertools.count(1)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {InputReply: self._replies.put}
        self._ticks: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send the queued events. Joining the thread could take a whole period, so let it end with the process."""
        self._stopping.set()
        self.sink.flush()

    def on(self, kind: type[Event], handler: Callable[[Any], None]) -> None:
        """Call ``handler(event)`` on the agent's thread for every event of ``kind`` from the kernel."""
        self._handlers[kind] = handler

    def every_tick(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the agent's thread about 20 times a second."""
        self._ticks.append(callback)

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Prompt the user in the notebook, wait for the answer, and return it.

        Args:
            prompt: The text to show in front of the input field.
            password: Whether to hide the answer while the user types it.
            shown: Lines to show before the prompt.
            kind: The function that asks for the input: "input" or "debugger".

        Raises:
            EOFError: The notebook cannot prompt the user, or the caller is a process started by the rank, such as a
                DataLoader worker.
        """
        if os.getpid() != self._process:  # Otherwise the rank itself would receive the answer.
            raise EOFError("only the rank itself can prompt the user, not a process that it has started")
        number = next(self._prompts)
        try:
            self.sink.send(InputRequest(prompt, password, shown, kind, number))
            while (reply := self._replies.get()).number != number:
                pass  # Skip the answer to an earlier prompt, which was interrupted.
        finally:  # Report the end of the prompt even if it was interrupted.
            self.sink.send(AnsweredEvent(number))
        if reply.text is None:
            raise EOFError("the notebook sent no answer")
        return reply.text

    def _run(self) -> None:
        for left in reversed(range(MAX_FAILURES)):
            try:
                self._serve()
                return
            except ChannelClosedError:
                if not self._stopping.is_set():
                    # Without the kernel, the run is over, so end this rank and the processes that it started.
                    os.kill(0, signal.SIGKILL)
                return
            except BaseException as error:  # noqa: BLE001 - nothing above could handle it, or show it
                self._report(error, ended=left == 0)

    def _serve(self) -> None:
        for turn in itertools.count():
            if self._stopping.is_set():
                return
            for _, event in self.sink.channel.receive(FLUSH_SECONDS):
                self._handle(event)
            for tick in self._ticks:
                tick()
            if self.sink.urgent or turn % _PERIODS_PER_FLUSH == 0:
                self.sink.flush()

    def _report(self, error: BaseException, *, ended: bool) -> None:
        """Report an error of this thread directly, because the queue may be the cause of the error."""
        text = describe_error(error, 500)
        with suppress(OSError):  # The user's function may have closed the descriptor.
            os.write(2, "".join(traceback.format_exception(error)).encode(errors="replace"))
        with suppress(Exception):
            self.sink.channel.send(AgentFailedEvent(text, ended))

    def _handle(self, event: Event) -> None:
        """Call the handler of an event. If it fails, the thread must continue, or the rank would never reply again."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return
        try:
            handler(event)
        except ChannelClosedError:
            raise
        except Exception:  # noqa: BLE001 - shown in the rank's stderr
            traceback.print_exc()
