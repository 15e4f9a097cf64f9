"""The part of a run's panel that opens with Profile: steps that are being recorded, then what they show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.run_debugging import DEFAULT_STEPS
from notebook_accelerate.widgets.action_rows import ActionRows
from notebook_accelerate.widgets.actions import Action, ActionRow
from notebook_accelerate.widgets.live_panel import close_all
from notebook_accelerate.widgets.panel_elements import with_classes

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.profile import Profile

PROFILE = Action(
    id="profile", label="Profile", hint=f"Record the next {DEFAULT_STEPS} steps of all ranks with torch's profiler"
)
CLOSE = Action(id="close", label="Close", hint="Close this profile")


class ProfileSection:
    """Records steps of a run on a thread of its own, and shows the profile.

    Args:
        run: The run.
        changed: Called on any thread when the section has changed.

    Attributes:
        widget: Empty while there is nothing to show.
        profile: What is shown; None until there is one.
        recording: Whether steps are being recorded.
    """

    def __init__(self, run: Run, changed: Callable[[], None]) -> None:
        self.run, self._changed = run, changed
        self.profile: Profile | None = None
        self.recording = False
        self._status: Any = None  # created at the first click: most panels are never asked for a profile
        self.widget: Any = with_classes(ipywidgets.VBox(), "na-profile")
        self._parts: list[Any] = []
        self._static = Markup()

    def start(self) -> None:
        """Record the next steps, and show them when they are there; returns at once."""
        if self.recording:
            return
        self.recording = True
        self._say(f"profiling {DEFAULT_STEPS} steps ...")
        name = f"notebook-accelerate-panel-profile-{self.run.id}"
        threading.Thread(target=self._record, name=name, daemon=True).start()

    def _record(self) -> None:
        try:
            self._show(self.run.profile())
        except Exception as error:  # noqa: BLE001 - an error is the reply to the request
            self._say(f"The ranks could not be profiled: {error or type(error).__name__}", "warn", CLOSE)
        finally:
            self.recording = False
            self._changed()

    def _say(self, text: str, tone: str = "", *actions: Action) -> None:
        if self._status is None:
            self._status = with_classes(ActionRows(self._act, "Profile"), "na-attention")
        self._status.show([ActionRow(key="profile", text=text, actions=actions, tone=tone)])
        self.widget.children = [self._status, *self._parts]

    def _show(self, profile: Profile) -> None:
        from notebook_accelerate.widgets.profile_panel import ProfilePanel  # 60 kB of scripts, for those who profile
        from notebook_accelerate.widgets.timeline_view import TimelineView

        if not profile.paths:
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in profile.missing.items())
            self._say(f"No rank was profiled: {reasons}", "warn", CLOSE)
            return
        replaced, self._parts = self._parts, ProfilePanel.parts(profile, TimelineView(profile.timeline))
        self.profile, self._static = profile, Markup(profile.html)
        self._say(_title(profile), "", CLOSE)
        for part in replaced:
            close_all(part)

    def _act(self, action: str) -> None:
        if action == CLOSE.id and not self.recording:
            parts, self._parts, self.profile = self._parts, [], None
            self.widget.children = ()
            for part in parts:
                close_all(part)

    def static_html(self) -> Markup:
        """Return the profile for the saved notebook; "" without one."""
        if self.profile is None:
            return Markup()
        return join([element("p", _title(self.profile)), self._static])

    def close(self) -> None:
        """Delete what is not shown, which is no part of the panel's tree of widgets."""
        for part in (self._status, *self._parts):
            if part is not None and part not in self.widget.children:
                close_all(part)


def _title(profile: Profile) -> str:
    return "Profile of 1 step" if profile.steps == 1 else f"Profile of {profile.steps} steps"


__all__ = ["PROFILE", "ProfileSection"]
