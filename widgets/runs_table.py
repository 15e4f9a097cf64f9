"""The runs of a kernel side by side: what was different, what came out, and their curves over each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import Any

import ipywidgets

from notebook_accelerate.config.plain_values import format_setting
from notebook_accelerate.launch import Run, run_registry, runs
from notebook_accelerate.launch.output.cell_outputs import here
from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.widgets import run_panel_html
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.plot import Plot, Source
from notebook_accelerate.widgets.render_schedule import RenderSchedule, live_bundle, ticker
from notebook_accelerate.widgets.run_summary import duration
from notebook_accelerate.widgets.styles import style_sheet

MAX_COLUMNS = 8
"""Metrics that have a column."""
_LEFT = ' style="text-align:left"'
"""Front ends put the cells of tables to the right."""
_NOT_TRAINING = ("env", "num_processes", "block", "panel", "use_port")
MAX_OVERLAID = 8
"""Runs whose curves are drawn: as many as there are colours."""


class RunsTable:
    """The runs of this kernel, with their differences and latest metrics, and their curves in one plot.

    While a run goes on, a table that is shown follows it, at most five times a second; otherwise it rests.

    Args:
        chosen: The runs to show, or their ids; None: all that this kernel remembers, and those launched later. The plot
            overlays the latest eight of them, each of which its button hides or shows.
        clock: Seconds since the epoch; a fake one in tests.

    Raises:
        ValueError: An id that no run has.
    """

    def __init__(self, chosen: Sequence[Run | int] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.runs = _picked(chosen)
        self.plot = Plot(self._sources(), "None of these runs has logged a metric.")
        self._table, self._problem = ipywidgets.HTML(), ipywidgets.HTML()
        sheet = ipywidgets.HTML(style_sheet())
        sheet.layout.display = "none"
        self.widget = ipywidgets.VBox([sheet, self._problem, self._table, self.plot])
        for name in ("na-run", "na-card"):
            self.widget.add_class(name)
        self._shown = PanelOutput(self._static, lambda: "Runs of this kernel", clock)
        self.binding = RenderSchedule([run.store for run in self.runs], self._render, self._broke, clock)
        self.binding.tick()
        self.plot.on_msg(self._asked)
        self.plot.observe(self._asked, "wanted")
        for run in self.runs:
            run._before_done(self.binding.touch)
        if chosen is None:
            run_registry.watch(self._launched)

    def refresh(self) -> None:
        """Read the runs again now; a table that is shown does so by itself while a run goes on."""
        self._render(self._clock())

    def close(self) -> None:
        """Stop updating; every place where the table is displayed keeps its static form."""
        ticker.remove(self.binding)
        self._shown.end()

    # ---- while runs go on

    def _sources(self) -> list[Source]:
        return [Source(run.store, run.started, f"run {run.id}", ranks=False) for run in self.runs[-MAX_OVERLAID:]]

    def _render(self, now: float) -> None:
        goes_on = self._goes_on()  # asked first: what is drawn last has seen the end
        self._table.value = self._html_table(run_panel_html.state, 'class="na-table na-clipped"')
        self.plot.update(now)
        if goes_on and self._shown:
            self._shown.update(now)
        else:
            self._shown.leave()
            ticker.rest(self.binding)
            if self._shown and self._goes_on():  # one was launched just now
                ticker.add(self.binding)

    def _goes_on(self) -> bool:
        return any(run.ended is None for run in self.runs)

    def _launched(self, run: Run) -> None:
        """Take a new run in; on the launch's thread."""
        self.runs = [*self.runs, run]
        self.plot.draw(self._sources())
        self.binding.watch(run.store)
        run._before_done(self.binding.touch)
        self.binding.touch()
        if self._shown and not self.binding.closed:
            ticker.add(self.binding)

    def _asked(self, *_: Any) -> None:
        self.binding.touch()
        if not self._goes_on():  # nobody else renders any more
            self.binding.tick()

    def _broke(self, error: Exception) -> None:
        text = f"This table stopped updating ({type(error).__name__}: {error})."
        self._problem.value = f'<p class="na-problem" role="alert">{escape(text)}</p>'

    # ---- contents

    @property
    def rows(self) -> list[list[str]]:
        """The table: a head, then a row per run, the latest first; settings that all share are left out."""
        settings, metrics = self._differences(), self._metric_names()
        head = ["run", "function", "state", "started", "took", "ranks", *settings, *metrics]
        return [head, *(self._row(run, settings, metrics) for run in reversed(self.runs))]

    def _row(self, run: Run, settings: Sequence[str], metrics: Sequence[str]) -> list[str]:
        started = datetime.fromtimestamp(run.started).strftime("%H:%M:%S")
        ranks = str(run.plan.world_size if run.plan is not None else run.config.num_processes or "")
        cells = [str(run.id), run.function_name, run.status, started, duration(run.elapsed), ranks]
        values = [getattr(run.config, name) for name in settings]
        cells += [value if isinstance(value, str) else format_setting(value) for value in values]
        return [*cells, *(_final(run, name) for name in metrics)]

    def _differences(self) -> list[str]:
        """Return the settings that are not the same in all runs; those of the ranks' environment are not shown."""
        names = [name for name in _fields(self.runs) if name not in _NOT_TRAINING]
        return [name for name in names if len({repr(getattr(run.config, name)) for run in self.runs}) > 1]

    def _metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.store.metric_names()))[:MAX_COLUMNS]

    def _html_table(self, state: Callable[[str], str], attributes: str) -> str:
        head, *rows = self.rows
        columns = "".join(f'<th scope="col"{_LEFT} title="{escape(cell)}">{escape(cell)}</th>' for cell in head)
        body = "".join(_html_row(row, state) for row in rows)
        if not rows:
            return '<p class="na-empty">No run has been launched from this kernel yet.</p>'
        return (
            f'<div class="na-scroll"><table {attributes}><caption{_LEFT}>Runs of this kernel; metrics are the last '
            f"values of the lowest rank</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    @property
    def html(self) -> str:
        """Table and curves as static HTML."""
        return self._html_table(escape, "") + _overlay(self.runs[-MAX_OVERLAID:])

    @property
    def text(self) -> str:
        """The table as plain text."""
        rows = self.rows
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def _ipython_display_(self) -> None:
        """Show the live table; when the kernel ends, its static form takes the place."""
        place = here()
        if place is None:
            raise NotImplementedError  # IPython then asks for the MIME bundle
        if self.binding.closed:
            place.show(self._static())
            return
        goes_on = self._goes_on()  # asked first: the end of a run that ends meanwhile is drawn later
        self.binding.touch()
        self.binding.tick()
        self._shown.add(place, self.widget)
        if goes_on:
            ticker.add(self.binding)

    def _static(self) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**live_bundle(self.widget, self.text), "text/html": self.html}

    def __repr__(self) -> str:
        return f"<RunsTable: {len(self.runs)} runs>"


def _picked(chosen: Sequence[Run | int] | None) -> list[Run]:
    known = {run.id: run for run in runs()}
    if chosen is None:
        return list(known.values())
    missing = [one for one in chosen if not isinstance(one, Run) and one not in known]
    if missing:
        raise ValueError(f"no run {missing[0]!r} in this kernel; there are {', '.join(map(str, known)) or 'none yet'}")
    return [one if isinstance(one, Run) else known[one] for one in chosen]


def _fields(chosen: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in chosen for name in run.config.non_default())
    return [name for name in names if name != "rdzv_conf"]  # it may hold a secret


def _final(run: Run, name: str) -> str:
    ranks = run.store.ranks_of(name)
    value = run.store.last_value(name, ranks[0]) if ranks else None
    return "–" if value is None else svg_curves.number(value)


def _html_row(row: list[str], state: Callable[[str], str]) -> str:
    cells = "".join(
        f'<td{_LEFT} title="{escape(cell)}">{state(cell) if column == 1 else escape(cell)}</td>'
        for column, cell in enumerate(row[1:])
    )
    return f'<tr><th scope="row"{_LEFT}>{escape(row[0])}</th>{cells}</tr>'


def _overlay(chosen: Sequence[Run]) -> str:
    names = list(dict.fromkeys(name for run in chosen for name in run.store.metric_names()))
    pictures = []
    for name in names[:24]:
        tracks, words = [], []
        for run in chosen:
            if name in run.store.metric_names():
                first = svg_curves.tracks_of(run.store, name)[0]
                tracks.append(svg_curves.Track(f"run {run.id}", first.x, first.y))
                words.append(f"run {run.id}: {svg_curves.description(run.store.series(name))}")
        pictures.append(svg_curves.image(name, tracks, "; ".join(words)))
    return f"<div>{' '.join(pictures)}</div>" if pictures else ""


__all__ = ["RunsTable"]
