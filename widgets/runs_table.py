"""The runs of a kernel side by side: their differing settings, last metrics, and curves in one plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import ipywidgets

from notebook_accelerate.config.hidden_values import hide_credentials
from notebook_accelerate.config.plain_values import format_setting
from notebook_accelerate.launch import Run, run_registry, runs
from notebook_accelerate.launch.output.replaceable_outputs import here
from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.number_format import number
from notebook_accelerate.launch.report.tables import LEFT, html_table, text_table
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.widgets import run_panel_html
from notebook_accelerate.widgets.panel_elements import card, problem, widget_bundle
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.plot import Plot, Source
from notebook_accelerate.widgets.render_schedule import RenderSchedule, ticker
from notebook_accelerate.widgets.run_summary import duration

MAX_COLUMNS = 8
"""Metrics that have a column."""
_HIDDEN_SETTINGS = ("env", "num_processes", "block", "panel", "use_port", "rdzv_conf")
"""Settings without a column: they do not affect the training, or may hold a secret."""
MAX_IMAGES = 24
"""Metrics whose curves are in the static form."""
MAX_OVERLAID = 8
"""Runs whose curves are drawn: as many as there are colours."""


class RunsTable:
    """The runs of this kernel, with their differing settings and last metrics, and their curves in one plot.

    A displayed table is updated at most five times a second while a run lasts.

    Args:
        chosen: The runs to show, or their ids; None: all runs of this kernel, also those launched later. The plot
            overlays the latest eight of them; a button hides or shows each.
        clock: Seconds since the epoch; a fake one in tests.

    Raises:
        ValueError: There is no run with such an id.
    """

    def __init__(self, chosen: Sequence[Run | int] | None = None, clock: Callable[[], float] = steady_time.now) -> None:
        self._clock = clock
        self.runs = _picked(chosen)
        self.plot = Plot(self._sources(), "None of these runs has logged a metric.")
        self._table, self._problem = ipywidgets.HTML(), ipywidgets.HTML()
        self.widget = card(self._problem, self._table, self.plot)
        self._shown = PanelOutput(self._static, lambda: "Runs of this kernel", clock)
        self.binding = RenderSchedule([run.store for run in self.runs], self._render, self._failed, clock)
        self.binding.tick()
        self.plot.on_msg(self._render_soon)
        self.plot.observe(self._render_soon, "wanted")
        for run in self.runs:
            run.add_ending_callback(self.binding.touch)
        if chosen is None:
            run_registry.watch(self._add_run)

    def refresh(self) -> None:
        """Read the runs again; a displayed table does so by itself while a run lasts."""
        self._render(self._clock())

    def close(self) -> None:
        """Stop updating; each cell that displays the table keeps its static form."""
        ticker.remove(self.binding)
        self._shown.end()

    # ---- while runs last

    def _sources(self) -> list[Source]:
        return [Source(run.store, run.started, f"run {run.id}", ranks=False) for run in self.runs[-MAX_OVERLAID:]]

    def _render(self, now: float) -> None:
        running = self._is_running()  # read first: the last render then shows the end of the runs
        self._table.value = self._html_table(run_panel_html.state, class_="na-table na-clipped")
        self.plot.update(now)
        if running and self._shown:
            self._shown.update(now)
        else:
            self._shown.leave()
            ticker.suspend(self.binding)
            for index, run in enumerate(self.runs):  # in place: another thread may be adding a run
                if run.ended is not None and not run.held:
                    self.runs[index] = run.without_results()
            if self._shown and self._is_running():  # a run was launched meanwhile
                ticker.add(self.binding)

    def _is_running(self) -> bool:
        return any(run.ended is None for run in self.runs)

    def _add_run(self, run: Run) -> None:
        """Add a new run; called on the thread of its launch."""
        self.runs = [*self.runs, run]
        self.plot.draw(self._sources())
        self.binding.watch(run.store)
        run.add_ending_callback(self.binding.touch)
        self.binding.touch()
        if self._shown and not self.binding.closed:
            ticker.add(self.binding)

    def _render_soon(self, *_: Any) -> None:
        """Render at the next tick; if no run lasts and nothing ticks, at once."""
        self.binding.touch()
        if not self._is_running():
            self.binding.tick()

    def _failed(self, error: Exception) -> None:
        self._problem.value = problem(f"This table stopped updating ({type(error).__name__}: {error}).")

    # ---- contents

    @property
    def rows(self) -> list[list[str]]:
        """The table: a head, then a row per run, the latest first. Settings that all runs share are left out."""
        settings, metrics = self._differences(), _metric_names(self.runs)[:MAX_COLUMNS]
        head = ["run", "function", "state", "started", "took", "ranks", *settings, *metrics]
        return [head, *(self._row(run, settings, metrics) for run in reversed(self.runs))]

    def _row(self, run: Run, settings: Sequence[str], metrics: Sequence[str]) -> list[str]:
        started = datetime.fromtimestamp(run.started).strftime("%H:%M:%S")
        ranks = str(run.plan.world_size if run.plan is not None else run.config.num_processes or "")
        cells = [str(run.id), run.function_name, run.status, started, duration(run.elapsed), ranks]
        values = [getattr(run.config, name) for name in settings]
        cells += [hide_credentials(value) if isinstance(value, str) else format_setting(value) for value in values]
        return [*cells, *(_last_value(run, name) for name in metrics)]

    def _differences(self) -> list[str]:
        """Return the settings that are not the same in all runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.config.non_default())
        settings = [name for name in names if name not in _HIDDEN_SETTINGS]
        return [name for name in settings if len({repr(getattr(run.config, name)) for run in self.runs}) > 1]

    def _html_table(self, state: Callable[[str], str], **attributes: str) -> Markup:
        head, *rows = self.rows
        if not rows:
            return element("p", "No run has been launched from this kernel yet.", class_="na-empty")
        # Narrow columns cut their texts off: the title shows the whole text.
        titles, *cells = ([element("span", cell, title=cell) for cell in row] for row in (head, *rows))
        for row, texts in zip(cells, rows, strict=True):
            row[2] = element("span", state(texts[2]), title=texts[2])
        note = "Runs of this kernel; metrics are the last values of the lowest rank"
        caption = element("caption", note, **LEFT)
        table = html_table(titles, cells, caption=caption, columns=[LEFT] * len(head), **attributes)
        return element("div", table, class_="na-scroll")

    @property
    def html(self) -> str:
        """Table and curves as static HTML."""
        return self._html_table(str) + _overlays(self.runs[-MAX_OVERLAID:])

    @property
    def text(self) -> str:
        """The table as plain text."""
        return text_table(self.rows)

    def _ipython_display_(self) -> None:
        """Show the live table; its static form replaces it when the kernel ends."""
        output = here()
        if output is None:
            raise NotImplementedError  # IPython then calls _repr_mimebundle_
        if self.binding.closed:
            output.show(self._static())
            return
        running = self._is_running()  # read first: if a run ends meanwhile, a later tick shows its end
        self.binding.touch()
        self.binding.tick()
        self._shown.add(output, self.widget)
        if running:
            ticker.add(self.binding)

    def _static(self) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return widget_bundle(self.widget, self._static())

    def __repr__(self) -> str:
        return f"<RunsTable: {len(self.runs)} runs>"


def _picked(chosen: Sequence[Run | int] | None) -> list[Run]:
    known = {run.id: run for run in runs()}
    if chosen is None:
        return list(known.values())
    missing = [one for one in chosen if not isinstance(one, Run) and one not in known]
    if missing:
        ids = ", ".join(map(str, known)) or "none yet"
        raise ValueError(
            f"there is no run {missing[0]!r} in this kernel; the ids are: {ids}; pass some: RunsTable([1, 2])"
        )
    return [one if isinstance(one, Run) else known[one] for one in chosen]


def _metric_names(chosen: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in chosen for name in run.store.metric_names()))


def _last_value(run: Run, name: str) -> str:
    ranks = run.store.ranks_of(name)
    value = run.store.last_value(name, ranks[0]) if ranks else None
    return "–" if value is None else number(value)


def _overlays(chosen: Sequence[Run]) -> Markup:
    """Return an image per metric with a curve of each run."""
    images = []
    for name in _metric_names(chosen)[:MAX_IMAGES]:
        tracks, descriptions = [], []
        for run in chosen:
            if name in run.store.metric_names():
                first = svg_curves.tracks_of(run.store, name)[0]
                tracks.append(svg_curves.Track(f"run {run.id}", first.x, first.y))
                descriptions.append(f"run {run.id}: {svg_curves.description(run.store.series(name))}")
        images.append(svg_curves.image(name, tracks, "; ".join(descriptions)))
    return element("div", join(images, " ")) if images else Markup()
