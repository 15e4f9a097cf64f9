"""The debug panel of a run: the location of its ranks, a diagnosis, and an input line for commands to them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.config.field_checks import check_seconds
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets import debug_panel_html as parts
from notebook_accelerate.widgets.debug_panel_html import MAX_HISTORY, Entry
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.panel_elements import card, row, style_sheet, with_classes
from notebook_accelerate.widgets.run_summary import status

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch import Run

ALL = "all ranks"
_PARTIAL_NAME = re.compile(r"[A-Za-z_][\w.]*$")


class DebugPanel(LivePanel):
    """Ranks with state and location, "Why is it stuck?", stacks, an input line for ``ask`` and ``cast``, and a history.

    No request is sent to the ranks before the user clicks or types. Requests run on a separate thread, one at a time,
    so that neither the kernel nor the other panels wait for a rank.

    Args:
        run: The run to inspect.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        self.found: Diagnosis | None = run.diagnoses[-1] if run.diagnoses else None
        self.history: list[Entry] = []
        self._request: threading.Thread | None = None
        self._completion: threading.Thread | None = None
        self._known = len(run.diagnoses)
        super().__init__(run, clock)

    # ---- the widget

    def _build(self) -> Any:
        self._head, self._verdict = (ipywidgets.HTML() for _ in range(2))
        self._ranks, self._stacks, self._history = (ipywidgets.HTML() for _ in range(3))
        self.why_button = self._button("Why is it stuck?", "Find out where every rank is", self._diagnose)
        self.pause_button = self._button("Pause", "Hold all ranks before their next step", self._pause)
        self.resume_button = self._button("Resume", "Continue the paused ranks", self._resume)
        # The descriptions are labels for screen readers; the style sheet hides them.
        options = [ALL, *(f"rank {info.rank}" for info in self.run.ranks)]
        self.target = ipywidgets.Dropdown(options=options, description="Ranks to ask", layout={"width": "120px"})
        self.line = ipywidgets.Combobox(
            description="Expression or command", layout={"flex": "1 1 auto"}, ensure_option=False
        )
        self.send_button = self._button(
            "Send", "Evaluate on the ranks, or pass to the debuggers of stopped ranks", self._send
        )
        self.line.on_msg(self._on_line_message)
        self.line.observe(self._complete, "value")
        self.why_button.add_class("na-first")
        headline = row([self._head, self.why_button, self.pause_button, self.resume_button], "na-headline")
        prompt = row([self.target, self.line, self.send_button], "na-prompt")
        return card(headline, self._verdict, self._ranks, self._stacks, prompt, self._problem, self._history)

    def _button(self, text: str, hint: str, action: Callable[[], None]) -> Any:
        button = with_classes(ipywidgets.Button(description=text, tooltip=hint), "na-stop", "na-request")
        button.on_click(lambda _: action())
        return button

    def _render(self, now: float) -> None:
        run = self.run
        if len(run.diagnoses) > self._known:
            self._known = len(run.diagnoses)
            self.found = run.diagnoses[-1]
        stopped = run.commands.prompts.debugged()
        self._head.value = parts.head_html(run)
        self._verdict.value = parts.verdict_html(run, self.found)
        self._ranks.value = parts.ranks_html(run, self.found, stopped, now)
        self._stacks.value = parts.stacks_html(self.found)
        self._history.value = parts.history_html(self.history)
        unreachable = not self._reachable()
        for control in (self.why_button, self.pause_button, self.resume_button, self.line, self.send_button):
            control.disabled = unreachable
        self.pause_button.disabled = unreachable or status(run) == "paused"
        self.resume_button.disabled = unreachable or not run.paused
        self.line.placeholder = (
            f"a command for the debugger of {rank_names(stopped)}, e.g. p loss"
            if stopped
            else "an expression, e.g. model.head.weight.norm()"
        )
        if unreachable and run.ended is not None and self._shown:
            self.close()

    def _reachable(self) -> bool:
        """Return whether ranks can be asked: also after a failure, while they are held."""
        return self.run.ended is None or self.run.held

    def _ended(self, run: Run) -> None:
        if not run.held:  # not held for inspection
            super()._ended(run)

    # ---- requests, sent from any thread

    def _diagnose(self) -> None:
        def diagnose() -> None:
            self.found = self.run.diagnose()

        self._start(diagnose)

    def _pause(self) -> None:
        self._start(lambda: self._record("pause", "", self.run.pause()))

    def _resume(self) -> None:
        self._start(lambda: self._record("resume", "", self.run.resume([info.rank for info in self.run.ranks])))

    def _send(self) -> None:
        line = self.line.value.strip()
        if line and self._start(lambda: self._ask_or_cast(line)):
            self.line.value = ""

    def _ask_or_cast(self, line: str) -> None:
        """Cast a line to those of the chosen ranks that a debugger has stopped; if there are none, ask all of them."""
        chosen = self._chosen()
        stopped = [rank for rank in self.run.commands.prompts.debugged() if chosen is None or rank in chosen]
        if stopped:
            self._record("cast", line, dict(self.run.cast(line, ranks=stopped)))
        else:
            replies = self.run.ask(line, ranks=chosen)
            self._record("ask", line, {rank: _shown(value) for rank, value in replies.items()})

    def _chosen(self) -> list[int] | None:
        return None if self.target.value == ALL else [int(self.target.value.removeprefix("rank "))]

    def _record(self, kind: str, line: str, answers: dict[int, str]) -> None:
        self.history = [*self.history, Entry(kind, line, answers)][-MAX_HISTORY:]

    def _start(self, request: Callable[[], None]) -> bool:
        """Run a request on a thread; return False if another one is running."""
        if self._request is not None and self._request.is_alive():
            self._show_problem("The previous request is still running; wait for its reply.")
            return False
        self._show_problem("")
        self._request = self._thread(lambda: self._run(request))
        return True

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        name = f"notebook-accelerate-debug-panel-{self.run.id}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, request: Callable[[], None]) -> None:
        try:
            request()
        except Exception as error:  # noqa: BLE001 - an error is the reply to the request
            self._show_problem(str(error) or type(error).__name__)
        self._render_soon()

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until the running requests have ended.

        Args:
            timeout: Seconds.

        Raises:
            ValueError: ``timeout`` is not a number of at least 0.
        """
        check_seconds("timeout", timeout)
        for thread in (self._request, self._completion):
            if thread is not None:
                thread.join(timeout)

    # ---- typing

    def _on_line_message(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and content.get("event") == "submit":
            self._send()

    def _complete(self, change: Any) -> None:
        """Offer the names that complete the line. Requests do not wait for this."""
        text = change["new"]
        busy = self._completion is not None and self._completion.is_alive()
        if busy or text in self.line.options or not _PARTIAL_NAME.search(text) or not self._reachable():
            return
        rank = (self._chosen() or [info.rank for info in self.run.ranks] or [0])[0]
        self._completion = self._thread(lambda: self._offer(text, rank))

    def _offer(self, text: str, rank: int) -> None:
        with suppress(Exception):  # the rank has ended: no completions
            found = tuple(self.run.complete(text, rank, timeout=1.5)[:100])
            if self.line.value == text:
                self.line.options = found

    # ---- without a browser

    @property
    def html(self) -> str:
        """The panel as static HTML: verdict, ranks, stacks and history."""
        now = self.found.time if self.run.ended is not None and self.found is not None else self._clock()
        stopped = self.run.commands.prompts.debugged()
        return style_sheet() + parts.panel_html(self.run, self.found, stopped, self.history, now)

    @property
    def text(self) -> str:
        """The panel as plain text."""
        return parts.panel_text(self.run, self.found, self.history)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Exception) else repr(value)
