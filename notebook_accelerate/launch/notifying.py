"""Send a message when a run ends, fails or stalls, or when a warning is found; see ``LaunchConfig.notify``."""

from __future__ import annotations

import importlib
import json
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.launch_config import without_apprise_logs
from notebook_accelerate.config.plain_values import redact
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
SETTLE_SECONDS = 2.0
"""Seconds that a warning waits for others: a NaN, for example, first appears in a metric, then in a sanity check."""
MAX_CHARS = 4_000
"""Maximum number of characters of a message's text."""
_senders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Notifier:
    """Sends messages about a run until it ends. The thread that sends them exists only while messages are waiting.

    If a message is still waiting, a newer one about the same kind of event replaces it, so only a few can wait for a
    slow receiver.

    Args:
        run: The run, with ``config.notify``.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._receiver = run, run.config.notify
        self._waiting: dict[str, str] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._is_sending = self._has_warned = self._found_nan = False
        self._unsubscribe = internals(run).journal.subscribe(self._on_records)

    def _on_records(self, records: Sequence[Record]) -> None:
        journal = internals(self._run).journal
        # A batch of records is either the run's own or from ranks. From ranks, only a NaN matters.
        own = records if records[0].rank == events.RUN else ()
        kinds = [kind for record in own if (kind := self._kind(record.event))]
        if journal.store.not_finite and not self._found_nan:
            self._found_nan = True
            kinds.append("warning")
        # Of several notebooks, only the first one knows all ranks.
        if kinds and (not journal.state.ranks or journal.state.ranks[0].rank == 0):
            self._put(kinds[-1], self._text())
        if journal.state.ended is not None:
            self._ended.set()
            self._unsubscribe()  # Otherwise, the journal would keep the run alive.

    def _kind(self, event: object) -> str:
        """Return what to call an event of the journal in a message, or "" if there is no message for it."""
        state = internals(self._run).journal.state
        if isinstance(event, events.RunEnded):
            return "failed" if state.status == "failed" else "ended"
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
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"

    def _put(self, event: str, text: str) -> None:
        with self._lock:
            self._waiting.pop(event, None)  # Otherwise, the new message would take the place of the earlier one.
            self._waiting[event] = text
            if self._is_sending:
                return
            self._is_sending = True
        sender = threading.Thread(target=self._send_waiting, name="notebook-accelerate-notify", daemon=True)
        try:
            sender.start()
            _senders.add(sender)
        except RuntimeError:  # Some versions of Python start no threads while the process exits.
            self._send_waiting()

    def _send_waiting(self) -> None:
        while event := self._next_event():
            if event == "warning":
                self._ended.wait(SETTLE_SECONDS)
            with self._lock:
                text = self._waiting.pop(event)
            try:
                if event == "warning":
                    text = self._text()  # Include what other ranks have reported since then.
                _send_to(self._receiver, {"run": self._run.name, "event": event, "text": text})
            except BaseException as error:  # noqa: BLE001 - a receiver that fails must not affect the run
                # Other texts of errors may contain the address, which is a secret.
                detail = error if callable(self._receiver) else getattr(error, "code", getattr(error, "reason", ""))
                self._warn(f"a message was not sent: {type(error).__name__} {detail}".rstrip())

    def _next_event(self) -> str:
        """Return the event of the oldest message that waits, or "" if no message waits and the thread must end."""
        with self._lock:
            self._is_sending = bool(self._waiting)
            return next(iter(self._waiting), "")

    def _warn(self, text: str) -> None:
        """Warn once for each run, here and in the run's notes, which attached processes show."""
        if not self._has_warned:
            self._has_warned = True
            if self._run.ended is None:
                internals(self._run).journal.append(events.NoteAdded(f"notify: {text}"))
            warn(f"notify of run {self._run.name}: {text}")


def finish_messages() -> None:
    """Wait until the messages about ended runs are sent, but not longer than `SEND_SECONDS`."""
    limit = time.monotonic() + SEND_SECONDS
    for sender in list(_senders):
        sender.join(max(0.0, limit - time.monotonic()))


def _send_to(receiver: Any, message: dict[str, str]) -> None:
    """Send a message to a function, to a URL, as a POST with JSON, or to an address of apprise.

    Raises:
        OSError: The receiver did not accept the message.
    """
    if callable(receiver):
        receiver(message)
        return
    # Import this here, because it takes 20 ms, and few launches send messages.
    from urllib import error, request

    if not receiver.lower().startswith(("http://", "https://")):
        service = importlib.import_module("apprise").Apprise()
        with without_apprise_logs():
            sent = service.add(receiver) and service.notify(message["text"], f"{message['run']} {message['event']}")
        if not sent:
            raise error.URLError("apprise could not send it")
        return
    data = json.dumps(message).encode()
    posted = request.Request(receiver, data, {"Content-Type": "application/json"})  # noqa: S310 - checked at the launch
    # To follow a redirection, urllib would send a GET request without the message, and report no error.
    refusing = type("_Refusing", (request.HTTPRedirectHandler,), {"redirect_request": lambda *_: None})
    request.build_opener(refusing).open(posted, timeout=SEND_SECONDS).close()
