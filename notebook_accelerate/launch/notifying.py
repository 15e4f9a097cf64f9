"""Send a message when a run ends, fails or stalls, or when a warning is found; see ``LaunchConfig.notify``."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import HIDDEN, is_secret_name, redact
from notebook_accelerate.launch.detached.control_client import warn
from notebook_accelerate.launch.report.markup import duration
from notebook_accelerate.launch.report.rank_rows import findings
from notebook_accelerate.launch.report.run_snapshot import RunWatcher, status
from notebook_accelerate.launch.state import run_events as events
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.store import Record

SEND_SECONDS = 10.0
"""Seconds that a receiver may take for one message, and that an exiting process waits for the last messages."""
MAX_WAITING = 8
"""Maximum number of messages that wait for a receiver. The oldest ones are dropped."""
MAX_CHARS = 4_000
"""Maximum number of characters of a message's text."""
_SHORT = 8
"""Values of variables that are shorter than this are not hidden, because they may also occur in ordinary words."""


class Notifier:
    """Sends messages about a run until it ends. A thread sends them, which exists only while messages are waiting.

    Args:
        run: The run, with ``config.notify``.
    """

    def __init__(self, run: Run) -> None:
        receiver = run.config.notify
        self._run, self._is_function = run, callable(receiver)
        self._send: Callable[[dict[str, str]], object] = (
            receiver if callable(receiver) else partial(_send_to, str(receiver))
        )
        self._waiting: deque[dict[str, str]] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        self._is_sending = self._has_warned = self._found_nan = False
        self._unsubscribe = internals(run).journal.subscribe(self._on_records)

    def _on_records(self, records: Sequence[Record]) -> None:
        journal = internals(self._run).journal
        # A batch of records is either the run's own or from ranks. Those from ranks may be many, so skip them.
        own = records if records[0].rank == events.RUN else ()
        kinds = [kind for record in own if (kind := self._kind(record.event))]
        if journal.store.not_finite and not self._found_nan:
            self._found_nan = True
            kinds.append("warning")
        if journal.state.ended is not None:
            self._unsubscribe()  # Otherwise, the journal would keep the run alive.
        # Of several notebooks, only the first one knows all ranks.
        if kinds and (not journal.state.ranks or journal.state.ranks[0].rank == 0):
            self._put({"run": self._run.name, "event": kinds[-1], "text": self._text()})

    def _kind(self, event: object) -> str:
        """Return what to call an event of the journal in a message, or "" if there is no message for it."""
        state = internals(self._run).journal.state
        if isinstance(event, (events.RunEnded, events.RunLost)):
            return "failed" if state.status in ("failed", "lost") else "ended"
        if isinstance(event, events.AttemptEnded) and event.restarts:
            return "failed"
        if isinstance(event, events.WarningAdded):
            # The mistake that a diagnosis has found is in the message about the stall.
            return "" if state.diagnoses and state.diagnoses[-1].mistake == event.text else "warning"
        return "stalled" if isinstance(event, events.RunStalled) else ""

    def _text(self) -> str:
        run, state = self._run, internals(self._run).journal.state
        lines = [f"{run.name}: {status(run)} after {duration(run.elapsed)}", state.message]
        if state.failures and not state.message:
            lines.append(f"rank {state.failures[0].rank} failed: {state.failures[0].message}")
        lines += findings(run, RunWatcher(run).snapshot(steady_time.now()))
        if state.stall is not None and state.diagnoses:
            lines.append(state.diagnoses[-1].text)
        text = redact("\n".join(filter(None, lines)), run.config)
        for name, value in os.environ.items():
            if len(value) >= _SHORT and is_secret_name(name) and name not in ("PWD", "OLDPWD"):
                text = text.replace(value, HIDDEN)
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"

    def _put(self, message: dict[str, str]) -> None:
        with self._lock:
            is_full = len(self._waiting) == MAX_WAITING
            self._waiting.append(message)
            if not self._is_sending:
                self._is_sending = True
                threading.Thread(target=self._send_waiting, name="notebook-accelerate-notify", daemon=True).start()
        if is_full:
            self._warn("the receiver is too slow, so messages were dropped")

    def _send_waiting(self) -> None:
        wait = partial(threading.current_thread().join, SEND_SECONDS)
        atexit.register(wait)
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_sending = False
                    break
                message = self._waiting.popleft()
            try:
                self._send(message)
            except Exception as error:  # noqa: BLE001 - a receiver that fails must not affect the run
                # Other texts of errors may contain the address, which is a secret.
                detail = error if self._is_function else getattr(error, "reason", "")
                self._warn(f"a message was not sent: {type(error).__name__} {detail}".rstrip())
        atexit.unregister(wait)

    def _warn(self, text: str) -> None:
        """Warn once for each run, here and in the run's notes, which attached processes show."""
        with self._lock:
            first, self._has_warned = not self._has_warned, True
        if first:
            if self._run.ended is None:
                internals(self._run).journal.append(events.NoteAdded(f"notify: {text}"))
            warn(f"notify of run {self._run.name}: {text}")


def _send_to(address: str, message: dict[str, str]) -> None:
    """Send a message to a URL, as a POST with JSON, or to an address of apprise.

    Raises:
        OSError: The receiver did not accept the message.
    """
    if not address.lower().startswith(("http://", "https://")):
        import apprise

        receiver = apprise.Apprise()
        if not (receiver.add(address) and receiver.notify(message["text"], f"{message['run']} {message['event']}")):
            raise OSError
        return
    # Import this here, because it takes 20 ms, and few launches send messages.
    from urllib.request import Request, urlopen

    data = json.dumps(message).encode()
    request = Request(address, data, {"Content-Type": "application/json"})  # noqa: S310 - the scheme was checked above
    urlopen(request, timeout=SEND_SECONDS).close()  # noqa: S310
