"""The panel that is shown when a run is displayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from notebook_accelerate.launch import attaching, run_registry
from notebook_accelerate.launch.report import mesh_diagram, rank_tables, run_report
from notebook_accelerate.launch.report.curves import Source
from notebook_accelerate.launch.report.document import Action, Drawing, Section
from notebook_accelerate.launch.report.rank_rows import MANY
from notebook_accelerate.launch.report.run_snapshot import RunWatcher, loss_name
from notebook_accelerate.launch.run import output_of
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets import run_sections
from notebook_accelerate.widgets.actions import (
    DEBUG,
    PAUSE,
    UNPAUSE,
    ActionRow,
    ActionRows,
    ResumeOffer,
    is_inline,
    needs,
    stopping,
)
from notebook_accelerate.widgets.debug_panel import DebugSection
from notebook_accelerate.widgets.feed import Feed
from notebook_accelerate.widgets.front_end import front_end, kernel_state
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.panel_elements import (
    card,
    row,
    script,
    with_classes,
)
from notebook_accelerate.widgets.plot import Plot
from notebook_accelerate.widgets.profile_panel import MEMORY, PROFILE, MemorySection, ProfileSection
from notebook_accelerate.widgets.resource_strip import strip
from notebook_accelerate.widgets.table_view import LiveDocument, TableView

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.output.replaceable_outputs import Output
    from notebook_accelerate.launch.report.run_snapshot import RunSnapshot
    from notebook_accelerate.telemetry.store import LogLine
    from notebook_accelerate.widgets.front_end import KernelState

SECTIONS = ("head", "progress", "resources", "verdict", "devices", "times", "sharding", "errors", "setup")
TABS = ("Curves", "Ranks", "Step time", "Sharding", "Logs", "Errors", "Setup")
SLOW_SECONDS = 1.0
"""Seconds between two updates of resources, step times and shards, if there are many ranks or the tab is hidden."""
RANK_TABS = ("Ranks", "Step time", "Sharding")


class RunPanel(LivePanel):
    """The panel of a run: header, notices, resources, curves, ranks, step times, shards, logs, errors and setup.

    Args:
        run: The run to watch.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
    """

    stays = True

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        self._watcher = RunWatcher(run)
        self._tab_titles: dict[int, str] = {}
        self._ranks_due = float("-inf")
        self._resume_offer = ResumeOffer()
        super().__init__(run, clock)

    # ---- the widget

    def _build(self) -> Any:
        self._problem = ipywidgets.HTML()
        self.sections = LiveDocument(*SECTIONS)
        head, progress, resources, verdict, devices, times, sharding, errors, setup = self.sections.widgets.values()
        metrics = Source(internals(self.run).store, self.run.started, automatic=self.run.config.automatic_metrics)
        self.plot = Plot([metrics], "No metrics yet: accelerator.log({...}) draws curves here.")
        self.logs = LogView(self.run)
        self.buttons = with_classes(ActionRows(self._act), "na-toolbar")
        self.attention = with_classes(ActionRows(self._act, "What needs you"), "na-attention")
        self.debug_section = DebugSection(self.run, self._clock)
        self.profile_section = ProfileSection(self.run, self._render_soon)
        self.memory_section = MemorySection(self.run, self._render_soon)
        self.rank_table = TableView(throttled=rank_tables.OTHERS)
        for feed in (self.plot, self.logs, self.rank_table):
            feed.on_msg(self._render_soon)
        self.plot.observe(self._render_soon, ["wanted", "chosen"])
        self.rank_table.observe(self._render_soon, "unfolded")
        ranks = ipywidgets.VBox([verdict, self.rank_table, devices])
        headline = row([head, self.buttons], "na-headline")
        self._earlier = _earlier_of_cell(self.run)
        pages = [self.plot, ranks, times, sharding, self.logs, errors, setup]
        self._tabs = with_classes(ipywidgets.Tab(children=pages), "na-tabs")
        self._tabs.observe(self._tab_selected, "selected_index")
        for index, title in enumerate(TABS):
            self._set_tab_title(index, title)
        sections = [part.widget for part in (self.debug_section, self.profile_section, self.memory_section)]
        return card(headline, progress, self.attention, self._problem, *sections, resources, self._tabs, guide="run")

    def _refer_to(self, run: Run) -> None:
        super()._refer_to(run)
        for part in (self.logs, self._watcher, self.debug_section, self.profile_section, self.memory_section):
            part.run = run

    def _set_tab_title(self, index: int, title: str) -> None:
        if self._tab_titles.get(index) != title:
            self._tab_titles[index] = title
            self._tabs.set_title(index, title)

    def _render(self, now: float) -> None:
        run, seen, kernel = self.run, self._watcher.snapshot(now), kernel_state()
        if self._shown and kernel is not None:
            front_end.observe(now, handles_messages=kernel.handles_clicks)
        show = self.sections.show
        show("head", now, lambda: run_sections.head(run, seen))
        show("progress", (seen.progress, seen.status), lambda: run_sections.progress(seen))
        self._show_actions(now, seen.status, kernel)
        self._render_ranks(now, seen)
        show("errors", (len(run.failures), run.error), lambda: run_sections.errors(run))
        show("setup", (run.plan, len(run.notes)), lambda: Section(key="setup", nodes=run_report.setup(run)))
        self._set_tab_title(1, "Ranks ⚠" if seen.warned else "Ranks")
        self._set_tab_title(TABS.index("Errors"), f"Errors ({len(run.failures)})" if run.failures else "Errors")
        self.debug_section.update()
        if run.ended is not None:
            self.plot.empty_text = "This run logged no metrics."
            self.logs.empty_text = "This run printed nothing."
        self.plot.update(now)
        self.logs.update(now)

    def _show_actions(self, now: float, status: str, kernel: KernelState | None) -> None:
        """Show the buttons of the header, and the rows below it. A click may have to wait for the running cell."""
        run, how = self.run, stopping(self.run, kernel)
        reached = kernel is None or kernel.handles_clicks
        rows = [*needs(run, now, how.action), *self._still_running(), *self._resume_offer.rows(run)]
        server_id = kernel.id if kernel is not None else ""
        actions = [] if run.ended is not None else [how.action]
        if run.ended is None and not is_inline(run):
            pause = UNPAUSE if status == "paused" else PAUSE
            profile = replace(PROFILE, enabled=not self.profile_section.recording)
            needed = any(DEBUG in row.actions for row in rows)
            memory = replace(MEMORY, enabled=not self.memory_section.recording)
            actions = [pause, profile, memory, replace(DEBUG, tone="first" if needed else ""), how.action]
        rows = [_reached(_without(row, actions), reached=reached) for row in rows]
        self.attention.show(rows, server_id, how.note, how.unreachable)
        self.buttons.show([_reached(ActionRow(key="run", actions=tuple(actions)), reached=reached)], server_id)

    def _show_in(self, output: Output) -> None:
        super()._show_in(output)
        self._resume_offer.parent = output.parent

    def _still_running(self) -> list[ActionRow]:
        """Return the runs of earlier executions of the cell that are still running, with buttons that stop them."""
        self._earlier = [other for other in self._earlier if other.ended is None]
        return [
            ActionRow(
                key=f"run {other.id}",
                text=f"run {other.id} is still running",
                actions=(Action(id=f"stop {other.id}", label=f"Stop run {other.id}", hint="Ask its ranks to stop"),),
                tone="warn",
            )
            for other in self._earlier
        ]

    def _render_ranks(self, now: float, seen: RunSnapshot) -> None:
        """Update the parts that grow with the ranks, or most of them once a second if ranks are many or hidden."""
        run, many = self.run, len(seen.ranks) > MANY
        due = now >= self._ranks_due or run.ended is not None or (self._shows_ranks() and not many)
        show = self.sections.show
        if many or due:
            show("verdict", (seen.verdict, seen.warned), lambda: run_sections.verdict(seen))
            table = partial(rank_tables.live_ranks, seen.ranks, loss_name(run))
            self.rank_table.update(now, lambda complete: table(with_others=complete), complete=run.ended is not None)
        if many:
            self.plot.draw_outliers(rank.rank for rank in rank_tables.outliers(seen.ranks))
        if not due:
            return
        self._ranks_due = now + 0.95 * SLOW_SECONDS
        reports = mesh_diagram.latest_reports(run)
        show("devices", now, lambda: rank_tables.device_table(seen.ranks))
        show("resources", now, lambda: strip(seen, self._watcher) if run.ended is None else Drawing())
        show("times", now, lambda: run_sections.step_times(seen, run))
        ended = run.ended is not None
        show("sharding", (reports, ended), lambda: run_sections.sharding(reports, ended=ended))

    def _shows_ranks(self) -> bool:
        """Return whether the open tab shows ranks, according to the browser's last report."""
        selected = self._tabs.selected_index
        return selected is not None and TABS[selected] in RANK_TABS

    # ---- messages from the browser, on any thread

    def _tab_selected(self, _: Any) -> None:
        self._ranks_due = float("-inf")
        self._render_soon()

    def _act(self, action: str) -> None:
        """Do the same as a click on a button."""
        name, _, number = action.partition(" ")
        if number:
            for other in [other for other in self._earlier if str(other.id) == number]:
                other.stop(wait=False)
        elif name == "stop":
            self.run.stop(wait=False)
        elif name in ("pause", "unpause"):
            self._start_request(getattr(self.run, name))
        elif name == "continue":
            self._start_request(partial(self._resume_offer.launch, self.run))
        elif name in ("debug", "answer"):
            self.debug_section.toggle(name)
        elif name == "profile":
            self.profile_section.start()
        elif name == "memory":
            self.memory_section.start()
        elif name == "errors":
            self._tabs.selected_index = TABS.index("Errors")
        self._render_soon()

    def close(self) -> None:
        """Stop updating the panel and its sections. Each cell keeps the static form."""
        self.debug_section.close()
        self.profile_section.close()
        self.memory_section.close()
        super().close()

    # ---- without a browser

    def document(self) -> Section:
        """Return the report of the run, with the profile and the memory that the panel shows."""
        recordings = (self.profile_section.document(), self.memory_section.document())
        return Section(key="report", nodes=(super().document(), *recordings))


def _earlier_of_cell(run: Run) -> list[Run]:
    """Return the runs that are still running, but whose panels are gone because their cell was executed again.

    Only this kernel has launched runs from its cells, so the records of other runs are not read.
    """
    cell = output_of(run).cell
    others = [*run_registry.own_runs(), *attaching.attached_runs()] if cell else []
    return [each for each in others if output_of(each).cell == cell and _precedes(each, run)]


def _precedes(earlier: Run, run: Run) -> bool:
    return earlier.id < run.id and earlier.ended is None and run.ended is None


def _without(row: ActionRow, actions: Sequence[Action]) -> ActionRow:
    """Return a row without the buttons that the header has."""
    known = {action.id for action in actions}
    return replace(row, actions=tuple(action for action in row.actions if action.id not in known))


def _reached(row: ActionRow, *, reached: bool) -> ActionRow:
    """Return a row whose buttons, except Stop, are disabled while a click would wait for the running cell."""
    if reached:
        return row
    waits = "Works again when the running cell has ended"
    actions = [each if each.id.startswith("stop") else replace(each, enabled=False, hint=waits) for each in row.actions]
    return replace(row, actions=tuple(actions))


# ---- the output of the ranks

FIRST_LINES = 500
"""The maximum number of lines per rank in a message with everything."""
NEW_LINES = 200
"""The maximum number of lines per rank in one update. Only the last lines are sent."""
ALL_FIRST_LINES, ALL_NEW_LINES = 8_000, 1_600
"""The same limits for all ranks together, so that each rank has fewer lines if there are many ranks."""
MAX_LINE = 4_000
"""The maximum number of characters of a line that are shown."""


class LogView(Feed):
    """The output lines of all ranks, with the newest at the end.

    Args:
        run: The run whose output is shown.
    """

    _esm = script("feed.js", "logs.js")
    empty_text: Any = traitlets.Unicode("No output yet.").tag(sync=True)

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._sent = 0
        self._cursors: dict[int, int] = {}

    def update(self, now: float) -> None:
        """Send the new lines, or the latest lines of all ranks if a view asked for them or may have missed some."""
        total = internals(self.run).store.log_total
        # Begin with everything, because a view could not ask a busy kernel for a message that it has missed.
        first = not self.full and total > 0
        if self._full_due(now) or first:
            self._send_lines("full", min(FIRST_LINES, self._per_rank(ALL_FIRST_LINES)))
        elif total != self._sent:
            self._send_lines("delta", min(NEW_LINES, self._per_rank(ALL_NEW_LINES)))

    def _per_rank(self, lines: int) -> int:
        return max(1, lines // max(1, len(internals(self.run).journal.state.ranks)))

    def _send_lines(self, kind: str, limit: int) -> None:
        lines: list[tuple[int, float, str, str]] = []
        skipped: dict[str, int] = {}
        everything, ranks = kind == "full", internals(self.run).journal.state.ranks
        self._sent = internals(self.run).store.log_total
        for info in ranks:
            since = 0 if everything else self._cursors.get(info.rank, 0)
            found, self._cursors[info.rank], left_out = internals(self.run).store.log_tail(info.rank, since, limit)
            lines += [(info.rank, line.time, line.stream, _cut(line)) for line in found]
            if left_out:
                skipped[str(info.rank)] = left_out
        if not lines:
            return
        lines.sort(key=lambda line: line[1])
        nodes: dict[str, Any] = {str(info.rank): info.node for info in ranks} if everything else {}
        if len(set(nodes.values())) < 2:
            nodes = {}
        self._send_message(kind, {"lines": lines, "skipped": skipped, "nodes": nodes})


def _cut(line: LogLine) -> str:
    return line.text if len(line.text) <= MAX_LINE else line.text[:MAX_LINE] + " …"
