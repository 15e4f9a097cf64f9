"""The live view of a profile: its sentences, the timeline of its ranks, and its tables."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anywidget
import ipywidgets
import numpy as np
import traitlets

from notebook_accelerate.launch.output.replaceable_outputs import current_output
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import Action, Drawing, Section
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.timeline_picture import LOOKS
from notebook_accelerate.launch.run_debugging import DEFAULT_STEPS
from notebook_accelerate.profiling.timeline import Timeline
from notebook_accelerate.widgets.actions import ActionRow, ActionRows
from notebook_accelerate.widgets.front_end import front_end, no_widgets
from notebook_accelerate.widgets.live_panel import NewestPanels, Panel, close_all, close_hidden
from notebook_accelerate.widgets.panel_elements import PANEL_STYLES, card, script, style_widget, with_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.report.profile import Profile
    from notebook_accelerate.launch.report.samples import RunMemory
    from notebook_accelerate.profiling.timeline import Track


class ProfilePanel(Panel):
    """A profile that is shown live. The saved notebook contains its static form.

    Args:
        profile: The profile to show, which the panel does not keep.
    """

    def __init__(self, profile: Profile) -> None:
        self._document = profile.document()
        self.view = TimelineView(profile.timeline)
        self._parts = self.parts(profile, self.view)
        super().__init__()

    def _build(self) -> Any:
        return card(*self._parts)

    def _title(self) -> str:
        return "Profile"

    def document(self) -> Section:
        """Return the static form of the profile."""
        return self._document

    def _release(self) -> None:
        self._shown.end()
        close_all(self.widget)  # Other panels do this later, but this widget holds up to 36 MB of events.

    @staticmethod
    def parts(profile: Profile, view: TimelineView) -> list[Any]:
        """Return the widgets of a profile, in order from the top.

        Args:
            profile: The profile to show.
            view: The view of its timeline.
        """
        style = style_widget("profile.css", guide="profile")
        documents = (profile.summary(), profile.tables())
        head, tables = (ipywidgets.HTML(rendering.html(each, inline=False)) for each in documents)
        return [style, with_classes(head, "na-findings"), view, with_classes(tables, "na-profile-tables")]


def show(profile: Profile) -> bool:
    """Show a profile live in the running cell, or return False if there are no live widgets.

    Args:
        profile: The profile to show.
    """
    output = current_output()
    if output is None or no_widgets(output):
        return False
    panel = ProfilePanel(profile)
    panel.show(output)
    _live.add(panel)
    _live.close_older()
    return True


_live = NewestPanels(4)
"""The kernel's live views. Each holds up to 36 MB of events, here and in the browser, so the oldest become static."""


# ---- the sections of a run's panel that record profiles and memory

PROFILE = Action(
    id="profile", label="Profile", hint=f"Record the next {DEFAULT_STEPS} steps of all ranks with torch's profiler"
)
MEMORY = Action(id="memory", label="Memory", hint="Find out what the memory of all ranks holds during the next step")
CLOSE = Action(id="close", label="Close", hint="Close this section")
Recording = TypeVar("Recording", "Profile", "RunMemory")


class RecordingSection(ABC, Generic[Recording]):
    """Records something about a run on its own thread, and shows it.

    Args:
        run: The run to record.
        changed: Called on any thread when the section has changed.

    Attributes:
        widget: Empty while there is nothing to show.
        found: The recording that is shown, or None.
        recording: Whether a recording is in progress.
    """

    noun = ""
    """The first word of the title."""
    progress = ""
    """The text while a recording is in progress."""
    done = ""
    """The word for a recorded rank, such as "profiled"."""

    def __init__(self, run: Run, changed: Callable[[], None]) -> None:
        self.run, self._changed = run, changed
        self.found: Recording | None = None
        self.recording = False
        self._status: Any = None  # Created at the first click, because most panels never show a recording.
        self.widget: Any = with_classes(ipywidgets.VBox(), "na-recording", f"na-{self.noun.lower()}")
        self._parts: list[Any] = []
        self._static = Markup()

    # ---- implemented by each section

    @abstractmethod
    def _request(self) -> Recording:
        """Return a new recording of the run."""

    @abstractmethod
    def _is_empty(self, found: Recording) -> bool:
        """Return whether no rank was recorded."""

    @abstractmethod
    def _widgets(self, found: Recording) -> list[Any]:
        """Return the widgets that show a recording."""

    def _title(self, found: Recording) -> str:
        return self.noun

    # ---- recording

    def start(self) -> None:
        """Start a recording, which is shown when it is complete."""
        if self.recording:
            return
        self.recording = True
        self._say(self.progress, "busy")
        name = f"notebook-accelerate-panel-{self.noun.lower()}-{self.run.id}"
        threading.Thread(target=self._record, name=name, daemon=True).start()

    def _record(self) -> None:
        try:
            self._show(self._request())
        except Exception as error:  # noqa: BLE001 - an error is the reply to the request
            self._say(f"The ranks could not be {self.done}: {error or type(error).__name__}", "warn", CLOSE)
        finally:
            self.recording = False
            self._changed()

    def _say(self, text: str, tone: str = "", *actions: Action) -> None:
        if self._status is None:
            self._status = with_classes(ActionRows(self._act, self.noun), "na-attention")
        self._status.show([ActionRow(key=self.noun, text=text, actions=actions, tone=tone)])
        self.widget.children = [self._status, *self._parts]

    def _show(self, found: Recording) -> None:
        if self._is_empty(found):
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in found.missing.items())
            self._say(f"No rank was {self.done}: {reasons}", "warn", CLOSE)
            return
        replaced, self._parts = self._parts, self._widgets(found)
        self.found, self._static = found, Markup(found.html)
        self._say(self._title(found), "", CLOSE)
        for part in replaced:
            close_all(part)

    def _act(self, action: str) -> None:
        if action == CLOSE.id and not self.recording:
            parts, self._parts, self.found = self._parts, [], None
            self.widget.children = ()
            for part in parts:
                close_all(part)

    def document(self) -> Drawing:
        """Return the recording for the saved notebook."""
        if self.found is None:
            return Drawing()
        return Drawing(html=join([element("p", self._title(self.found)), self._static]))

    def close(self) -> None:
        """Delete the hidden widgets, which are not part of the panel's tree of widgets."""
        close_hidden(self.widget, self._status, *self._parts)


class ProfileSection(RecordingSection["Profile"]):
    """Records the next steps with torch's profiler, and shows the profile."""

    noun, progress, done = "Profile", f"Profiling {DEFAULT_STEPS} steps", "profiled"

    def _request(self) -> Profile:
        return self.run.profile()

    def _is_empty(self, found: Profile) -> bool:
        return not found.paths

    def _widgets(self, found: Profile) -> list[Any]:
        return ProfilePanel.parts(found, TimelineView(found.timeline))

    def _title(self, found: Profile) -> str:
        return "Profile of 1 step" if found.steps == 1 else f"Profile of {found.steps} steps"


class MemorySection(RecordingSection["RunMemory"]):
    """Finds out what the memory of the ranks holds during the next step, and shows it."""

    noun, progress, done = "Memory", "Inspecting memory during the next step", "inspected"

    def _request(self) -> RunMemory:
        return self.run.memory()

    def _is_empty(self, found: RunMemory) -> bool:
        return not found.reports

    def _widgets(self, found: RunMemory) -> list[Any]:
        tables = ipywidgets.HTML(rendering.html(found.document(), inline=False))
        return [style_widget("profile.css", guide="memory"), with_classes(tables, "na-profile-tables")]


# ---- the timeline: one canvas over all ranks

SCRIPTS = ("feed.js", "looks.js", "timeline_data.js", "timeline_canvas.js", "timeline.js")
MAX_EVENTS = 3_000_000
"""The maximum number of events that are sent (36 MB). If there are more, the shortest are left out."""
MAX_NAME = 300
"""The maximum number of characters of a name or a detail that are sent."""
TICKS = 2**32 - 1
"""The number of ticks into which the span is divided for the starts of events. For 10 s, a tick is 2.3 ns."""


class TimelineView(anywidget.AnyWidget):
    """A timeline with zoom, search, and arrows for the waits of ranks.

    The view holds all its data, so that it works while the kernel is busy.

    Args:
        timeline: The timeline to show.
    """

    _esm = script(*SCRIPTS)
    _css = script(*PANEL_STYLES, "timeline.css")
    data: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(data=encode(timeline))
        self.on_msg(self._on_message)

    def _on_message(self, _: object, content: object, __: object) -> None:
        if isinstance(content, dict) and content.get("kind") == "drawn":
            front_end.drawn = True


def encode(timeline: Timeline, limit: int = MAX_EVENTS) -> dict[str, Any]:
    """Return the data of a timeline that a view needs: strings, and columns of events as bytes in little-endian order.

    Events are sorted by track, then by depth, then by start. ``tracks`` has the number of events of each depth.
    ``start`` is uint32 in units of ``tick`` microseconds, ``duration`` float32 in microseconds, ``name`` uint16 (or
    uint32 if there are more than 65,536 names), ``category`` uint8. ``looks`` has the title and the colours, in a light
    and in a dark theme, of each category. ``waits`` has two int32 for each wait: the event that waits, and the one
    that it waits for. ``steps`` has four float64 for each step: rank, start, end, number.

    Args:
        timeline: The timeline to encode.
        limit: The maximum number of events. If there are more, those shorter than ``shortest`` are left out, except
            collectives.
    """
    shortest = _shortest(timeline.tracks, limit)
    collective = timeline.categories.index("collective") if "collective" in timeline.categories else -1
    orders = [_order(track, shortest, collective) for track in timeline.tracks]
    span = max(timeline.span, 1e-6)
    tick = span / TICKS
    columns = {
        "start": _column(timeline, orders, "start", "<u4", tick),
        "duration": _column(timeline, orders, "duration", "<f4"),
        "name": _column(timeline, orders, "names", "<u2" if len(timeline.names) <= 1 << 16 else "<u4"),
        "category": _column(timeline, orders, "category", "u1"),
    }
    return {
        "tracks": [_head(track, order) for track, order in zip(timeline.tracks, orders, strict=True)],
        "names": [name[:MAX_NAME] for name in timeline.names],
        "details": [[index, text[:MAX_NAME]] for index, text in timeline.details.items()],
        "categories": list(timeline.categories),
        "looks": [[look.title, look.light, look.dark] for look in map(LOOKS.__getitem__, timeline.categories)],
        "span": span,
        "tick": tick,
        "events": sum(map(len, timeline.tracks)),
        "shortest": shortest,
        "waits": _waits(timeline, orders).astype("<i4").tobytes(),
        "steps": np.array([tuple(step) for step in timeline.steps], "<f8").reshape(-1, 4).tobytes(),
        **columns,
    }


def _shortest(tracks: Sequence[Track], limit: int) -> float:
    """Return the duration in microseconds below which events are left out, or 0.0 to leave out none."""
    total = sum(map(len, tracks))
    if total <= limit:
        return 0.0
    durations = np.concatenate([np.asarray(track.duration) for track in tracks])
    return float(np.nextafter(np.partition(durations, total - limit)[total - limit], np.float32(np.inf)))


def _order(track: Track, shortest: float, collective: int) -> np.ndarray:
    """Return the indices of the events of a track that are sent, sorted by depth and start."""
    order = np.argsort(np.asarray(track.depth), kind="stable")
    if not shortest:
        return order
    kept = (np.asarray(track.duration) >= shortest) | (np.asarray(track.category) == collective)
    chosen: np.ndarray = order[kept[order]]
    return chosen


def _head(track: Track, order: np.ndarray) -> dict[str, Any]:
    depths = np.bincount(np.asarray(track.depth)[order]).tolist() if len(order) else []
    return {"rank": track.rank, "name": track.name[:MAX_NAME], "lanes": depths}


def _column(timeline: Timeline, orders: Sequence[np.ndarray], name: str, kind: str, unit: float = 1.0) -> bytes:
    parts = []
    for track, order in zip(timeline.tracks, orders, strict=True):
        values = np.asarray(getattr(track, name))[order]
        parts.append((values if unit == 1.0 else np.clip(values / unit, 0, TICKS).round()).astype(kind))
    return np.concatenate(parts).tobytes() if parts else b""


def _waits(timeline: Timeline, orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return the indices of each wait's two events in the columns, as an array of shape (n, 2)."""
    places, first = [], 0
    for track, order in zip(timeline.tracks, orders, strict=True):
        place = np.full(len(track), -1)
        place[order] = np.arange(first, first + len(order))
        places.append(place)
        first += len(order)
    pairs = [
        (places[wait.from_track][wait.from_event], places[wait.to_track][wait.to_event]) for wait in timeline.waits
    ]
    found = np.array(pairs, int).reshape(-1, 2)
    kept: np.ndarray = found[(found >= 0).all(axis=1)]
    return kept
