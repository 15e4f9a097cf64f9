"""The panel that displaying a run shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.launch.report.node_summary import MANY
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets import grouped_ranks, run_panel_html
from notebook_accelerate.widgets.live_panel import LivePanel
from notebook_accelerate.widgets.log_view import LogView
from notebook_accelerate.widgets.panel_elements import card, row, widget_bundle, with_classes
from notebook_accelerate.widgets.plot import Plot, Source
from notebook_accelerate.widgets.rank_table import RankTable
from notebook_accelerate.widgets.resource_strip import strip
from notebook_accelerate.widgets.run_summary import RunWatcher, loss_name
from notebook_accelerate.widgets.sharding_view import ShardingPage
from notebook_accelerate.widgets.stop_button import hint, kernel_state

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.widgets.run_summary import RunSnapshot

TABS = ("Curves", "Ranks", "Step time", "Sharding", "Logs", "Errors", "Setup")
SLOW_SECONDS = 1.0
"""Seconds between two updates of the resources, step times and shards: of many ranks, and in tabs that are hidden."""
RANK_TABS = ("Ranks", "Step time", "Sharding")


class RunPanel(LivePanel):
    """Header with a stop button, progress, resources, curves, ranks, step times, shards, logs, errors and setup.

    Args:
        run: The run to watch.
        clock: Seconds since the epoch; a fake one in tests.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = steady_time.now) -> None:
        self._watcher = RunWatcher(run)
        self._sharding_page = ShardingPage(run)
        self._tab_titles: dict[int, str] = {}
        self._ranks_due = float("-inf")
        self._rendered_errors: tuple[int, object] | None = None
        super().__init__(run, clock)

    # ---- the widget

    def _build(self) -> Any:
        self._head, self._progress, self._strip = (ipywidgets.HTML() for _ in range(3))
        self._ranks, self._times, self._sharding, self._errors, self._setup = (ipywidgets.HTML() for _ in range(5))
        source = Source(self.run.store, self.run.started)
        self.plot = Plot([source], "No metric has been logged yet: accelerator.log({...}) draws curves here.")
        self.logs = LogView(self.run)
        self.stop_button = with_classes(ipywidgets.Button(description="Stop", tooltip="Stop the run"), "na-stop")
        self.stop_button.on_click(self._stop_clicked)
        self.rank_table = RankTable()
        for feed in (self.plot, self.logs, self.rank_table):
            feed.on_msg(self._render_soon)
        self.plot.observe(self._render_soon, ["wanted", "chosen"])
        self.rank_table.observe(self._render_soon, "unfolded")
        ranks = ipywidgets.VBox([self._ranks, self.rank_table])
        headline = row([self._head, self.stop_button], "na-headline")
        pages = [self.plot, ranks, self._times, self._sharding, self.logs, self._errors, self._setup]
        self._tabs = with_classes(ipywidgets.Tab(children=pages), "na-tabs")
        self._tabs.observe(self._tab_selected, "selected_index")
        for index, title in enumerate(TABS):
            self._set_tab_title(index, title)
        return card(headline, self._problem, self._progress, self._strip, self._tabs)

    def _refer_to(self, run: Run) -> None:
        super()._refer_to(run)
        for part in (self.logs, self._watcher, self._sharding_page):
            part.run = run

    def _set_tab_title(self, index: int, title: str) -> None:
        if self._tab_titles.get(index) != title:
            self._tab_titles[index] = title
            self._tabs.set_title(index, title)

    def _render(self, now: float) -> None:
        run, seen = self.run, self._watcher.snapshot(now)
        self._head.value = run_panel_html.head(run, seen, hint(run, kernel_state()))
        self._progress.value = run_panel_html.progress(seen)
        self._render_ranks(now, seen)
        self._render_errors()
        self._setup.value = self._setup.value or run_panel_html.setup(run)
        self._set_tab_title(1, "Ranks ⚠" if seen.warned else "Ranks")
        self._set_tab_title(TABS.index("Errors"), f"Errors ({len(run.failures)})" if run.failures else "Errors")
        self._show_stop_button()
        self.plot.update(now)
        self.logs.update(now)

    def _render_ranks(self, now: float, seen: RunSnapshot) -> None:
        """Update the parts that grow with the ranks; most of them once a second, if they are many or hidden."""
        run, many = self.run, len(seen.ranks) > MANY
        self.rank_table.layout.display = "" if many else "none"
        if many:
            self._ranks.value = run_panel_html.verdict(seen)
            self.rank_table.update(now, seen, loss_name(run))
            self.plot.draw_outliers(rank.rank for rank in grouped_ranks.outliers(seen.ranks))
        if now < self._ranks_due and run.ended is None and (many or not self._shows_ranks()):
            return
        self._ranks_due = now + 0.95 * SLOW_SECONDS
        if not many:
            self._ranks.value = run_panel_html.ranks(seen, loss_name(run))
        self._strip.value = strip(seen, self._watcher) if run.ended is None else ""
        self._times.value = run_panel_html.step_times(seen) + run_panel_html.traces(run)
        self._sharding.value = self._sharding_page.html()

    def _shows_ranks(self) -> bool:
        """Return whether the tab on top is one that shows ranks; the browser may have reported an earlier one."""
        selected = self._tabs.selected_index
        return selected is not None and TABS[selected] in RANK_TABS

    def _render_errors(self) -> None:
        state = (len(self.run.failures), self.run.error)
        if self._rendered_errors != state:
            self._rendered_errors = state
            self._errors.value = run_panel_html.errors(self.run)

    def _show_stop_button(self) -> None:
        run, button = self.run, self.stop_button
        inline = run.plan is not None and run.plan.start_method == "inline"
        stopping = run.status == "stopping"
        button.layout.display = "none" if run.ended is not None else ""
        button.disabled = inline or run.ended is not None
        button.description = "Kill" if stopping else "Stop"
        button.tooltip = "Kill every rank immediately" if stopping else "Ask every rank to stop"
        button.button_style = "danger" if stopping else ""

    # ---- messages from the browser, on any thread

    def _tab_selected(self, _: Any) -> None:
        self._ranks_due = float("-inf")
        self._render_soon()

    def _stop_clicked(self, _: Any) -> None:
        self.run.request_stop()
        self.binding.touch()

    # ---- without a browser

    @property
    def html(self) -> str:
        """The run's report as static HTML."""
        return self.run.report().html

    @property
    def text(self) -> str:
        """The run's report as plain text."""
        return self.run.report().text

    def _static(self) -> dict[str, Any]:
        return dict(self.run.report().bundle)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self._static() if self.closed else widget_bundle(self.widget, self._static())
