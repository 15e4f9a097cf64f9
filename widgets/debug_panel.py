"""The debug panel of a run: the location of its ranks, a diagnosis, and an input line for commands to them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.config.plain_values import check_seconds
from notebook_accelerate.debugging.session import Stacks
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Row, Section, Table, Text
from notebook_accelerate.launch.report.markup import Markup, duration, element, join
from notebook_accelerate.launch.report.rank_rows import MANY, short_names
from notebook_accelerate.launch.report.run_snapshot import status
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.actions import CopyButton
from notebook_accelerate.widgets.live_panel import LivePanel, close_hidden
from notebook_accelerate.widgets.panel_elements import PANEL_STYLES, card, html_widgets, row, style_sheet, with_classes
from notebook_accelerate.widgets.render_schedule import ticker
from notebook_accelerate.widgets.table_view import LiveDocument

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.state.run_state import RankInfo


ALL = "all ranks"
_PARTIAL_NAME = re.compile(r"[A-Za-z_][\w.]*$")


class DebugPanel(LivePanel):
    """The ranks with their states and locations, "Why is it stuck?", stacks, an input line, and a history.

    No request is sent to the ranks before the user clicks or types. Requests run on a separate thread, one at a time,
    so that neither the kernel nor the other panels wait for a rank.

    Args:
        run: The run to inspect.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        self.found: Diagnosis | None = run.diagnoses[-1] if run.diagnoses else None
        self.history: list[Entry] = []
        self._completion: threading.Thread | None = None
        self._known = len(run.diagnoses)
        super().__init__(run, clock)

    # ---- the widget

    def _build(self) -> Any:
        self.live = LiveDocument("head", "verdict", "places", "frames", "history", tables=["places"])
        head, verdict, places, frames, history = self.live.widgets.values()
        self._problem = ipywidgets.HTML()
        self.why_button = self._button("Why is it stuck?", "Find out where every rank is", self._diagnose)
        self.pause_button = self._button("Pause", "Hold all ranks before their next step", self._pause)
        self.unpause_button = self._button("Unpause", "Continue the paused ranks", self._unpause)
        # The descriptions are for screen readers. The style sheet hides them.
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
        headline = row([head, self.why_button, self.pause_button, self.unpause_button], "na-headline")
        prompt = row([self.target, self.line, self.send_button], "na-prompt")
        return card(headline, verdict, places, frames, prompt, self._problem, history, guide="debug")

    def _button(self, text: str, hint: str, action: Callable[[], None]) -> Any:
        button = with_classes(ipywidgets.Button(description=text, tooltip=hint), "na-stop", "na-request")
        button.on_click(lambda _: action())
        return button

    def _render(self, now: float) -> None:
        run = self.run
        if len(run.diagnoses) > self._known:
            self._known = len(run.diagnoses)
            self.found = run.diagnoses[-1]
        stopped = internals(run).commands.prompts.debugged()
        self.live.update(now, self._document(now), complete=run.ended is not None)
        unreachable = not self._reachable()
        for control in (self.why_button, self.line, self.send_button):
            control.disabled = unreachable
        self.pause_button.disabled = unreachable or status(run) == "paused"
        self.unpause_button.disabled = unreachable or not run.paused
        self.line.placeholder = (
            f"a command for the debugger of {rank_names(stopped)}, e.g. p loss"
            if stopped
            else "an expression, e.g. model.head.weight.norm()"
        )
        if unreachable and run.ended is not None and self._shown:
            self.close()

    def _reachable(self) -> bool:
        """Return whether ranks can be asked, which is possible after a failure only while they are held."""
        return self.run.ended is None or self.run.held

    def _ended(self, run: Run) -> None:
        if not run.held:  # The run has failed, and its ranks are not held.
            super()._ended(run)

    # ---- requests, sent from any thread

    def _diagnose(self) -> None:
        def diagnose() -> None:
            self.found = self.run.diagnose()

        self._start_request(diagnose)

    def _pause(self) -> None:
        self._start_request(lambda: self._record("pause", "", self.run.pause()))

    def _unpause(self) -> None:
        ranks = [info.rank for info in self.run.ranks]
        self._start_request(lambda: self._record("unpause", "", self.run.unpause(ranks)))

    def _send(self) -> None:
        line = self.line.value.strip()
        if line and self._start_request(lambda: self._ask_or_command(line)):
            self.line.value = ""

    def _ask_or_command(self, line: str) -> None:
        """Send a line to the debuggers of the chosen ranks, or ask these ranks if no debugger has stopped any."""
        chosen = self._chosen()
        stopped = [rank for rank in internals(self.run).commands.prompts.debugged() if chosen is None or rank in chosen]
        if stopped:
            self._record("command", line, dict(self.run.debug_command(line, ranks=stopped)))
        else:
            replies = self.run.ask(line, ranks=chosen)
            self._record("ask", line, {rank: _shown(value) for rank, value in replies.items()})

    def _chosen(self) -> list[int] | None:
        return None if self.target.value == ALL else [int(self.target.value.removeprefix("rank "))]

    def _record(self, kind: str, line: str, answers: dict[int, str]) -> None:
        self.history = [*self.history, Entry(kind, line, answers)][-MAX_HISTORY:]

    def wait(self, timeout: float = 10.0) -> None:
        """Wait for the replies to all requests.

        Args:
            timeout: The maximum time to wait, in seconds.

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
        """Offer names that complete the line, on a separate thread, which does not delay requests."""
        text = change["new"]
        busy = self._completion is not None and self._completion.is_alive()
        if busy or text in self.line.options or not _PARTIAL_NAME.search(text) or not self._reachable():
            return
        rank = (self._chosen() or [info.rank for info in self.run.ranks] or [0])[0]
        self._completion = self._start_thread(lambda: self._offer(text, rank))

    def _offer(self, text: str, rank: int) -> None:
        with suppress(Exception):  # A rank that has exited offers no completions.
            found = tuple(self.run.complete(text, rank, timeout=1.5)[:100])
            if self.line.value == text:
                self.line.options = found

    # ---- without a browser

    def document(self) -> Section:
        """Return the panel's contents without its controls: verdict, ranks, stacks and history."""
        inspected = self.found.time if self.found is not None and self.run.ended is not None else None
        return self._document(self._clock() if inspected is None else inspected)

    def _document(self, now: float) -> Section:
        run, found = self.run, self.found
        parts = (head(run, found, now), verdict(run, found), places_table(run, found), frames(found))
        return Section(key="debug", nodes=(*parts, history(self.history)))

    def _page(self, document: Section) -> Markup:
        content = rendering.html(document, inline=False)
        return join([style_sheet(*PANEL_STYLES), element("div", content, class_="na-run na-card")])


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Exception) else repr(value)


# ---- the Debug section of a run's panel


class DebugSection:
    """Shows how to open a rank's debugger and, for ranks that can be asked, their locations and values.

    Args:
        run: The run to inspect.
        clock: Returns the time in seconds since the epoch.

    Attributes:
        widget: Empty while the section is closed.
        panel: The panel for the ranks, or None if it has not been opened or the ranks have ended.
    """

    def __init__(self, run: Run, clock: Callable[[], float]) -> None:
        self.run, self._clock = run, clock
        self._text: Any = None
        self._code: Any = None
        self._line: Any = None
        self.copy: Any = None
        self.panel: DebugPanel | None = None
        self.widget: Any = with_classes(ipywidgets.VBox(), "na-debug")
        self.shows = ""

    def _build(self) -> None:
        """Create the widgets when the section is first opened, because most panels are shown without it."""
        self._text, self._code = html_widgets(2)
        self.copy = CopyButton(label="Copy this line", insertable=True)
        self._line = with_classes(ipywidgets.HBox([self._code, self.copy]), "na-debug-line")

    def toggle(self, topic: str) -> None:
        """Open the section, or close it if it shows this topic.

        Args:
            topic: "debug", or "answer" for ranks that wait for input.
        """
        if self.shows == topic:
            self.shows = ""
            self._rest()
            self.widget.children = ()
            return
        self.shows = topic
        if self._text is None:
            self._build()
        self._text.value, code = self._how_to_open(topic)
        self._code.value = element("pre", code, class_="na-code") if code else ""
        self.copy.text = code
        parts = [self._text, *([self._line] if code else [])]
        if topic == "debug" and self._reachable():
            self.panel = self.panel or DebugPanel(self.run, self._clock)
            ticker.add(self.panel.schedule)
            parts.append(self.panel.widget)
        self.widget.children = parts

    def update(self) -> None:
        """Close the section if it is about ranks that have exited since it was opened."""
        if self.shows and not self._reachable() and (self.panel is not None or self.shows == "answer"):
            self._close_panel()
            self.shows = ""
            self.widget.children = ()

    def close(self) -> None:
        """Stop updating, and delete the hidden widgets, which are not part of the panel's tree of widgets."""
        self._close_panel()
        close_hidden(self.widget, self._text, self._line)

    def _close_panel(self) -> None:
        if self.panel is not None:
            self._rest()
            self.panel.close()
            self.panel = None

    def _rest(self) -> None:
        if self.panel is not None:
            ticker.suspend(self.panel.schedule)

    def _reachable(self) -> bool:
        return self.run.ended is None or self.run.held

    def _how_to_open(self, topic: str) -> tuple[str, str]:
        """Return an explanation, and the line to type, or "" if there is no such line now."""
        waiting = [rank for rank in self.run.prompts if rank not in internals(self.run).commands.prompts.debugged()]
        if topic == "answer" and self.run.config.block:
            return _paragraph("Type the line into the box below the cell that launched the run."), ""
        if topic == "answer":
            text = f"{rank_names(waiting[:1]).capitalize()} asks in the cell that runs this line:"
            return _paragraph(text), _line(self.run, waiting[0] if waiting else None)
        if self._reachable():
            return _paragraph("This line opens the debugger of a rank in its cell:"), _line(self.run)
        text = "The ranks have ended. Launch with hold_on_error=True to keep ranks at the failing line, then run:"
        return _paragraph(text), _line(None)


def _paragraph(text: str) -> str:
    return element("p", text)


def _line(run: Run | None, rank: int | None = None) -> str:
    """Return the code that opens a debugger. It names the run unless only one run can be meant."""
    argument = "" if rank is None else f"rank={rank}"
    known = run_registry.runs()
    others = [each for each in known if run is not None and each.id != run.id and (each.ended is None or each.held)]
    position = next((index for index, each in enumerate(known) if run is not None and each.id == run.id), None)
    of_run = f"runs()[{position}]." if others and position is not None else ""
    imported = vars(sys.modules["__main__"]).get("notebook_accelerate") is sys.modules["notebook_accelerate"]
    start = "" if imported else "import notebook_accelerate; "
    return f"{start}notebook_accelerate.{of_run}debug({argument})"


# ---- the document

MAX_HISTORY = 50
"""The maximum number of commands that are kept, with their replies."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Entry:
    """A command and the replies to it.

    Attributes:
        kind: "ask", "command", "pause" or "unpause".
        line: The text of the command.
        answers: The replies as text, by rank.
    """

    kind: str
    line: str
    answers: Mapping[int, str]

    @property
    def text(self) -> str:
        """The entry as plain text. Equal replies are listed only once."""
        found: dict[str, list[int]] = {}
        for rank, answer in self.answers.items():
            found.setdefault(_COLOURS.sub("", answer).rstrip(), []).append(rank)
        replies = [f"  {rank_names(ranks)}: {answer}" for answer, ranks in found.items()]
        return "\n".join([f"{self.kind}> {self.line}", *replies])


def stacks_of(found: Diagnosis) -> Stacks:
    """Return the stacks in a diagnosis."""
    return Stacks({place.rank: place.frames for place in found.places if place.frames}, found.name_place)


def head(run: Run, found: Diagnosis | None, now: float) -> Drawing:
    """Return the title, with the time since the latest diagnosis."""
    title = [element("strong", f"Ranks of run {run.id}")]
    if found is not None:
        title.append(element("span", f"inspected {duration(max(0.0, now - found.time))} ago"))
    text = f"run {run.id} ({run.function_name}): {run.status}"
    return Drawing(html=element("div", *title, class_="na-head"), text=text)


def verdict(run: Run, found: Diagnosis | None) -> Section:
    """Return the verdict of the latest diagnosis, and the run's warnings."""
    sentence = (found.verdict,) if found is not None and found.verdict else ()
    warnings = tuple(f"⚠ {warning}" for warning in run.warnings)
    return Section(key="verdict", nodes=(Text(lines=sentence, tone="status"), Text(lines=warnings, tone="warning")))


def frames(found: Diagnosis | None) -> Section:
    """Return the stacks of the latest diagnosis in a fold. Equal stacks are shown only once."""
    text = repr(stacks_of(found)) if found is not None else ""
    nodes = (Text(lines=(text,), tone="code"),) if text else ()
    return Section(key="frames", title="Stacks", nodes=nodes, open=False)


def history(entries: Sequence[Entry]) -> Text:
    """Return commands and replies, newest first."""
    return Text(lines=tuple(entry.text for entry in reversed(entries)), tone="log", label="Commands and replies")


def places_table(run: Run, found: Diagnosis | None) -> Table:
    """Return the table of ranks: state, step, and the location in the latest diagnosis.

    If there are many ranks, those with the same state and location share a row, and the smallest groups come first.
    """
    inspected = {place.rank for place in found.places} if found is not None else set()
    stopped, many = internals(run).commands.prompts.debugged(), len(run.ranks) > MANY
    groups: dict[tuple[str, bool, str, int | None], list[RankInfo]] = {}
    for info in run.ranks:
        state = "paused" if info.rank in run.paused else info.state
        location = found.line_of(info.rank) if found is not None and info.rank in inspected else "not inspected yet"
        key = state, info.rank in stopped, location, None if many else info.rank
        groups.setdefault(key, []).append(info)
    rows = []
    for (state, held, location, _), members in sorted(groups.items(), key=lambda group: len(group[1])):
        count = (f"{len(members):,}",) if many else ()
        shown = Cell(text=state, state=state, badge="at a breakpoint" if held else "")
        cells = (short_names(info.rank for info in members), *count, shown, _steps(members), location)
        rows.append(Row(key=str(members[0].rank), cells=cells))
    titles = [*(["Ranks", "Count"] if many else ["Rank"]), "State", "Step", "Location"]
    columns = tuple(Column(title=title) for title in titles)
    return Table(key="places", label="Locations of the ranks", columns=columns, groups=(Group(rows=tuple(rows)),))


def _steps(members: Sequence[RankInfo]) -> str:
    steps = [info.last_step for info in members if info.last_step is not None]
    return "–".join(dict.fromkeys(f"{step:,}" for step in (min(steps), max(steps)))) if steps else "–"
