"""``Profile``, which shows training steps that torch's profiler has recorded on the ranks."""

from __future__ import annotations

import gzip
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from pathlib import Path

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.files.temporary_folders import make_private_folder_for
from notebook_accelerate.launch.report.document import Drawing, Section, Table, Text, table_of
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.launch.report.timeline_picture import timeline_svg
from notebook_accelerate.profiling.analysis import Analysis, Finding
from notebook_accelerate.profiling.tables import LineSeconds, OpTime, PeakMemory, peak_of
from notebook_accelerate.profiling.timeline import ChromeEvents, Timeline
from notebook_accelerate.profiling.trace import RankTrace, read_trace
from notebook_accelerate.telemetry.debug_protocol import ProfileReply, ProfileRequest
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import frame_location

MAX_ROWS = 15
NOTHING = "No bottleneck found."
_VIEW = "notebook_accelerate.widgets.profile_panel"
"""The name of the module with the live view, which belongs to a higher layer and is imported only to show a profile."""


class ProfileFolder:
    """A private folder for the traces of this machine's ranks. It is removed when this object is deleted."""

    def __init__(self) -> None:
        self.path = make_private_folder_for(self)
        self._token = secrets.token_hex(16)
        (self.path / self._token).touch()

    def request(
        self, steps: int, seconds: float, *, memory: bool, samples: float = 0.0
    ) -> Callable[[int], ProfileRequest]:
        """Return a function that creates a request with a given number."""
        return lambda number: ProfileRequest(number, steps, seconds, memory, str(self.path), self._token, samples)

    def traces(self, replies: Mapping[int, ProfileReply | str]) -> Traces:
        """Return the traces from the replies of ranks. Traces from other machines are first written to the folder."""
        found = Traces()
        for rank, reply in replies.items():
            if isinstance(reply, str):
                found.missing[rank] = reply
                continue
            path = Path(reply.path)
            if reply.payload:
                path = self.path / f"rank{rank}.pt.trace.json.gz"
                path.write_bytes(reply.payload)
            elif path.parent != self.path:
                found.missing[rank] = f"its trace is not in the folder of this profile: {path}"
                continue
            found.paths[rank], found.clocks[rank] = path, reply.clock
        return found


@dataclass
class Traces:
    """The files of a profile.

    Attributes:
        paths: The file with the trace of each rank.
        clocks: The seconds to add to the times of each rank to convert them to the run's clock.
        missing: For each rank without a trace, the reason.
        read: The traces that have been read, by rank.
    """

    paths: dict[int, Path] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    read: dict[int, RankTrace] = field(default_factory=dict)


class Profile(DocumentView):
    """The recorded steps of some ranks. A cell whose last line is a profile shows findings, tables and the timeline.

    ``Run.profile`` returns a profile, and ``Profile.load`` reads files written by ``save`` or by torch's profiler.

    Args:
        folder: The folder that owns the files, or None if they belong to the user.
        traces: The files with the traces.
        where: A function that returns the location of a frame, such as "Cell In[7], line 12".

    Attributes:
        paths: The file with the trace of each rank.
        missing: For each rank without a trace, the reason.
    """

    def __init__(self, folder: ProfileFolder | None, traces: Traces, where: Callable[[FrameInfo], str]) -> None:
        self._folder = folder
        self.paths, self.missing = dict(traces.paths), dict(traces.missing)
        read: list[RankTrace] = []
        clocks = dict(traces.clocks)
        for rank, path in traces.paths.items():
            trace = traces.read[rank] if rank in traces.read else read_trace(path, rank)
            clocks.setdefault(rank, float(trace.facts.get("clock", 0.0)))
            read.append(trace)
        self._analysis = Analysis(read, clocks, where)

    @classmethod
    def of(cls, paths: Mapping[int, str | Path]) -> Profile:
        """Return a profile of existing traces, whose files still belong to the caller.

        Args:
            paths: The file that torch's profiler has written for each rank.
        """
        return cls(None, Traces({rank: Path(path) for rank, path in paths.items()}), frame_location)

    @classmethod
    def written(cls, files: Iterable[tuple[int, str]]) -> list[Profile]:
        """Return the profiles of traces that the ranks have written, one for each folder, oldest first.

        Args:
            files: The rank and the file of each trace. Missing or unreadable files are listed in ``missing``.
        """
        folders: dict[Path, Traces] = {}
        times: dict[Path, float] = {}
        for rank, name in files:
            path = Path(name)
            traces = folders.setdefault(path.parent, Traces())
            try:
                traces.read[rank] = read_trace(path, rank)
                times[path.parent] = min(path.stat().st_mtime, times.get(path.parent, inf))
                traces.paths[rank] = path
            except (OSError, ValueError) as error:
                gone = isinstance(error, FileNotFoundError)
                traces.missing[rank] = f"there is no file {path} on this machine" if gone else str(error)
        order = sorted(folders, key=lambda folder: times.get(folder, 0.0))
        return [cls(None, folders[folder], frame_location) for folder in order]

    @classmethod
    def load(cls, *paths: str | Path) -> Profile:
        """Read files written by torch's profiler, or folders of such files, including those written by ``save``.

        Args:
            paths: The files and folders to read. They still belong to the caller.

        Returns:
            The profile. If several traces have the same rank, all but one of them get new, higher ranks.

        Raises:
            FileNotFoundError: A file does not exist, there is no trace in the folders, or no path was passed.
            ValueError: A file is not a trace written by torch's profiler.
        """
        files: list[Path] = []
        for path in map(Path, paths):
            within = sorted(path.glob("*.json")) + sorted(path.glob("*.json.gz")) if path.is_dir() else [path]
            files += [each for each in within if not each.name.startswith("merged.")]
        if not files:
            where = ", ".join(map(str, paths))
            told = f"there is no trace in {where}" if paths else 'load() got no path; pass one: Profile.load("traces")'
            raise FileNotFoundError(told)
        traces = Traces()
        for file in files:
            trace = read_trace(file)
            if trace.rank in traces.paths:
                trace.rank = max(traces.paths) + 1
            traces.paths[trace.rank], traces.read[trace.rank] = file, trace
        return cls(None, traces, frame_location)

    @property
    def findings(self) -> list[Finding]:
        """The findings, most expensive first, each with its ranks, lines and seconds per step."""
        return self._analysis.findings

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a trace."""
        return list(self.paths)

    @property
    def steps(self) -> int:
        """The number of recorded steps on the rank with the fewest."""
        return min((each.steps for each in self._analysis.facts.ranks), default=0)

    @property
    def seconds(self) -> float:
        """The mean seconds per step on the slowest rank, or all recorded seconds if no step was recorded."""
        return max((each.step for each in self._analysis.facts.ranks), default=0.0)

    @property
    def timeline(self) -> Timeline:
        """The events of all ranks, on a common clock."""
        return self._analysis.timeline

    def ops(self) -> list[OpTime]:
        """Return the operations, sorted by the time spent in each operation itself, longest first."""
        return self._analysis.ops

    def lines(self) -> list[LineSeconds]:
        """Return the lines of your code, sorted by time, longest first. The times come from 250 samples a second."""
        return self._analysis.lines

    def peaks(self) -> dict[int, PeakMemory]:
        """Return each rank's allocations at the peak of the recorded steps. This needs ``run.profile(memory=True)``."""
        return {trace.rank: peak_of(trace, self._analysis.samples[trace.rank]) for trace in self._analysis.traces}

    def save(self, folder: str | Path) -> list[Path]:
        """Write a trace for each rank and one with all ranks, for Perfetto, TensorBoard, HTA and ``Profile.load``.

        Args:
            folder: The folder to write to. It is created if it does not exist. Files with the same names are replaced.

        Returns:
            The paths of the files: "rank0.pt.trace.json.gz" and so on, and at the end "all_ranks/merged.json.gz", with
            all ranks on a common clock.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for rank, path in self.paths.items():
            file = target / f"rank{rank}.pt.trace.json.gz"
            _compress(path, file)
            written.append(file)
        # This file has its own folder, because HTA treats each file in a folder as a rank.
        merged = target / "all_ranks" / "merged.json.gz"
        merged.parent.mkdir(exist_ok=True)
        with gzip.open(merged, "wt", compresslevel=3) as stream:
            json.dump({"traceEvents": list(ChromeEvents(self.timeline).rows()), "displayTimeUnit": "ms"}, stream)
        return [*written, merged]

    # ---- as a document

    def document(self) -> Section:
        """Return the findings, a picture of the timeline and the tables."""
        picture = [Drawing(html=timeline_svg(self.timeline))] if self.paths else []
        return Section(key="profile", nodes=(self.summary(), *picture, self.tables()))

    def summary(self) -> Section:
        """Return a summary of the profile, the findings, and the reasons why ranks are missing."""
        sentences = Text(lines=tuple(self._sentences()), tone="list" if self.findings else "good")
        return Section(key="summary", nodes=(Text(lines=(self._head(),)), sentences, Text(lines=tuple(self._notes()))))

    def tables(self) -> Section:
        """Return the tables of lines and operations."""
        return Section(key="tables", nodes=(self._line_table(), self._op_table()))

    def _head(self) -> str:
        if not self.paths:
            return "No rank was profiled"
        who = rank_names(self.ranks).capitalize()
        if not self.steps:
            return f"{who} profiled for {self.seconds:.2f} s, in which no step was complete"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{who} profiled for {steps} of {1000 * self.seconds:.3g} ms"

    def _notes(self) -> list[str]:
        without_lines = {rank: each.error for rank, each in self._analysis.samples.items() if each.error}
        return [
            *(f"rank {rank} was not profiled: {why}" for rank, why in self.missing.items()),
            *(f"the lines of rank {rank} are not known: {why}" for rank, why in without_lines.items()),
        ]

    def _sentences(self) -> list[str]:
        return [each.sentence for each in self.findings] or ([NOTHING] if self.steps else [])

    def _op_table(self) -> Table:
        rows = [["operation", "calls", *(f"rank {rank}" for rank in self.ranks)]]
        for row in self.ops()[:MAX_ROWS]:
            times = [f"{1000 * row.own.get(rank, 0.0):.2f} ms" for rank in self.ranks]
            rows.append([row.name[:60], f"{sum(row.calls.values()):,}", *times])
        return table_of("operations", rows)

    def _line_table(self) -> Table:
        rows = [["line", *(f"rank {rank}" for rank in self.ranks), "code"]]
        for row in self.lines()[:MAX_ROWS]:
            shares = [f"{100 * row.shares.get(rank, 0.0):.0f} %" for rank in self.ranks]
            rows.append([row.place, *shares, row.line.source[:60]])
        return table_of("lines", rows, code=True)

    def _ipython_display_(self) -> None:
        """Show the live view if widgets are available. Otherwise, let IPython show the static form."""
        shown = False
        if self.paths:
            with suppress(Exception):  # An error in the view must not hide the findings.
                shown = import_module(_VIEW).show(self)
        if not shown:
            raise NotImplementedError  # This makes IPython show the text and the HTML.


def _compress(path: Path, file: Path) -> None:
    if path.name.endswith(".gz"):
        if path != file:
            shutil.copyfile(path, file)
        return
    with path.open("rb") as source, gzip.open(file, "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target, 1 << 20)
