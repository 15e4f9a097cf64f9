"""The debug panel of a run: where its ranks are, why they are stuck, and a line to talk to them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets import debug_panel_html as parts
from notebook_accelerate.widgets.debug_panel_html import MAX_HISTORY, Entry
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.styles import style_sheet

if TYPE_CHECKING:
    from notebook_accelerate.debug.diagnosis import Diagnosis
    from notebook_accelerate.launch import Run

ALL = "all ranks"
_NAME_BEGUN = re.compile(r"[A-Za-z_][\w.]*$")


class DebugPanel(LivePanel):
    """Ranks with state and place, "Why is it stuck?", stacks, a line that asks or casts, and its history.

    Nothing is asked of the ranks until somebody clicks or types. What is asked runs on a thread of its own, one at a
    time, so that neither the kernel nor the other panels wait for a rank.

    Args:
        run: The run to look into.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self.found: Diagnosis | None = run.diagnoses[-1] if run.diagnoses else None
        self.history: list[Entry] = []
        self._asking: threading.Thread | None = None
        self._offering: threading.Thread | None = None
        self._known = len(run.diagnoses)
        super().__init__(run, clock)

    # ---- the widget

    def _build(self) -> Any:
        self._head, self._problem, self._verdict = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._ranks, self._stacks, self._history = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self.why_button = self._button("Why is it stuck?", "Look where every rank is", self._look)
        self.pause_button = self._button("Pause", "Hold all ranks at their next step", self._pause)
        self.resume_button = self._button("Resume", "Let paused ranks go on", self._resume)
        # The descriptions are labels for those who do not see the row: the style sheet hides them from the others.
        options = [ALL, *self._rank_options()]
        self.whom = ipywidgets.Dropdown(options=options, description="Whom to ask", layout={"width": "120px"})
        self.line = ipywidgets.Combobox(description="Ask the ranks", layout={"flex": "1 1 auto"}, ensure_option=False)
        self.send_button = self._button("Send", "Ask, or cast to stopped ranks", self._send)
        self.line.on_msg(self._on_line_message)
        self.line.observe(self._complete, "value")
        self.why_button.add_class("na-first")
        headline = ipywidgets.HBox([self._head, self.why_button, self.pause_button, self.resume_button])
        headline.add_class("na-headline")
        talk = ipywidgets.HBox([self.whom, self.line, self.send_button])
        talk.add_class("na-talk")
        sheet = ipywidgets.HTML(style_sheet())
        sheet.layout.display = "none"
        shown = [sheet, headline, self._verdict, self._ranks, self._stacks, talk, self._problem, self._history]
        box = ipywidgets.VBox(shown)
        for name in ("na-run", "na-card"):
            box.add_class(name)
        return box

    def _button(self, text: str, hint: str, action: Callable[[], None]) -> Any:
        button = ipywidgets.Button(description=text, tooltip=hint)
        for name in ("na-stop", "na-tell"):
            button.add_class(name)
        button.on_click(lambda _: action())
        return button

    def _rank_options(self) -> list[str]:
        return [f"rank {info.rank}" for info in self.run.ranks]

    def _render(self, now: float) -> None:
        run = self.run
        if len(run.diagnoses) > self._known:
            self._known = len(run.diagnoses)
            self.found = run.diagnoses[-1]
        stopped = run._board.debugged()
        self._head.value = f'<div class="na-head"><strong>Ranks of run {run.id}</strong></div>'
        self._verdict.value = parts.verdict_html(run, self.found)
        self._ranks.value = parts.ranks_html(run, self.found, stopped, now)
        self._stacks.value = parts.stacks_html(self.found)
        self._history.value = parts.history_html(self.history)
        over = not self._reachable()
        for control in (self.why_button, self.pause_button, self.resume_button, self.line, self.send_button):
            control.disabled = over
        self.line.placeholder = (
            f"a command for the debugger of {rank_names(stopped)}, as p loss"
            if stopped
            else "an expression, as model.head.weight.norm()"
        )
        if over and run.ended is not None and self._shown:
            self.close()

    def _reachable(self) -> bool:
        """Whether there are ranks to ask: also after a failure, while they are held."""
        return self.run.ended is None or not self.run._released.is_set()

    def _say(self, text: str) -> None:
        self._problem.value = f'<p class="na-problem" role="alert">{escape(text)}</p>' if text else ""

    def _ended(self, run: Run) -> None:
        if run._released.is_set():  # not held for inspection
            super()._ended(run)

    # ---- what is asked; on any thread

    def _look(self) -> None:
        self._do(self._diagnose)

    def _diagnose(self) -> None:
        self.found = self.run.diagnose()

    def _pause(self) -> None:
        self._do(lambda: self._note("pause", "", self.run.pause()))

    def _resume(self) -> None:
        self._do(lambda: self._note("resume", "", self.run.resume()))

    def _send(self) -> None:
        line = self.line.value.strip()
        if line and self._do(lambda: self._talk(line)):
            self.line.value = ""

    def _talk(self, line: str) -> None:
        """Cast a line to the ranks that a debugger holds, where there are any among those chosen; else ask."""
        chosen = self._chosen()
        stopped = [rank for rank in self.run._board.debugged() if chosen is None or rank in chosen]
        if stopped:
            self._note("cast", line, dict(self.run.cast(line, ranks=stopped)))
        else:
            self._note("ask", line, {rank: _shown(value) for rank, value in self.run.ask(line, ranks=chosen).items()})

    def _chosen(self) -> list[int] | None:
        return None if self.whom.value == ALL else [int(self.whom.value.removeprefix("rank "))]

    def _note(self, kind: str, line: str, answers: dict[int, str]) -> None:
        self.history = [*self.history, Entry(kind, line, answers)][-MAX_HISTORY:]

    def _do(self, work: Callable[[], None]) -> bool:
        """Run ``work`` on a thread, unless something is being asked already; return whether it was not."""
        if self._asking is not None and self._asking.is_alive():
            self._say("The ranks are still being asked; one thing at a time.")
            return False
        self._say("")
        self._asking = self._thread(lambda: self._work(work))
        return True

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        name = f"notebook-accelerate-debug-panel-{self.run.id}"
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever a question raises is the answer to it
            self._say(str(error) or type(error).__name__)
        self.binding.touch()
        if self.run.ended is not None:  # nobody else renders any more
            self.binding.tick()

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until what is being asked has been answered.

        Args:
            timeout: Seconds.
        """
        for thread in (self._asking, self._offering):
            if thread is not None:
                thread.join(timeout)

    # ---- typing

    def _on_line_message(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and content.get("event") == "submit":
            self._send()

    def _complete(self, change: Any) -> None:
        """Offer the names that complete the line, when one has been begun; no question ever waits for that."""
        text = change["new"]
        busy = self._offering is not None and self._offering.is_alive()
        if busy or text in self.line.options or not _NAME_BEGUN.search(text) or not self._reachable():
            return
        rank = (self._chosen() or [info.rank for info in self.run.ranks] or [0])[0]
        self._offering = self._thread(lambda: self._offer(text, rank))

    def _offer(self, text: str, rank: int) -> None:
        with suppress(Exception):  # the rank has gone: there is nothing to offer
            found = tuple(self.run.complete(text, rank, timeout=1.5)[:100])
            if self.line.value == text:
                self.line.options = found

    # ---- without a browser

    @property
    def html(self) -> str:
        """The panel as static HTML: verdict, ranks, stacks and history as they are now."""
        now = self.found.time if self.run.ended is not None and self.found is not None else self._clock()
        body = (
            f'<div class="na-head"><strong>Ranks of run {self.run.id}</strong></div>'
            + parts.verdict_html(self.run, self.found)
            + parts.ranks_html(self.run, self.found, self.run._board.debugged(), now)
            + parts.stacks_html(self.found)
            + parts.history_html(self.history)
        )
        return f'{style_sheet()}<div class="na-run na-card">{body}</div>'

    @property
    def text(self) -> str:
        """The panel as plain text."""
        return parts.text(self.run, self.found, self.history)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Exception) else repr(value)


__all__ = ["ALL", "DebugPanel"]
