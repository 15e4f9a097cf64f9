"""Runs side by side: their arguments, their last and best metrics, and their curves in one plot."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import ipywidgets

from notebook_accelerate.launch import KeptRuns, Run, attaching, run_registry, runs
from notebook_accelerate.launch.output.replaceable_outputs import Output
from notebook_accelerate.launch.report import run_comparison, svg_curves
from notebook_accelerate.launch.report.curves import Source, shown_names
from notebook_accelerate.launch.report.document import Action, Drawing, Section, Text
from notebook_accelerate.launch.report.markup import element
from notebook_accelerate.launch.run import add_ending_callback, without_results
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets import compared_run
from notebook_accelerate.widgets.actions import stop_action
from notebook_accelerate.widgets.compared_run import BestValues, KeptRow, label_of, opened
from notebook_accelerate.widgets.front_end import no_widgets
from notebook_accelerate.widgets.live_panel import Panel
from notebook_accelerate.widgets.panel_elements import card, with_classes
from notebook_accelerate.widgets.plot import Plot
from notebook_accelerate.widgets.render_schedule import ticker
from notebook_accelerate.widgets.run_panel import RunPanel
from notebook_accelerate.widgets.table_view import TableView

if TYPE_CHECKING:
    from notebook_accelerate.launch.report.document import Table
    from notebook_accelerate.widgets.compared_run import ComparedRun


MAX_OVERLAID = 16
"""The maximum number of runs whose curves are drawn, in eight colours, solid and dashed."""
OPENING_SECONDS = 0.2
"""Seconds that an update may spend on opening kept runs."""
TABLE_SECONDS = 1.0
"""Seconds between two updates of the table if no run starts, ends or changes its state."""


class RunsTable(Panel):
    """Runs with their arguments, differing settings, last and best metrics, and their curves in one plot.

    A displayed table is updated at most five times a second while any run is running. A click on a column's head sorts
    it, and a regular expression filters its rows and curves. Each row has the button Open and, while its run lasts,
    Stop.

    Args:
        chosen: The runs to show, or their IDs. If None, all runs of this kernel are shown, even those launched later.
            Any object with the attributes of `compared_run.ComparedRun` is a run. The plot overlays the latest 16 runs,
            and a button hides or shows each. Of `KeptRuns`, those 16 are opened once the table is displayed.
        clock: Returns the time in seconds since the epoch. Tests pass a fake clock.
        title: The title of the table. If "", it says which runs are shown.

    Raises:
        ValueError: A chosen ID belongs to no run.
    """

    def __init__(
        self,
        chosen: Sequence[ComparedRun | int] | KeptRuns | None = None,
        clock: Callable[[], float] = steady_time.now,
        title: str = "",
    ) -> None:
        self._heading = title
        self._is_kept = isinstance(chosen, KeptRuns)
        self._elsewhere = _elsewhere_text() if chosen is None else ""
        self.runs = _picked(chosen)
        self._values = BestValues()
        self._clicks: deque[tuple[str, str]] = deque()
        self._open: tuple[int | str, RunPanel] | None = None  # The id of the run whose panel is open, and the panel.
        self._states: list[Any] = []
        self._table_due = float("-inf")
        super().__init__([internals(run).store for run in map(opened, self.runs) if run is not None], clock)
        self.schedule.tick()
        for run in self.runs:
            self._follow(run)
        if chosen is None:
            run_registry.watch_launches(self.add_run)

    def _build(self) -> Any:
        self.plot = Plot([], "None of these runs has logged a metric: these curves were sampled without logging.")
        self.grid = TableView(self._on_action)
        self._draw_curves()
        for feed in (self.plot, self.grid):
            feed.on_msg(self._render_soon)
        self.plot.observe(self._render_soon, "wanted")
        self.grid.observe(self._on_filter, "filtered")
        self._opened = with_classes(ipywidgets.VBox(), "na-opened-run")
        self._problem = ipywidgets.HTML()
        elsewhere = ipywidgets.HTML(element("p", self._elsewhere, class_="na-note") if self._elsewhere else "")
        return card(self._problem, self.grid, elsewhere, self._opened, self.plot, guide="table")

    def _title(self) -> str:
        return self._heading or ("Kept runs" if self._is_kept else "Runs of this kernel")

    def refresh(self) -> None:
        """Read the runs again. A displayed table does so by itself while any run is running."""
        self.schedule.tick(due=True)

    # ---- while runs last

    def _draw_curves(self) -> None:
        """Draw the curves of the overlaid runs, in colours that the table also shows."""
        overlaid = self._overlaid
        self.plot.order = compared_run.names_of(overlaid)
        self.plot.draw(_sources(overlaid))

    @property
    def _overlaid(self) -> list[ComparedRun | KeptRow]:
        """The runs whose curves are drawn: the latest ones that the filter lets through.

        If there are few runs, all of them are drawn, so that a filter does not change their colours.
        """
        if self.grid.filtered is None or len(self.runs) <= MAX_OVERLAID:
            return self.runs[-MAX_OVERLAID:]
        passed = set(self.grid.filtered)
        return [run for run in self.runs if str(run.id) in passed][-MAX_OVERLAID:]

    def _on_filter(self, _: Any) -> None:
        if len(self.runs) > MAX_OVERLAID:
            self._draw_curves()
            self._table_due = float("-inf")
            self._render_soon()

    def _follow(self, run: ComparedRun | KeptRow) -> None:
        """Render at the end of a run of this kernel. The end of other runs is noticed only at the next tick."""
        if isinstance(known := opened(run), Run):
            add_ending_callback(known, self.schedule.touch)

    def _unopened(self) -> list[KeptRow]:
        """Return the kept runs whose curves are to be drawn."""
        return [run for run in self._overlaid if isinstance(run, KeptRow) and run.run is None and not run.is_broken]

    def _open_kept(self, seconds: float = OPENING_SECONDS) -> None:
        """Open the latest kept runs, which takes up to half a second for each, and draw their curves."""
        end = time.monotonic() + seconds
        waiting = self._unopened()
        for run in reversed(waiting):
            self._open_row(run)
            if time.monotonic() > end:
                break
        if waiting:
            self._draw_curves()

    def _open_row(self, run: KeptRow) -> None:
        if run.run is None and (known := run.open()) is not None:
            self.schedule.watch(internals(known).store)
            self._follow(run)

    def _render(self, now: float) -> None:
        self._handle_clicks()
        if self.shown:
            self._open_kept()
        self._update_grid(now)
        self.plot.update(now)
        if self._open is not None:
            self._open[1].schedule.tick()

    def _changes(self) -> bool:
        """Return whether a run is running, or kept runs are being opened."""
        lasts = any(run.ended is None for run in map(opened, self.runs) if run is not None)
        return lasts or (self.shown and bool(self._unopened()))

    def _can_rest(self) -> bool:
        return not (self.shown and self._changes())

    def _rest(self) -> None:
        super()._rest()
        for index, run in enumerate(self.runs):  # Change the list in place, because another thread may add a run.
            if isinstance(run, Run) and run.ended is not None and not run.held:
                self.runs[index] = without_results(run)
        if self.shown and self._changes():  # A run was launched during the last render.
            ticker.add(self.schedule)

    def _update_grid(self, now: float) -> None:
        states = [(run.id, compared_run.state_of(run), self._is_open(run)) for run in self.runs]
        if states == self._states and now < self._table_due and self._changes():
            return
        self._states, self._table_due = states, now + 0.95 * TABLE_SECONDS
        self.grid.update(now, lambda _: self.table, complete=not self._changes())

    @property
    def table(self) -> Table:
        """The table in its current state, with the latest run first."""
        names = shown_names(_sources(self.runs))[: run_comparison.MAX_METRICS]
        places = {run.id: place for place, run in enumerate(self._overlaid)}
        entries = [
            compared_run.entry_of(
                run,
                names,
                self._values,
                colour=places.get(run.id, -1),
                tone="opened" if self._is_open(run) else "",
                actions=self._actions(run),
            )
            for run in self.runs
        ]
        empty = "No kept runs" if self._is_kept else "No run has been launched from this kernel yet."
        return run_comparison.runs_table(entries, empty, sortable=True)

    def _actions(self, run: ComparedRun | KeptRow) -> tuple[Action, ...]:
        """Return the buttons of a row. Open comes first, so that it stays in place when Stop disappears."""
        if isinstance(run, KeptRow) and run.is_broken:
            return ()
        which, known = label_of(run), opened(run)
        shown = Action(id="open", label="Open", hint=f"Open the panel of {which}")
        if self._is_open(run):
            shown = Action(id="open", label="Close", hint=f"Close the panel of {which}")
        if known is None or known.ended is not None or internals(known).commands.refusal:
            return (shown,)
        return (shown, stop_action(known, f"Stop {which}"))

    # ---- clicks

    def _on_action(self, key: str, action: str) -> None:
        self._clicks.append((key, action))  # This may be called on any thread.
        self._render_soon()

    def _handle_clicks(self) -> None:
        while self._clicks:
            key, action = self._clicks.popleft()
            run = next((run for run in self.runs if str(run.id) == key), None)
            if run is None:
                continue
            was_open = self._is_open(run)
            if isinstance(run, KeptRow):
                self._open_row(run)
            known = opened(run)
            if action == "stop" and known is not None:
                known.stop(wait=False)
                continue
            self._close_panel()
            if not was_open and known is not None:
                panel = RunPanel(cast("Run", known), self._clock)
                self._open, self._opened.children = (run.id, panel), [panel.widget]

    def _is_open(self, run: ComparedRun | KeptRow) -> bool:
        return self._open is not None and self._open[0] == run.id

    def _close_panel(self) -> None:
        shown, self._open = self._open, None
        if shown is not None:
            self._opened.children = []
            with suppress(Exception):  # The table's widgets may have been deleted already.
                shown[1].close()

    _release = _close_panel

    def add_run(self, run: Run) -> None:
        """Add a new run. Safe to call from any thread."""
        self.runs = [*self.runs, run]
        self._draw_curves()
        self.schedule.watch(internals(run).store)
        self._follow(run)
        self.schedule.touch()
        if self.shown and not self.closed:
            ticker.add(self.schedule)

    # ---- contents

    @property
    def rows(self) -> list[list[str]]:
        """The table as a head and a row for each run, latest first, without the settings that all runs share."""
        table = self.table
        return [[column.title for column in table.columns], *([str(cell) for cell in row.cells] for row in table.rows)]

    def document(self) -> Section:
        """Return the table and the curves."""
        curves = svg_curves.metric_images(_sources(self._overlaid))
        elsewhere = (Text(lines=(self._elsewhere,), tone="note"),) if self._elsewhere else ()
        return Section(key="runs", nodes=(self.table, *elsewhere, Drawing(html=curves)))

    def _show_in(self, output: Output) -> None:
        if no_widgets(output):
            self._open_kept(math.inf)
        super()._show_in(output)
        if self._changes() and not self.closed:  # Kept runs are opened once the table is shown.
            ticker.add(self.schedule)

    def __repr__(self) -> str:
        return f"<RunsTable: {len(self.runs)} runs>"


def _elsewhere_text() -> str:
    """Return how to list the detached runs of other projects, or "" if there are none."""
    project = attaching.project_folder()
    count = 0 if project is None else attaching.count_elsewhere(project)
    found = f"{count} detached run{'s' if count > 1 else ''}"
    return f"{found} of other folders: notebook_accelerate.runs(all=True)" if count else ""


def _picked(chosen: Sequence[ComparedRun | int] | KeptRuns | None) -> list[ComparedRun | KeptRow]:
    if isinstance(chosen, KeptRuns):
        return [KeptRow(row, label) for row, label in zip(chosen, chosen.labels, strict=True)]
    known = {run.id: run for run in runs()}
    if chosen is None:
        return list(known.values())
    missing = [one for one in chosen if isinstance(one, int) and one not in known]
    if missing:
        ids = ", ".join(map(str, known)) or "none yet"
        raise ValueError(
            f"there is no run {missing[0]!r} in this kernel; the ids are: {ids}; pass some: RunsTable([1, 2])"
        )
    return [known[one] if isinstance(one, int) else one for one in chosen]


def _sources(rows: Sequence[ComparedRun | KeptRow]) -> list[Source]:
    """Return the curves of runs, except of kept runs that are not open."""
    names = compared_run.names_of(rows)
    known = [(run, name) for row, name in zip(rows, names, strict=True) if (run := opened(row)) is not None]
    return [compared_run.source_of(run, name) for run, name in known]
