"""The live view of a profile: its sentences, the timeline of its ranks, and its tables."""

from __future__ import annotations

from typing import Any, Protocol

import ipywidgets

from notebook_accelerate.launch.output.replaceable_outputs import Output, here
from notebook_accelerate.launch.report.markup import Markup
from notebook_accelerate.profiling.timeline import Timeline
from notebook_accelerate.widgets.front_end import no_widgets
from notebook_accelerate.widgets.live_panel import close_all
from notebook_accelerate.widgets.panel_elements import card, style_widget, with_classes
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.timeline_view import TimelineView

MAX_LIVE = 4
"""Live views of a kernel: each holds its events, up to 36 MB, here and in the browser. The oldest become static."""


class ShownProfile(Protocol):
    """What the view needs of `launch.report.profile.Profile`."""

    @property
    def timeline(self) -> Timeline:
        """The events of all ranks."""

    def summary_html(self) -> Markup:
        """Return what was profiled, and the sentences."""

    def tables_html(self) -> Markup:
        """Return the tables."""

    @property
    def html(self) -> str:
        """The static form."""


class ProfilePanel:
    """A profile that is shown live; the saved notebook holds its static form.

    Args:
        profile: The profile, which is not kept.
    """

    def __init__(self, profile: ShownProfile) -> None:
        self.view = TimelineView(profile.timeline)
        self.widget = card(*self.parts(profile, self.view))
        static = {"text/plain": repr(profile), "text/html": profile.html}
        self._shown = PanelOutput(lambda: static, lambda: "Profile")

    @staticmethod
    def parts(profile: ShownProfile, view: TimelineView) -> list[Any]:
        """Return the widgets of a profile, from the top.

        Args:
            profile: The profile.
            view: Its timeline.
        """
        style = style_widget("profile.css")
        head, tables = (ipywidgets.HTML(text) for text in (profile.summary_html(), profile.tables_html()))
        return [style, with_classes(head, "na-findings"), view, with_classes(tables, "na-profile-tables")]

    def show(self, output: Output) -> None:
        """Show the panel in a cell's output."""
        self._shown.add(output, self.widget)

    @property
    def shown(self) -> bool:
        """Whether the output of a cell shows the panel; that of a cell that was executed again does not."""
        return bool(self._shown)

    def close(self) -> None:
        """Delete the view; the cell that shows it keeps its static form."""
        self._shown.end()
        close_all(self.widget)


def show(profile: ShownProfile) -> bool:
    """Show a profile live in the running cell; return False where there are no live widgets.

    Args:
        profile: The profile.
    """
    output = here()
    if output is None or no_widgets(output):
        return False
    panel = ProfilePanel(profile)
    panel.show(output)
    live = [each for each in _live if each.shown]
    for each in [each for each in _live if not each.shown] + live[: -MAX_LIVE + 1]:
        each.close()
    _live[:] = [*live[-MAX_LIVE + 1 :], panel]
    return True


_live: list[ProfilePanel] = []


__all__ = ["ProfilePanel", "show"]
