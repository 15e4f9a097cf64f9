"""Names and sources of the cells of other notebooks, for tracebacks and stacks."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import replace

from notebook_accelerate.launch.state.run_events import FailuresRecorded, RankFailed
from notebook_accelerate.telemetry import Event, ExceptionInfo, FailureEvent, FrameInfo, InputRequest, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, StacksReply
from notebook_accelerate.telemetry.tracebacks import cell_name, cell_sources, install_sources


def own_cells() -> dict[str, list[str]]:
    """Return this notebook's cells, as ``CellsEvent`` has them."""
    return {filename: [cell_name(filename), source] for filename, source in cell_sources().items()}


class ForeignCells:
    """Adds the names and source lines of another notebook's cells to the events of its ranks.

    Args:
        suffix: Returns the suffix of the names of cells, as " of node 1".
    """

    def __init__(self, suffix: Callable[[], str]) -> None:
        self._suffix = suffix
        self._names: dict[str, str] = {}

    def add(self, cells: Mapping[str, list[str]]) -> None:
        """Add cells in the format of ``CellsEvent``, and register their source lines under their names."""
        for filename, (name, source) in cells.items():
            linecache.cache.pop(self._names.get(filename, ""), None)
            self._names[filename] = cell = f"{name}{self._suffix()}"
            install_sources({cell: source})

    def clear(self) -> None:
        """Remove all registered cells from this process."""
        for name in self._names.values():
            linecache.cache.pop(name, None)
        self._names.clear()

    def with_named_cells(self, event: Event) -> Event:
        """Return a rank's event with its cells named as in this notebook."""
        if isinstance(event, StacksReply):
            event.threads = {name: self._in_frames(frames) for name, frames in event.threads.items()}
        elif isinstance(event, (FailureEvent, CellReply)):
            event.chain = self._in_chain(event.chain)
        elif isinstance(event, InputRequest):
            event.shown = self.in_text(event.shown)
        return event

    def in_text(self, text: str) -> str:
        """Return ``text`` with the file names of cells replaced by the cells' names."""
        for filename, name in list(self._names.items()):  # another thread adds to them
            if filename in text:
                text = text.replace(filename, name)
        return text

    def _in_frames(self, frames: tuple[FrameInfo, ...]) -> tuple[FrameInfo, ...]:
        return tuple(self._in_frame(frame) if frame.filename in self._names else frame for frame in frames)

    def _in_frame(self, frame: FrameInfo) -> FrameInfo:
        name = self._names[frame.filename]
        return frame._replace(filename=name, source=frame.source or linecache.getline(name, frame.lineno).strip())

    def _in_chain(self, chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
        return tuple(
            info._replace(message=self.in_text(info.message), frames=self._in_frames(info.frames)) for info in chain
        )


def with_named_cells(event: Event, suffix: str) -> Event:
    """Return an event of the journal with this notebook's cells named, for another notebook."""
    return _with_chains(event, lambda chain: tracebacks.with_named_cells(chain, suffix))


def named_here(event: Event, suffix: str) -> Event:
    """Return another notebook's event of the journal; cells with ``suffix`` are this notebook's, and lose it."""

    def own(chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
        return tuple(info._replace(frames=tuple(map(here, info.frames))) for info in chain)

    def here(frame: FrameInfo) -> FrameInfo:
        return frame._replace(filename=frame.filename.removesuffix(suffix))

    return _with_chains(event, own)


def _with_chains(event: Event, change: Callable[[tuple[ExceptionInfo, ...]], tuple[ExceptionInfo, ...]]) -> Event:
    if isinstance(event, RankFailed):
        return replace(event, failure=replace(event.failure, chain=change(event.failure.chain)))
    if isinstance(event, FailuresRecorded):
        return replace(event, failures=[replace(failure, chain=change(failure.chain)) for failure in event.failures])
    return event
