"""Runs side by side: what they were called with, their last and best metrics, and their curves in one plot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import ipywidgets

from notebook_accelerate.launch import Run, run_registry, runs
from notebook_accelerate.launch.output.replaceable_outputs import Output
from notebook_accelerate.launch.report import rendering, run_comparison, svg_curves
from notebook_accelerate.launch.report.curves import shown_names
from notebook_accelerate.launch.report.document import Action
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets import compared_run
from notebook_accelerate.widgets.compared_run import BestValues, label_of
from notebook_accelerate.widgets.panel_elements import card, problem, widget_bundle, with_classes
from notebook_accelerate.widgets.panel_output import CellView, PanelOutput
from notebook_accelerate.widgets.plot import Plot
from notebook_accelerate.widgets.render_schedule import RenderSchedule, ticker
from notebook_accelerate.widgets.run_panel import RunPanel
from notebook_accelerate.widgets.table_view import TableView

if TYPE_CHECKING:
    from notebook_accelerate.launch.report.document import Table
    from notebook_accelerate.widgets.compared_run import ComparedRun


MAX_IMAGES = 24
"""Metrics whose curves are in the static form."""
MAX_OVERLAID = 16
"""Runs whose curves are drawn: as many as can be told apart, by eight colours, solid and dashed."""
TABLE_SECONDS = 1.0
"""Seconds between two updates of the table while no run starts, ends or changes its state."""


class RunsTable(CellView):
    """Runs with their arguments, differing settings, last and best metrics, and their curves in one plot.

    A displayed table is updated at most five times a second while a run lasts. In the browser it is sorted by a click
    on a head, and filtered by a regular expression; each row has Open, and Stop while its run lasts.

    Args:
        chosen: The runs to show, or their ids; None: all runs of this kernel, also those launched later. Any object
            with the attributes of `compared_run.ComparedRun` is a run. The plot overlays the latest 16 of them; a
            button hides or shows each.
        clock: Seconds since the epoch; a fake one in tests.

    Raises:
        ValueError: There is no run with such an id.
    """

    def __init__(
        self, chosen: Sequence[ComparedRun | int] | None = None, clock: Callable[[], float] = steady_time.now
    ) -> None:
        self._clock = clock
        self.runs = _picked(chosen)
        self._values = BestValues()
        self._clicks: deque[tuple[str, str]] = deque()
        self._open: RunPanel | None = None
        self._states: list[Any] = []
        self._table_due = float("-inf")
        self.plot = Plot([], "None of these runs has logged a metric: these curves were sampled without logging.")
        self._draw_curves()
        self.grid = TableView(self._on_action)
        self._opened = with_classes(ipywidgets.VBox(), "na-opened-run")
        self._problem = ipywidgets.HTML()
        self.widget = card(self._problem, self.grid, self._opened, self.plot)
        self._shown = PanelOutput(self._static, lambda: "Runs of this kernel", clock)
        self.schedule = RenderSchedule([run.store for run in self.runs], self._render, self._failed, clock)
        self.schedule.tick()
        for feed in (self.plot, self.grid):
            feed.on_msg(self._render_soon)
        self.plot.observe(self._render_soon, "wanted")
        for run in self.runs:
            self._follow(run)
        if chosen is None:
            run_registry.watch_launches(self._add_run)

    def refresh(self) -> None:
        """Read the runs again; a displayed table does so by itself while a run lasts."""
        self._render(self._clock())

    def close(self) -> None:
        """Stop updating; each cell that displays the table keeps its static form."""
        ticker.remove(self.schedule)
        self._close_panel()
        self._shown.end()

    # ---- while runs last

    def _draw_curves(self) -> None:
        """Draw the latest runs, in colours that the table repeats."""
        self._overlaid = self.runs[-MAX_OVERLAID:]
        self.plot.order = [label_of(run) for run in self._overlaid]
        self.plot.draw([compared_run.source_of(run) for run in self._overlaid])

    def _follow(self, run: ComparedRun) -> None:
        """Render at the end of a run of this kernel; others end unnoticed until the next tick."""
        if isinstance(run, Run):
            run.add_ending_callback(self.schedule.touch)

    def _render(self, now: float) -> None:
        running = self._is_running()  # read first: the last render then shows the end of the runs
        self._handle_clicks()
        self._update_grid(now)
        self.plot.update(now)
        if self._open is not None:
            self._open.schedule.tick()
        if running and self._shown:
            self._shown.update(now)
        else:
            self._shown.leave()
            ticker.suspend(self.schedule)
            for index, run in enumerate(self.runs):  # in place: another thread may be adding a run
                if isinstance(run, Run) and run.ended is not None and not run.held:
                    self.runs[index] = run.without_results()
            if self._shown and self._is_running():  # a run was launched meanwhile
                ticker.add(self.schedule)

    def _update_grid(self, now: float) -> None:
        states = [(run.id, compared_run.state_of(run), self._is_open(run)) for run in self.runs]
        if states == self._states and now < self._table_due and self._is_running():
            return
        self._states, self._table_due = states, now + 0.95 * TABLE_SECONDS
        self.grid.update(now, lambda _: self.table, complete=not self._is_running())

    @property
    def table(self) -> Table:
        """The table as it is now, the latest run first."""
        sources = [compared_run.source_of(run) for run in self.runs]
        names = shown_names(sources)[: run_comparison.MAX_METRICS]
        places = {id(run): place for place, run in enumerate(self.runs[-MAX_OVERLAID:])}
        entries = [
            compared_run.entry_of(
                run,
                names,
                self._values,
                colour=places.get(id(run), -1),
                tone="opened" if self._is_open(run) else "",
                actions=self._actions(run),
            )
            for run in self.runs
        ]
        return run_comparison.runs_table(entries, "No run has been launched from this kernel yet.")

    def _actions(self, run: ComparedRun) -> tuple[Action, ...]:
        """Return the buttons of a row. Open comes first: its button stays where Stop goes."""
        which = f"run {run.id}"
        shown = Action(id="open", label="Open", hint=f"Open the panel of {which}")
        if self._is_open(run):
            shown = Action(id="open", label="Close", hint=f"Close the panel of {which}")
        stops = run.ended is None and not run.commands.refusal
        return (shown, Action(id="stop", label="Stop", hint=f"Stop {which}", tone="stop")) if stops else (shown,)

    # ---- clicks

    def _on_action(self, key: str, action: str) -> None:
        self._clicks.append((key, action))  # on any thread
        self._render_soon()

    def _handle_clicks(self) -> None:
        while self._clicks:
            key, action = self._clicks.popleft()
            run = next((run for run in self.runs if str(run.id) == key), None)
            if run is None:
                continue
            if action == "stop":
                run.request_stop()
            elif self._is_open(run):
                self._close_panel()
            else:
                self._close_panel()
                self._open = RunPanel(cast("Run", run), self._clock)
                self._opened.children = [self._open.widget]

    def _is_open(self, run: ComparedRun) -> bool:
        return self._open is not None and self._open.run.id == run.id

    def _close_panel(self) -> None:
        panel, self._open = self._open, None
        if panel is not None:
            self._opened.children = []
            with suppress(Exception):  # its widgets may be gone
                panel.close()

    def _is_running(self) -> bool:
        return any(run.ended is None for run in self.runs)

    def _add_run(self, run: Run) -> None:
        """Add a new run; called on the thread of its launch."""
        self.runs = [*self.runs, run]
        self._draw_curves()
        self.schedule.watch(run.store)
        self._follow(run)
        self.schedule.touch()
        if self._shown and not self.schedule.closed:
            ticker.add(self.schedule)

    def _render_soon(self, *_: Any) -> None:
        """Render at the next tick; if no run lasts and nothing ticks, at once."""
        self.schedule.touch()
        if not self._is_running():
            self.schedule.tick()

    def _failed(self, error: Exception) -> None:
        self._problem.value = problem(f"This table stopped updating ({type(error).__name__}: {error}).")

    # ---- contents

    @property
    def rows(self) -> list[list[str]]:
        """The table: a head, then a row per run, the latest first. Settings that all runs share are left out."""
        table = self.table
        return [[column.title for column in table.columns], *([str(cell) for cell in row.cells] for row in table.rows)]

    @property
    def html(self) -> str:
        """Table and curves as static HTML."""
        return rendering.html(self.table) + _overlays(self.runs[-MAX_OVERLAID:])

    @property
    def text(self) -> str:
        """The table as plain text."""
        return rendering.text(self.table)

    def _show_in(self, output: Output) -> None:
        """Show the live table; its static form replaces it when the kernel ends."""
        if self.schedule.closed:
            output.show(self._static())
            return
        running = self._is_running()  # read first: if a run ends meanwhile, a later tick shows its end
        self.schedule.touch()
        self.schedule.tick()
        self._shown.add(output, self.widget)
        if running:
            ticker.add(self.schedule)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return widget_bundle(self.widget, self._static())

    def __repr__(self) -> str:
        return f"<RunsTable: {len(self.runs)} runs>"


def _picked(chosen: Sequence[ComparedRun | int] | None) -> list[ComparedRun]:
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


def _overlays(chosen: Sequence[ComparedRun]) -> Markup:
    """Return an image per metric with a curve of each run."""
    sources = [compared_run.source_of(run) for run in chosen]
    images = [svg_curves.metric_image(sources, name) for name in shown_names(sources)[:MAX_IMAGES]]
    return element("div", join(images, " ")) if images else Markup()
